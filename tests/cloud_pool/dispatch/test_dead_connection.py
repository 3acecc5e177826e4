"""Connections that a NAT has dropped silently, and connections that are slow to open."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from causeway_server.cloud_pool.dispatch.discovery import TierEndpoints, parse_endpoint_address
from causeway_server.cloud_pool.dispatch.pool import Pool
from causeway_server.cloud_pool.upstreams.triton.client import TritonClient
from tests.cloud_pool.upstreams.test_triton_client import bed, two_pieces
from tests.waiting import until

from .test_repair import QUICK, leased


class Middle:
    """Forwards bytes between a client and `port`, until it drops its connections."""

    def __init__(self, port: int, delay_s: float = 0.0) -> None:
        self.connections = 0
        self._delay_s = delay_s
        self._port = port
        self._open: list[asyncio.Event] = []

    def forget(self) -> None:
        """Stop forwarding without closing anything; new connections work."""
        for one in self._open:
            one.clear()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        passes = asyncio.Event()
        passes.set()
        self._open.append(passes)
        await asyncio.sleep(self._delay_s)
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            await asyncio.gather(_pass(reader, there_writer, passes), _pass(there_reader, writer, passes))
        finally:
            there_writer.close()
            writer.close()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passes: asyncio.Event) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            await passes.wait()
            writer.write(data)
    writer.close()


@asynccontextmanager
async def through(middle: Middle) -> AsyncIterator[Pool]:
    server = await asyncio.start_server(middle.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with anyio.create_task_group() as tasks:
        triton = TritonClient(f"127.0.0.1:{port}", tasks)
        pool = Pool(
            TierEndpoints("t", "m", (parse_endpoint_address(triton.address),)), lambda _: triton, settings=QUICK
        )
        tasks.start_soon(pool.watch)
        yield pool
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await triton.close()
    server.close()


def _port(triton: TritonClient) -> int:
    return int(triton.address.rpartition(":")[2])


@pytest.mark.slow
async def test_a_forgotten_connection_is_renewed() -> None:
    """The endpoint is silent until a new connection is made, within seconds; TCP alone would take minutes."""
    async with bed(two_pieces) as (_, direct):
        middle = Middle(_port(direct))
        async with through(middle) as pool:
            await leased(pool)
            assert middle.connections == 1
            middle.forget()
            lost = asyncio.ensure_future(leased(pool))
            await until(lambda: middle.connections >= 2)
            assert pool.healthy == 1
            assert "".join(delta.text for delta in await leased(pool)) == "ab"
            lost.cancel()
            await asyncio.gather(lost, return_exceptions=True)


async def test_a_slow_first_connection_is_no_failure() -> None:
    async with bed(two_pieces) as (_, direct), through(Middle(_port(direct), delay_s=0.4)) as pool:
        assert "".join(delta.text for delta in await leased(pool)) == "ab"
        assert pool.healthy == 1
