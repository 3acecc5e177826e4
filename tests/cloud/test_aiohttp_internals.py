"""What the gateway uses of aiohttp beyond its documented interface: a failure here names what a new aiohttp broke."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

from cloud_pool.http.aiohttp_internals import BufferedHeadResponse, has_response_begun, is_between_requests
from router.serving.request import send_continue

Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n"
VERSION = f"aiohttp {aiohttp.__version__}"


@asynccontextmanager
async def connected(handle: Handle) -> AsyncIterator[tuple[web.Server, asyncio.StreamReader, asyncio.StreamWriter]]:
    server = web.Server(handle)
    listening = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
    try:
        yield server, reader, writer
    finally:
        writer.close()
        listening.close()
        await server.shutdown(timeout=0.1)


async def test_waiter_tells_an_idle_connection_from_a_busy_one() -> None:
    busy: list[bool] = []

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        busy.append(not is_between_requests(request.protocol))
        return web.Response()

    async with connected(handle) as (server, reader, writer):
        writer.write(HEAD + b"\r\n")
        await reader.readuntil(b"\r\n\r\n")
        (connection,) = server.connections
        assert is_between_requests(connection), f"{VERSION}: RequestHandler._waiter is not set between two requests"
    assert busy == [True], f"{VERSION}: RequestHandler._waiter is set during a request"


async def test_send_headers_immediately_holds_the_head_back() -> None:
    written: list[int] = []

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        response = BufferedHeadResponse()
        await response.prepare(request)
        written.append(request.writer.output_size)
        await response.write(b"event")
        return response

    async with connected(handle) as (_, reader, writer):
        writer.write(HEAD + b"\r\n")
        first = await reader.read(65536)
    assert written == [0], f"{VERSION}: StreamResponse._send_headers_immediately has no effect"
    assert b"HTTP/1.1 200" in first
    assert b"event" in first, f"{VERSION}: the head and the first event are not one write"


async def test_output_size_shows_whether_a_response_has_begun() -> None:
    begun: list[bool] = []

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        begun.append(has_response_begun(request))
        send_continue(request)
        begun.append(has_response_begun(request))
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"x")
        begun.append(has_response_begun(request))
        return response

    async with connected(handle) as (_, reader, writer):
        writer.write(HEAD + b"Expect: 100-continue\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await reader.readuntil(b"\r\n\r\n")
    assert begun == [False, False, True], f"{VERSION}: the stream writer's output_size does not count written bytes"
