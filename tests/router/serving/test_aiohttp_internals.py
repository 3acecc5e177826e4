"""What the listener uses of aiohttp beyond its documented interface: a failure names what a new aiohttp changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from causeway_server.router.serving.aiohttp_connection import aiohttp_response, is_between_requests, make_request
from causeway_server.router.serving.request import has_response_begun, send_continue
from causeway_server.router.serving.responses import EventStream

Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n"
VERSION = f"aiohttp {aiohttp.__version__}"


@asynccontextmanager
async def connected(handle: Handle) -> AsyncIterator[tuple[web.Server, asyncio.StreamReader, asyncio.StreamWriter]]:
    server = web.Server(handle, request_factory=make_request)
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


async def test_the_message_of_a_request_can_have_another_url() -> None:
    paths: list[tuple[str, str, str]] = []

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        paths.append((request.path, request.query_string, request.raw_path))
        return web.Response()

    async with connected(handle) as (_, reader, writer):
        writer.write(b"GET //a//%2F/?b=%20//c HTTP/1.1\r\nHost: localhost\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
    assert paths == [("/a//", "b= //c", "//a//%2F/?b=%20//c")], f"{VERSION}: the path is not the url's"
    assert b"Server: causeway\r\n" in head, f"{VERSION}: BaseRequest._prepare_hook does not see every head"


@pytest.mark.parametrize("ours", [False, True])
async def test_output_size_shows_whether_a_response_has_begun(ours: bool) -> None:
    """Of a response of aiohttp's, and of one that is written here."""
    begun: list[bool] = []

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        begun.append(has_response_begun(request))
        send_continue(request)
        begun.append(has_response_begun(request))
        if ours:
            stream = EventStream(request, "")
            stream.send(b"x")
            begun.append(has_response_begun(request))
            return aiohttp_response(stream)
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
