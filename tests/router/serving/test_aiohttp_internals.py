"""One test per private attribute of aiohttp that the listener uses: a failure names what a new aiohttp changed."""

from __future__ import annotations

import asyncio

from aiohttp import web

from router.serving.listener import is_between_requests, make_request


async def test_waiter_tells_an_idle_connection_from_a_busy_one() -> None:
    idle: list[bool] = []

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        idle.append(is_between_requests(request.protocol))
        return web.Response()

    handler = web.Server(handle)
    server = await asyncio.get_running_loop().create_server(handler, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    try:
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        idle += [is_between_requests(connection) for connection in handler.connections]
    finally:
        writer.close()
        server.close()
    assert idle == [False, True], "RequestHandler._waiter no longer tells an idle connection from a busy one"


async def test_the_message_of_a_request_can_have_another_url() -> None:
    paths: list[tuple[str, str, str]] = []

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        paths.append((request.path, request.query_string, request.raw_path))
        return web.Response()

    handler = web.Server(handle, request_factory=make_request)
    server = await asyncio.get_running_loop().create_server(handler, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    try:
        writer.write(b"GET //a//%2F/?b=%20//c HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
    finally:
        writer.close()
        server.close()
    assert paths == [("/a//", "b= //c", "//a//%2F/?b=%20//c")], "RawRequestMessage.url is not where the path comes from"
