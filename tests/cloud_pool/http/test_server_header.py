"""No response names the software behind it by version: neither answers nor errors, at none of the gateway's ports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import anyio
import pytest

from causeway_server.cloud_pool.app import App, build
from causeway_server.cloud_pool.config import Config
from causeway_server.cloud_pool.http.config import ServerConfig

from ..unreachable import unreachable_tier

PATIENCE_S = 60.0
CHAT = b'{"model":"large","messages":[{"role":"user","content":"hello"}]}'
UPGRADE = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: " + b"A" * 22
REQUESTS = {
    "answer": (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", 200),
    "document": (b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n", 200),
    "not ready": (b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n", 503),
    "no such path": (b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
    "no tier answers": (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(CHAT), CHAT),
        503,
    ),
    "live session": (b"GET /v1/realtime?model=large HTTP/1.1\r\nHost: localhost\r\n" + UPGRADE + b"==\r\n\r\n", 101),
    "no HTTP": (b"hello\r\n\r\n", 400),
}
TO_OPERATORS = {
    "metrics": (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", 200),
    "not ready": (b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n", 503),
    "no token": (b"POST /drain HTTP/1.1\r\nHost: localhost\r\n\r\n", 401),
    "rebound": (b"GET /metrics HTTP/1.1\r\nHost: evil.example\r\n\r\n", 421),
    "no HTTP": (b"hello\r\n\r\n", 400),
}


@asynccontextmanager
async def gateway() -> AsyncIterator[App]:
    async with anyio.create_task_group() as tasks:
        app = build(Config(server=ServerConfig(port=0), tiers=(unreachable_tier(),)), tasks)
        await app.start()
        with anyio.fail_after(PATIENCE_S):
            yield app
        await app.stop()
    await app.close()


async def head_of(url: str, sent: bytes) -> tuple[int, dict[str, str]]:
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(sent)
        status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
    finally:
        writer.close()
    return int(status.split()[1]), dict(line.lower().split(": ", 1) for line in lines)


@pytest.mark.parametrize("name", REQUESTS)
async def test_the_public_address_names_no_versions(name: str) -> None:
    sent, expected = REQUESTS[name]
    async with gateway() as app:
        status, fields = await head_of(app.url, sent)
    assert (status, fields["server"]) == (expected, "causeway")


@pytest.mark.parametrize("name", TO_OPERATORS)
async def test_the_operators_address_names_no_versions(name: str) -> None:
    sent, expected = TO_OPERATORS[name]
    async with gateway() as app:
        status, fields = await head_of(app.operator_url, sent)
    assert (status, fields["server"]) == (expected, "causeway")
