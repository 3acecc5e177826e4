"""Devices that store responses, and the official client of OpenAI that speaks to them."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai

from causeway_server.edge_node.config.schema import KeyConfig, ServerConfig

from ..device import Device, running

KEYS = ("kiosk", "till")
SERVER = ServerConfig(
    port=0, drain_s=1.0, keys=tuple(KeyConfig(name, hashlib.sha256(name.encode()).hexdigest()) for name in KEYS)
)


def client_of(device: Device, key: str = "kiosk", tags: str = "edge") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{device.app.port}/v1",
        api_key=key,
        max_retries=0,
        timeout=30,
        default_headers={"x-causeway-tags": tags} if tags else {},
    )


@asynccontextmanager
async def storing(folder: Path, **settings: Any) -> AsyncIterator[tuple[Device, openai.AsyncOpenAI]]:
    """A device with two keys, and the first one's client."""
    async with running(folder, **{"server": SERVER, **settings}) as device, client_of(device) as client:
        yield device, client


def conversation_of(device: Device) -> list[tuple[str, str]]:
    """Return role and text of the messages that the engine was asked last."""
    return [(one.role, text_of(one.content)) for one in device.engine.calls[-1].request.messages]


def text_of(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
