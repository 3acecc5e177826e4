"""A client that leaves before its body is read is gone: its request is no fault of the server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web

from causeway_server.router.errors import ClientGone
from causeway_server.router.serving.request import arrived_body, read_upload, receive_body
from tests.waiting import until

BODY = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\nx\r\n--b--\r\n'
HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\nContent-Length: %d\r\n\r\n"


async def arrived(http: web.BaseRequest) -> object:
    return arrived_body(http, 1024)


async def received(http: web.BaseRequest) -> object:
    return await receive_body(http, 1024, 60.0, lambda _: None)


async def uploaded(http: web.BaseRequest) -> object:
    async def write(_: bytes) -> None: ...

    return await read_upload(http, write, 60.0)


@pytest.mark.parametrize(
    ("read", "sent"),
    [(arrived, BODY), (received, BODY), (received, BODY[:9]), (uploaded, BODY[:9]), (uploaded, BODY[:70])],
)
async def test_a_client_that_left_is_gone(read: Callable[[web.BaseRequest], Awaitable[object]], sent: bytes) -> None:
    outcome: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    async def handle(http: web.BaseRequest) -> web.StreamResponse:
        await until(lambda: http.transport is None)
        try:
            outcome.set_result(await read(http))
        except Exception as error:
            outcome.set_result(error)
        return web.Response()

    server = web.Server(handle)
    listening = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    try:
        _, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
        writer.write(HEAD % len(BODY) + sent)
        await writer.drain()
        writer.close()
        assert isinstance(await outcome, ClientGone)
    finally:
        listening.close()
        await server.shutdown(1.0)
