"""Devices that take uploads, and the official client of OpenAI that speaks to them."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai

from causeway_server.edge_node.clock import Clock
from causeway_server.edge_node.config.schema import DeviceFilesConfig, KeyConfig, ServerConfig
from tests.models.parts.test_files import ALL

from ..device import Answer, Device, running

ACCEPTING = DeviceFilesConfig(accept=True)
KEYS = ("kiosk", "till")


def server_of_keys(**more: Any) -> ServerConfig:
    keys = tuple(KeyConfig(name, hashlib.sha256(name.encode()).hexdigest()) for name in KEYS)
    return ServerConfig(port=0, drain_s=1.0, keys=keys, **more)


@asynccontextmanager
async def filing(folder: Path, **settings: Any) -> AsyncIterator[tuple[Device, openai.AsyncOpenAI]]:
    """A device that takes uploads, and a client of it."""
    accepting: dict[str, Any] = {"files": ACCEPTING, "encoders": ALL} | settings
    async with running(folder, **accepting) as device, client_of(device) as client:
        yield device, client


def client_of(device: Device, key: str = "kiosk") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{device.app.port}/v1", api_key=key, max_retries=0)


def folder_of(device: Device) -> Path:
    return Path(device.app.config.state_dir) / "files"


def contents(folder: Path) -> list[Path]:
    """The uploaded files on the disk, drafts included."""
    return sorted(path for path in folder.iterdir() if path.name != "clock.json") if folder.is_dir() else []


async def post_form(device: Device, body: bytes, boundary: str = "b", headers: Mapping[str, str] = {}) -> Answer:
    """Send a form as it stands."""
    sent = {"Content-Type": f"multipart/form-data; boundary={boundary}", **headers}
    async with device.session.post("/v1/files", data=body, headers=sent) as response:
        return Answer(response.status, dict(response.headers), await response.read())


def form(*fields: tuple[str, bytes], boundary: str = "b") -> bytes:
    """A form of fields: what stands after `form-data; `, and the value."""
    parts = [
        f"--{boundary}\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode() + value + b"\r\n"
        for head, value in fields
    ]
    return b"".join(parts) + f"--{boundary}--\r\n".encode()


async def post(device: Device, path: str, body: object, headers: Mapping[str, str] = {}) -> Answer:
    async with device.session.post(path, json=body, headers=dict(headers)) as response:
        return Answer(response.status, dict(response.headers), await response.read())


def stands_still(start: float = 1000.0) -> tuple[list[float], Clock]:
    """A clock and its hand: `[monotonic, unix]`, s."""
    now = [start, 1_700_000_000.0]
    return now, Clock(monotonic=lambda: now[0], unix=lambda: now[1], boot_id="boot-1")


__all__ = ["ACCEPTING", "KEYS", "aiohttp", "client_of", "contents", "filing", "folder_of", "form", "post", "post_form"]
