"""One gRPC call in its own task, against a gRPC server: order, ends, leaving, and that leaving leaks nothing."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc
import psutil
import pytest
from anyio import create_task_group
from tritonclient.grpc import service_pb2, service_pb2_grpc

from cloud_pool.upstreams.triton.connection import Connection
from cloud_pool.upstreams.triton.grpc_stream import CallCancelled, GrpcStream

KB = 1024


class Server(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Streams `count` messages of `size` bytes, one to a request named "short"; then ends, or fails with `fault`."""

    def __init__(self, count: int, size: int = 1, fault: grpc.StatusCode | None = None) -> None:
        self.count, self.size, self.fault = count, size, fault
        self.ended = asyncio.Event()
        self.written: dict[str, int] = {}

    async def ModelStreamInfer(self, requests, context):  # type: ignore[no-untyped-def]
        try:
            async for request in requests:
                for at in range(1 if request.id == "short" else self.count):
                    self.written[request.id] = at + 1
                    yield service_pb2.ModelStreamInferResponse(error_message=f"{request.id} {at} " + "x" * self.size)
                if self.fault is not None:
                    await context.abort(self.fault, "out of luck")
                return
        finally:
            self.ended.set()


@asynccontextmanager
async def serving(server: Server) -> AsyncIterator[Connection]:
    running = grpc.aio.server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(server, running)
    port = running.add_insecure_port("127.0.0.1:0")
    await running.start()
    async with connected(port) as connection:
        yield connection
    await running.stop(None)


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Connection]:
    async with create_task_group() as tasks:
        connection = Connection(f"127.0.0.1:{port}", tasks)
        yield connection
        await connection.close()


def begin(connection: Connection, name: str = "a") -> GrpcStream:
    return GrpcStream(connection.stream_infer(service_pb2.ModelInferRequest(id=name), metadata=(), timeout_s=60.0))


async def test_messages_come_in_order_and_then_nothing() -> None:
    """More of them than are read ahead, to a reader that takes its time."""
    async with serving(Server(count=200)) as connection:
        stream = begin(connection)
        said = []
        while (message := await stream.next()) is not None:
            said.append(int(message.error_message.split()[1]))
        assert said == list(range(200))
        assert not stream.connect_failed
        assert await stream.next() is None
        await stream.ended()


async def test_a_slow_reader_holds_the_server_back() -> None:
    """Nothing is piled up here for a reader that does not read, while others are served."""
    server = Server(count=2000, size=64 * KB)
    async with serving(server) as connection:
        stream = begin(connection)
        assert await stream.next() is not None
        for _ in range(100):
            other = begin(connection, "short")
            assert await other.next() is not None
            assert await other.next() is None
        assert server.written["a"] < 400
        stream.cancel()
        await stream.ended()


async def test_the_servers_fault_comes_after_its_messages() -> None:
    """What was said before the end is still given; a server that said something did not refuse the connection."""
    async with serving(Server(count=2, fault=grpc.StatusCode.UNAVAILABLE)) as connection:
        stream = begin(connection)
        assert await stream.next() is not None
        assert await stream.next() is not None
        with pytest.raises(grpc.aio.AioRpcError, match="out of luck"):
            await stream.next()
        assert not stream.connect_failed


async def test_a_connection_lost_before_the_first_message_is_no_refusal() -> None:
    """The request may have arrived: whoever tries again must know."""
    arrived = asyncio.Event()

    class Silent(Server):
        async def ModelStreamInfer(self, requests, context):  # type: ignore[no-untyped-def]
            arrived.set()
            await asyncio.Event().wait()
            yield

    running = grpc.aio.server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Silent(0), running)
    port = running.add_insecure_port("127.0.0.1:0")
    await running.start()
    async with connected(port) as connection:
        stream = begin(connection)
        await arrived.wait()
        await running.stop(None)
        with pytest.raises((grpc.aio.AioRpcError, CallCancelled)):
            await stream.next()
        assert not stream.connect_failed


async def test_an_unreachable_server_is_a_fault() -> None:
    """Nobody listens there: the first message is the fault, and nothing was sent."""
    async with connected(port=1) as connection:
        stream = begin(connection)
        with pytest.raises(grpc.aio.AioRpcError):
            await stream.next()
        assert stream.connect_failed


async def test_leaving_ends_the_servers_work() -> None:
    """The call is cancelled; whoever still waits for a message is told so."""
    server = Server(count=1_000_000, size=KB)
    async with serving(server) as connection:
        stream = begin(connection)
        assert await stream.next() is not None
        stream.cancel()
        with pytest.raises(CallCancelled):
            await stream.next()
        await stream.ended()
        await server.ended.wait()


async def test_a_cancelled_wait_leaves_the_read_alone() -> None:
    """Only the wait is cancelled: the next one gets the message."""
    server = Server(count=3)
    async with serving(server) as connection:
        stream = begin(connection)
        waiting = asyncio.ensure_future(stream.next())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        message = await stream.next()
        assert message is not None
        assert message.error_message.startswith("a 0")


async def test_leaving_leaks_nothing() -> None:
    """Calls left in the middle of a flood of large messages: the process keeps none of these."""
    async with serving(Server(count=1_000_000, size=256 * KB)) as connection:

        async def left_in_the_middle(times: int) -> None:
            for _ in range(times):
                stream = begin(connection)
                waiting = asyncio.ensure_future(stream.next())
                await waiting
                waiting = asyncio.ensure_future(stream.next())
                await asyncio.sleep(0)
                waiting.cancel()
                stream.cancel()
                await stream.ended()

        async def growth() -> int:
            before = psutil.Process().memory_info().rss
            await left_in_the_middle(100)
            gc.collect()
            return psutil.Process().memory_info().rss - before

        await left_in_the_middle(60)
        gc.collect()
        # A leak is there each time; what the rest of the process does on a busy machine is not.
        grown = min([await growth() for _ in range(3)])
        assert grown < 13 * 256 * KB, f"{grown / KB:.0f} KB kept"


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 10, 100])
async def test_leaving_at_the_very_start_leaves_no_task(turns: int) -> None:
    """Whoever leaves before the request is on its way, in whichever turn of the loop, waits for nothing, and neither
    does the call's own task."""
    async with serving(Server(count=1)) as connection:
        stream = begin(connection)
        waiting = asyncio.ensure_future(stream.next())
        for _ in range(turns):
            await asyncio.sleep(0)
        stream.cancel()
        async with asyncio.timeout(20.0):
            await stream.ended()
            with suppress(CallCancelled):
                await waiting
