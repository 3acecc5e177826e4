"""Many connections at once: idle ones make room for new ones, and TCP and the Unix socket have places of their own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from causeway_server.edge_node.config.schema import ServerConfig
from causeway_server.router.serving.listener import Address, ConnectionTable, Listener
from causeway_server.router.web_origins import WebOrigins
from tests.waiting import until

from ..device import running
from .test_server import BODY, GOOD, HEAD, JSON, Raw, code, connected

ASK = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Server:
    """A listener with two connections per address. A request waits for `gate`; `now` is its clock."""

    def __init__(self, socket: Path) -> None:
        self.now = 0.0
        self.gate = asyncio.Event()
        self.gate.set()
        self.tcp, self.unix = (ConnectionTable(name, 2, lambda: self.now) for name in ("tcp", "unix"))
        self.socket = socket
        origins = WebOrigins()
        tcp, unix = Address(self.tcp, origins, "", "127.0.0.1"), Address(self.unix, origins, "", socket=str(socket))
        self.listener = Listener(self._handle, (tcp, unix), read_timeout_s=20.0)

    @property
    def port(self) -> int | None:
        return self.listener.port

    async def _handle(self, http: web.BaseRequest) -> web.Response:
        await self.gate.wait()
        return web.Response(text="fine")


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    server = Server(tmp_path / "edge.sock")
    await server.listener.start()
    yield server
    server.gate.set()
    await server.listener.close()


@asynccontextmanager
async def crowd(port: int | None, start: bytes = b"", size: int = 1100) -> AsyncIterator[list[Raw]]:
    """Many open connections that say no more than `start`, the oldest first."""
    async with AsyncExitStack() as stack:
        clients = []
        for _ in range(size):
            clients.append(await stack.enter_async_context(connected(port)))
            if start:
                await clients[-1].send(start)
        yield clients


@pytest.mark.slow
@pytest.mark.parametrize("start", [b"", HEAD], ids=["silent", "half a head"])
async def test_more_idle_connections_than_the_limit_lock_no_client_out(tmp_path: Path, start: bytes) -> None:
    path = tmp_path / "edge.sock"
    async with running(tmp_path, server=ServerConfig(port=0, socket=str(path), read_timeout_s=60.0)) as device:
        async with crowd(device.app.port, start) as clients, connected(device.app.port) as late:
            await late.send(GOOD)
            assert (await late.answer())[0] == 200
            assert await clients[0].closed(), "the oldest made room"
            assert await over_socket(path) == 200
            assert not clients[-1].reader.at_eof()
        metrics = (await device.get("/metrics")).body
        assert b'causeway_edge_refused_connections_total{address="tcp"} 0.0' in metrics
        assert b'causeway_edge_closed_idle_connections_total{address="unix"} 0.0' in metrics


async def over_socket(path: Path) -> int:
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as session,
        session.post("http://edge/v1/chat/completions", data=BODY, headers=JSON) as response,
    ):
        return response.status


async def test_a_silent_connection_makes_room_before_one_that_has_sent_a_request(server: Server) -> None:
    async with connected(server.port) as client:
        await client.send(ASK)
        assert await client.answer() == (200, b"fine")
        async with connected(server.port) as silent, connected(server.port) as late:
            await late.send(ASK)
            assert await late.answer() == (200, b"fine")
            assert await silent.closed()
            await client.send(ASK)
            assert await client.answer() == (200, b"fine")


async def test_between_two_requests_the_one_that_has_been_idle_longest_makes_room(server: Server) -> None:
    async with connected(server.port) as first, connected(server.port) as second:
        for client in (first, second, first):
            await client.send(ASK)
            assert await client.answer() == (200, b"fine")
        async with connected(server.port) as late:
            await late.send(ASK)
            assert await late.answer() == (200, b"fine")
        assert await second.closed()
        await first.send(ASK)
        assert await first.answer() == (200, b"fine")


async def test_a_connection_is_refused_only_if_every_other_one_has_a_request(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """A 429 at once, counted, and logged at most once a minute. The Unix socket still has room."""
    server.gate.clear()
    with caplog.at_level(logging.WARNING):
        async with connected(server.port) as first, connected(server.port) as second:
            for client in (first, second):
                await client.send(ASK)
            await until(lambda: server.listener.in_flight == 2)
            for minute in (0, 0, 0, 1):
                server.now = minute * 60.0
                async with connected(server.port) as late:
                    status, body = await late.answer()
                    assert (status, code(body)) == (429, "queue_full")
                    assert await late.closed()
            reader, writer = await asyncio.open_unix_connection(server.socket)
            writer.write(ASK)
            await until(lambda: server.listener.in_flight == 3)
            server.gate.set()
            assert (await Raw(reader, writer).answer())[0] == 200
            writer.close()
            for client in (first, second):
                assert await client.answer() == (200, b"fine")
    assert server.tcp.stats().refused == 4
    assert [record.getMessage().split()[1] for record in caplog.records] == ["1", "3"]
    assert "server.max_connections" in caplog.records[0].getMessage()


async def test_closed_connections_make_room(server: Server) -> None:
    for _ in range(3):
        async with connected(server.port) as one, connected(server.port) as two:
            for client in (one, two):
                await client.send(ASK)
                assert await client.answer() == (200, b"fine")
        await until(lambda: server.tcp.stats().open == 0)
    assert server.tcp.stats().closed_idle == 0


async def test_a_request_that_the_end_of_a_drain_cuts_is_told_so(server: Server) -> None:
    server.gate.clear()
    async with connected(server.port) as client:
        await client.send(ASK)
        await until(lambda: server.listener.in_flight == 1)
        await server.listener.close()
        status, body = await client.answer()
        assert (status, code(body)) == (503, "draining")
        assert await client.closed()
