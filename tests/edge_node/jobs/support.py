"""Submit jobs to a real daemon, and wait for what becomes of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from causeway_server.edge_node.clock import Clock, system_clock
from causeway_server.edge_node.config.schema import OutboxConfig
from causeway_server.edge_node.jobs.store import JobOutbox
from causeway_server.router.openai.upstream.decode import Event, SSEParser
from tests.waiting import until

from ..device import Answer, Device
from ..storage.encrypted import ReadableKeys
from .cloud import JobCloud

PROMPT = OutboxConfig(jitter_s=0.0, cloud_rate_per_s=1000.0)
"""Nothing is held back."""
ENDED = {"succeeded", "failed", "dead", "cancelled", "expired"}


def away() -> JobCloud:
    """A cloud whose address is known, and which is not there."""
    cloud = JobCloud()
    cloud.be_away()
    return cloud


async def request(
    device: Device, method: str, path: str, body: object = None, headers: Mapping[str, str] = {}
) -> Answer:
    data = None if body is None else json.dumps(body).encode()
    sent = {"Content-Type": "application/json", **headers}
    async with device.session.request(method, path, data=data, headers=sent) as response:
        return Answer(response.status, dict(response.headers), await response.read())


async def submit(
    device: Device,
    text: str = "hello",
    *,
    tags: str = "",
    key: str = "",
    headers: Mapping[str, str] = {},
    **fields: object,
) -> Answer:
    headers = {**headers, **({"x-causeway-tags": tags} if tags else {}), **({"Idempotency-Key": key} if key else {})}
    body = {"model": "auto", "messages": [{"role": "user", "content": text}], **fields}
    return await request(device, "POST", "/v1/jobs", body, headers)


async def accepted(device: Device, text: str = "hello", **fields: Any) -> str:
    """Submit a job, which must be accepted; its id."""
    answer = await submit(device, text, **fields)
    assert answer.status == 202, answer.body
    return str(answer.json["id"])


async def view(device: Device, job: str) -> dict[str, Any]:
    answer = await request(device, "GET", f"/v1/jobs/{job}")
    assert answer.status == 200, answer.body
    return answer.json


async def ended(device: Device, job: str) -> dict[str, Any]:
    """Wait for the end of a job."""
    async with asyncio.timeout(60.0):
        while (found := await view(device, job))["status"] not in ENDED:  # noqa: ASYNC110 -- what ends it has no event here
            await asyncio.sleep(0.01)
    return found


async def opened(
    folder: Path,
    config: OutboxConfig | None = None,
    clock: Clock | None = None,
    *,
    erase_after_s: float = 0.0,
    is_readable: bool = False,
) -> JobOutbox:
    """An outbox whose time counts. `is_readable`: without encryption."""
    keys = ReadableKeys(folder) if is_readable else None
    store = JobOutbox(folder, config or OutboxConfig(), clock or system_clock(), erase_after_s=erase_after_s, keys=keys)
    store.start()
    await store.open()
    return store


def readable(folder: Path, texts: Sequence[bytes]) -> list[bytes]:
    """Those of `texts` that are in a file of the folder."""
    content = b"".join(path.read_bytes() for path in folder.iterdir())
    return [text for text in texts if text in content]


async def erased(folder: Path, texts: Sequence[bytes]) -> None:
    """Wait until no file of the folder has any of `texts`."""
    await until(lambda: not readable(folder, texts))


def text_of(found: Mapping[str, Any]) -> str:
    return str(found["result"]["choices"][0]["message"]["content"])


async def all_events(response: aiohttp.ClientResponse) -> AsyncIterator[Event]:
    """The events of a stream until its end."""
    assert response.status == 200
    parser = SSEParser()
    async with asyncio.timeout(60.0):
        async for data in response.content.iter_any():
            for event in parser.feed(data):
                yield event


async def read_event(response: aiohttp.ClientResponse) -> tuple[str, str]:
    """The id and the type of the next event."""
    async with asyncio.timeout(60.0):
        block = await response.content.readuntil(b"\n\n")
    (event,) = SSEParser().feed(block)
    return event.id.decode(), event.type.decode()


def delta_of(event: Event) -> str:
    return str(json.loads(event.data).get("text", ""))
