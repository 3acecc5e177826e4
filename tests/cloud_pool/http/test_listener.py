"""The gateway's socket and misbehaving clients. There is no Triton: no request gets that far."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import anyio
import pytest

from causeway_server.cloud_pool.app import App, build
from causeway_server.cloud_pool.config import Config
from causeway_server.cloud_pool.http.config import ServerConfig

from ..unreachable import unreachable_tier

pytestmark = pytest.mark.slow

PATIENCE_S = 60.0
CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@asynccontextmanager
async def gateway(read_timeout_s: float = 10.0, host: str = "127.0.0.1") -> AsyncIterator[App]:
    server = ServerConfig(host=host, port=0, read_timeout_s=read_timeout_s, max_body_bytes=1000)
    tier = unreachable_tier()
    async with anyio.create_task_group() as tasks:
        app = build(Config(server=server, tiers=(tier,)), tasks)
        await app.start()
        with anyio.fail_after(PATIENCE_S):
            yield app
        await app.stop()
    await app.close()


async def read_to_end(reader: asyncio.StreamReader) -> bytes:
    """Read until the connection ends, also by a reset, as where bytes of ours were not read."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            received += data
    return received


async def talk(app: App, sent: bytes, *, until_closed: bool = True) -> bytes:
    """Send bytes and return the response; our side of the connection stays open."""
    url = urlsplit(app.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    try:
        writer.write(sent)
        return await read_to_end(reader) if until_closed else await reader.readuntil(b"}")
    finally:
        writer.close()


async def is_alive(app: App) -> bool:
    return b" 200 " in await talk(app, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", until_closed=False)


def error_of(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"\x16\x03\x01 not http\r\n\r\n", 400, "invalid_value"),
        (b"GET / HTTP/9.9\r\n\r\n", 400, "invalid_value"),
        (b"GET /healthz HTTP/1.1\r\nbig: " + b"x" * 100_000 + b"\r\n\r\n", 400, "invalid_value"),
        (b"GET /healthz HTTP/1.1\r\n" + b"a: b\r\n" * 500 + b"\r\n", 400, "invalid_value"),
        (CHAT + b"Content-Length: -5\r\n\r\n", 400, "invalid_value"),
        (CHAT + b"Content-Length: 99999999\r\nConnection: close\r\n\r\n", 413, "body_too_large"),
        (CHAT + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\nzz\r\n", 400, "invalid_value"),
        (CHAT + b"Connection: close\r\nContent-Length: 2\r\n\r\n{}", 400, "missing_required_parameter"),
    ],
)
async def test_malformed_http_gets_an_error_object(sent: bytes, status: int, code: str) -> None:
    """The connection ends, and the next request is answered."""
    async with gateway() as app:
        assert error_of(await talk(app, sent)) == (status, code)
        assert await is_alive(app)


@pytest.mark.slow
async def test_incomplete_body_is_408() -> None:
    async with gateway(read_timeout_s=0.2) as app:
        answer = await talk(app, CHAT + b"Connection: close\r\nContent-Length: 50\r\n\r\n{")
        assert error_of(answer) == (408, "request_timeout")
        assert await is_alive(app)


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HT", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"])
async def test_connection_without_a_whole_head_is_closed(sent: bytes) -> None:
    async with gateway(read_timeout_s=0.2) as app:
        await talk(app, sent)
        assert await is_alive(app)


async def test_expect_continue_is_answered() -> None:
    """A client that waits for it is told to send the body; one that did not wait needs no word."""
    head = CHAT + b"Expect: 100-continue\r\nConnection: close\r\nContent-Length: 2\r\n\r\n"
    async with gateway() as app:
        url = urlsplit(app.url)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        writer.write(head)
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"{}")
        assert error_of(await read_to_end(reader)) == (400, "missing_required_parameter")
        writer.close()
        assert error_of(await talk(app, head + b"{}")) == (400, "missing_required_parameter")
