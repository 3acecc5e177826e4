"""One test per private attribute of aiohttp that `edge_node.http` uses: a failure names what a new aiohttp changed."""

from __future__ import annotations

import asyncio

from aiohttp import web

from edge_node.http.aiohttp_internals import DeferredHeadStream, is_between_requests


async def first_read(response: web.StreamResponse, wait_for_head: bool) -> bytes:
    """What a client has received before the first chunk is written."""
    prepared, go_on = asyncio.Event(), asyncio.Event()

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        await response.prepare(request)
        prepared.set()
        await go_on.wait()
        await response.write(b"chunk")
        return response

    server = await asyncio.get_running_loop().create_server(web.Server(handle), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    try:
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await prepared.wait()
        if not wait_for_head:
            go_on.set()
        received = await reader.read(4096)
        go_on.set()
        return received
    finally:
        writer.close()
        server.close()


async def test_send_headers_immediately_false_defers_the_head_to_the_first_chunk() -> None:
    received = await first_read(DeferredHeadStream(), wait_for_head=False)
    assert b"chunk" in received, "aiohttp no longer honours StreamResponse._send_headers_immediately"


async def test_without_send_headers_immediately_false_the_head_is_sent_alone() -> None:
    """Otherwise the attribute is not needed any more and can be dropped."""
    received = await first_read(web.StreamResponse(), wait_for_head=True)
    assert received.endswith(b"\r\n\r\n")


def test_send_headers_immediately_exists() -> None:
    exists = web.StreamResponse._send_headers_immediately  # noqa: SLF001 -- the attribute is what is tested
    assert exists is True, "StreamResponse._send_headers_immediately is gone"


async def test_waiter_tells_an_idle_connection_from_a_busy_one() -> None:
    idle: list[bool] = []

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        idle.append(is_between_requests(request.protocol))
        return web.Response()

    handler = web.Server(handle)
    server = await asyncio.get_running_loop().create_server(handler, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    try:
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        idle += [is_between_requests(connection) for connection in handler.connections]
    finally:
        writer.close()
        server.close()
    assert idle == [False, True], "RequestHandler._waiter no longer tells an idle connection from a busy one"
