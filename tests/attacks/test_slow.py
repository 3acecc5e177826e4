"""Clients that send a byte now and then to hold a connection open."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest

from causeway_server.cloud_pool.app import App
from tests.cloud_pool.http.test_listener import CHAT, error_of, gateway, is_alive, read_to_end

pytestmark = pytest.mark.slow

LIMIT_S = 0.4
DRIP_S = 0.02


@asynccontextmanager
async def dripping(app: App, start: bytes, drop: bytes) -> AsyncIterator[asyncio.StreamReader]:
    """A connection on which, after `start`, a drop comes again and again, until the other side has had enough."""
    url = urlsplit(app.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write(start)

    async def drip() -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(drop)
                await writer.drain()
                await asyncio.sleep(DRIP_S)

    task = asyncio.ensure_future(drip())
    try:
        yield reader
    finally:
        task.cancel()
        writer.close()


@pytest.mark.parametrize(
    ("start", "drop"),
    [
        (b"", b"G"),
        (b"GET /", b"a"),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n", b"a: b\r\n"),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nlong: ", b"b"),
        (b"\r\n", b"\r\n"),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\r\n"),
    ],
)
async def test_dripping_head_ends_the_connection(start: bytes, drop: bytes) -> None:
    """The timeout is for the whole head, the first or a later one."""
    async with gateway(read_timeout_s=LIMIT_S) as app:
        async with dripping(app, start, drop) as reader:
            answer = await read_to_end(reader)
        assert b" 200 " not in answer or start.endswith(b"\r\n\r\n")
        assert await is_alive(app)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "drop"),
    [
        (b"Content-Length: 900\r\n\r\n{", b" "),
        (b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        (b"Transfer-Encoding: chunked\r\n\r\n100\r\n", b" "),
    ],
)
async def test_dripping_body_is_408(head: bytes, drop: bytes) -> None:
    """The timeout is for the whole body."""
    async with gateway(read_timeout_s=LIMIT_S) as app:
        async with dripping(app, CHAT + b"Connection: close\r\n" + head, drop) as reader:
            answer = await read_to_end(reader)
        assert error_of(answer) == (408, "request_timeout")
        assert await is_alive(app)


@pytest.mark.slow
async def test_endless_chunked_body_is_refused_at_the_limit() -> None:
    async with gateway() as app:
        head = b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
        async with dripping(app, CHAT + head, b"40\r\n" + b" " * 64 + b"\r\n") as reader:
            answer = await read_to_end(reader)
        assert error_of(answer) == (413, "body_too_large")


@pytest.mark.slow
async def test_many_slow_clients_do_not_affect_others() -> None:
    """Three hundred dripping connections: a proper request is answered, and all of them are closed."""
    async with gateway(read_timeout_s=1.0) as app, contextlib.AsyncExitStack() as stack:
        start = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
        slow = [await stack.enter_async_context(dripping(app, start, b"a")) for _ in range(300)]
        assert await is_alive(app)
        for answer in await asyncio.gather(*(read_to_end(reader) for reader in slow)):
            assert b" 200 " not in answer
        assert await is_alive(app)
