"""Connections that move to aiohttp while it is imported: the default executor holds the import until it is released."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest

from causeway_server.router.serving.listener import Connection
from tests.waiting import until

from .test_plain_connection import CHAT, CLOSING, Server, connected, read_to_end, serving

OTHER = CHAT.replace(b"/v1", b"//v1")


class HeldExecutor(ThreadPoolExecutor):
    """Runs nothing before it is released. `failure`: what each call raises instead."""

    def __init__(self) -> None:
        super().__init__(1)
        self.release = Event()
        self.calls = 0
        self.failure: Exception | None = None

    def submit(self, call: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        self.calls += 1

        def run() -> Any:
            self.release.wait()
            if self.failure is not None:
                raise self.failure
            return call(*args, **named)

        return super().submit(run)


@pytest.fixture
async def executor(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HeldExecutor]:
    monkeypatch.delitem(sys.modules, "causeway_server.router.serving.aiohttp_connection", raising=False)
    held = HeldExecutor()
    asyncio.get_running_loop().set_default_executor(held)
    yield held
    held.release.set()


async def moving(server: Server, writer: asyncio.StreamWriter, sent: bytes) -> None:
    """Send bytes that only aiohttp reads, and wait until the connection waits for it."""
    writer.write(sent)
    await until(lambda: server.listener.in_flight == 1)


async def test_other_requests_are_answered_while_aiohttp_is_imported(executor: HeldExecutor) -> None:
    async with serving() as server, connected(server) as (reader, writer), connected(server) as (plain, second):
        await moving(server, writer, OTHER)
        for _ in range(2):
            second.write(CHAT)
            await plain.readuntil(b"b'{}'")
        writer.write(CHAT)
        executor.release.set()
        for _ in range(2):
            await reader.readuntil(b"b'{}'")
        assert server.handled == [True, True, False, False]
        assert executor.calls == 1


async def test_a_client_that_leaves_meanwhile_is_forgotten(executor: HeldExecutor) -> None:
    async with serving() as server:
        async with connected(server) as (_, writer):
            await moving(server, writer, OTHER)
        await until(lambda: server.table.stats().open == 0)
        assert server.listener.in_flight == 0
        executor.release.set()
        async with connected(server) as (reader, writer):
            writer.write(OTHER)
            await reader.readuntil(b"b'{}'")
        assert server.handled == [False]


async def test_what_is_sent_meanwhile_waits_outside(executor: HeldExecutor) -> None:
    count = 5_000
    async with serving() as server, connected(server) as (reader, writer):
        await moving(server, writer, OTHER)
        writer.write(CHAT * count)
        (connection,) = server.listener.connections
        await until(lambda: connection.reading_paused)
        writer.write(CLOSING)
        executor.release.set()
        assert (await read_to_end(reader)).count(b"HTTP/1.1 200 ") == count + 2


async def test_half_a_head_does_not_get_more_time(executor: HeldExecutor) -> None:
    async with serving(read_timeout_s=0.05) as server, connected(server) as (reader, writer):
        await moving(server, writer, OTHER[:20])
        async with connected(server) as (idle, _):
            assert await read_to_end(idle) == b""  # its time passes after that of the other
        executor.release.set()
        assert await read_to_end(reader) == b""
        assert server.listener.in_flight == 0


async def test_a_drain_waits_for_a_request_that_aiohttp_has_not_seen(executor: HeldExecutor) -> None:
    async with serving() as server, connected(server) as (reader, writer):
        await moving(server, writer, OTHER.replace(b"{}", b"ww"))
        server.listener.stop_accepting()
        assert not await server.listener.drain(0.01)
        drained = asyncio.ensure_future(server.listener.drain(20.0))
        executor.release.set()
        await until(lambda: server.handled == [False])
        assert not drained.done()
        server.gate.set()
        assert await drained
        assert (await read_to_end(reader)).count(b"HTTP/1.1 200 ") == 1


async def test_an_import_that_fails_ends_the_connection_and_is_tried_again(executor: HeldExecutor) -> None:
    executor.failure = ImportError("no such library")
    executor.release.set()
    async with serving() as server:
        async with connected(server) as (reader, writer):
            writer.write(OTHER)
            assert await read_to_end(reader) == b""
        executor.failure = None
        async with connected(server) as (reader, writer):
            writer.write(OTHER)
            await reader.readuntil(b"b'{}'")


async def test_the_rest_of_a_body_that_comes_meanwhile_is_read_although_the_server_ends(executor: HeldExecutor) -> None:
    async with serving() as server, connected(server) as (reader, writer):
        writer.write(CHAT[:-1])
        (connection,) = await _connections(server)
        await until(lambda: not connection.is_idle)
        server.listener.stop_accepting()
        await until(lambda: server.listener.in_flight == 1)
        writer.write(CHAT[-1:])
        late = time.monotonic() + 0.06  # a request waits no longer for its rest
        await until(lambda: time.monotonic() > late)
        assert server.listener.in_flight == 1
        executor.release.set()
        assert (await read_to_end(reader)).count(b"HTTP/1.1 200 ") == 1
        assert await server.listener.drain(20.0)


async def _connections(server: Server) -> tuple[Connection, ...]:
    await until(lambda: len(server.listener.connections) == 1)
    return tuple(server.listener.connections)
