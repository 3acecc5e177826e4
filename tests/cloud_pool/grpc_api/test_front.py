"""Connections to the gRPC address: idle ones make room, and no tenant takes all calls."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc

from causeway_server.cloud_pool.config import Config
from causeway_server.cloud_pool.http.config import ServerConfig
from tests.waiting import until

from .served import Served, chat, connected, rest, serving, text_of

MANY = 8
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"  # with empty settings


async def open_silent(served: Served, stack: AsyncExitStack, address: str, sent: bytes = b"") -> asyncio.StreamReader:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.server.port, local_addr=(address, 0))
    stack.callback(writer.close)
    writer.write(sent)
    return reader


@pytest.mark.parametrize("sent", [b"", PREFACE], ids=["silent", "connected"])
async def test_idle_connections_without_a_token_lock_nobody_out(sent: bytes) -> None:
    """Three times as many as fit: calls begin before, amid and after them, on old and on new connections."""
    async with serving(max_connections=MANY) as served, AsyncExitStack() as stack:
        first = served.client.open()
        await first.write(chat())
        await until(lambda: served.calls.active == 1)
        quiet = await open_silent(served, stack, "127.0.0.2")
        for number in range(3 * MANY):
            await open_silent(served, stack, "127.0.0.1", sent)
            if number % MANY == MANY - 1:
                async with connected(served.server.address) as new:
                    assert text_of(await new.answer(chat())) == "my secret answer"
        assert served.server.connections <= MANY
        assert not quiet.at_eof()
        await first.done_writing()
        assert text_of(await rest(first)) == "my secret answer"


async def test_health_watch_makes_room() -> None:
    """A watch needs no token and never ends."""
    async with serving(max_connections=2) as served, AsyncExitStack() as stack:
        for _ in range(2):
            client = await stack.enter_async_context(connected(served.server.address))
            stub = health_pb2_grpc.HealthStub(client.channel)
            watch = stub.Watch(health_pb2.HealthCheckRequest())
            await watch.read()
        async with connected(served.server.address) as new:
            assert text_of(await new.answer(chat())) == "my secret answer"


async def test_connection_is_closed_where_every_other_one_has_a_call() -> None:
    async with serving(max_connections=1) as served, AsyncExitStack() as stack:
        call = served.client.open()
        await call.write(chat())
        await until(lambda: served.calls.active == 1)
        late = await open_silent(served, stack, "127.0.0.1")
        assert await late.read() == b""
        await call.done_writing()
        assert text_of(await rest(call)) == "my secret answer"
        async with connected(served.server.address) as new:
            assert text_of(await new.answer(chat())) == "my secret answer"


async def test_client_that_leaves_gives_its_connection_back() -> None:
    async with serving(max_connections=MANY) as served:
        for _ in range(2 * MANY):
            async with connected(served.server.address) as client:
                failure = await client.failure(client.call(b"\xff"))
                assert failure.status == StatusCode.INVALID_ARGUMENT
        await until(lambda: served.server.connections == 0)


async def test_calls_of_one_tenant_leave_room_for_others(tmp_path: Path) -> None:
    """Of eight calls a flood has four, and the quiet caller takes two beside them; an ended one makes room again."""
    tokens = tmp_path / "tokens"
    tokens.write_text("".join(f"{name} secret-{name}\n" for name in ("flood", "quiet", "new")))
    config = Config(server=ServerConfig(token_file=str(tokens)))

    async def begin(served: Served, name: str) -> Any:
        call = served.client.open(metadata=[("authorization", f"Bearer secret-{name}")])
        await call.write(chat())
        return call

    async with serving(config, max_calls=MANY) as served:
        flood = [await begin(served, "flood") for _ in range(MANY // 2)]
        await until(lambda: served.calls.active == MANY // 2)
        refused = await served.client.failure(await begin(served, "flood"))
        assert (refused.status, refused.error["code"]) == (StatusCode.RESOURCE_EXHAUSTED, "queue_full")
        others = [await begin(served, name) for name in ("quiet", "quiet", "new")]
        for call in (*others, *flood):
            await call.done_writing()
            assert text_of(await rest(call)) == "my secret answer"
        again = await begin(served, "flood")
        again.cancel()
        await until(lambda: served.calls.active == 0)
