"""One gRPC call in its own task against a gRPC server: order, ends, cancellation, and no leaks."""

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

from causeway_server.cloud_pool.upstreams.triton.connection import (
    CallCancelled,
    CallFailed,
    GrpcStream,
    TritonConnection,
)
from causeway_server.cloud_pool.upstreams.triton.protocol import INFER
from causeway_server.cloud_pool.upstreams.triton.tensors import read_response

KB = 1024


class Server(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Streams `count` messages of `size` bytes, one to a request named "short"; then ends, or fails with `error`."""

    def __init__(self, count: int, size: int = 1, error: grpc.StatusCode | None = None) -> None:
        self.count, self.size, self.error = count, size, error
        self.ended = asyncio.Event()
        self.written: dict[str, int] = {}

    async def ModelStreamInfer(self, requests, context):  # type: ignore[no-untyped-def]
        try:
            async for request in requests:
                for at in range(1 if request.id == "short" else self.count):
                    self.written[request.id] = at + 1
                    yield service_pb2.ModelStreamInferResponse(error_message=f"{request.id} {at} " + "x" * self.size)
                if self.error is not None:
                    await context.abort(self.error, "out of luck")
                return
        finally:
            self.ended.set()


@asynccontextmanager
async def serving(server: Server) -> AsyncIterator[TritonConnection]:
    running = grpc.aio.server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(server, running)
    port = running.add_insecure_port("127.0.0.1:0")
    await running.start()
    async with connected(port) as connection:
        yield connection
    await running.stop(None)


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[TritonConnection]:
    async with create_task_group() as tasks:
        connection = TritonConnection(f"127.0.0.1:{port}", tasks)
        yield connection
        connection.close()


def begin(connection: TritonConnection, name: str = "a") -> GrpcStream:
    return connection.call(INFER, service_pb2.ModelInferRequest(id=name).SerializeToString(), timeout_s=60.0)


async def test_messages_come_in_order_and_then_none() -> None:
    """More of them than are read ahead."""
    async with serving(Server(count=200)) as connection:
        stream = begin(connection)
        numbers = []
        while (message := await stream.next()) is not None:
            numbers.append(int(read_response(message).error_message.split()[1]))
        assert numbers == list(range(200))
        assert not stream.connect_failed
        assert await stream.next() is None
        await stream.ended()


async def test_slow_reader_holds_the_server_back() -> None:
    """Messages do not pile up here, and other calls are served meanwhile."""
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


async def test_servers_error_comes_after_its_messages() -> None:
    """A server that sent messages did accept the connection."""
    async with serving(Server(count=2, error=grpc.StatusCode.UNAVAILABLE)) as connection:
        stream = begin(connection)
        assert await stream.next() is not None
        assert await stream.next() is not None
        with pytest.raises(CallFailed, match="out of luck"):
            await stream.next()
        assert not stream.connect_failed


async def test_connection_lost_before_the_first_message_is_not_a_failed_connect() -> None:
    """The request may have arrived, which a retry must know."""
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
        with pytest.raises((CallFailed, CallCancelled)):
            await stream.next()
        assert not stream.connect_failed


async def test_unreachable_server_is_a_failed_connect() -> None:
    async with connected(port=1) as connection:
        stream = begin(connection)
        with pytest.raises(CallFailed):
            await stream.next()
        assert stream.connect_failed


async def test_cancel_ends_the_servers_work_and_wakes_the_reader() -> None:
    server = Server(count=1_000_000, size=KB)
    async with serving(server) as connection:
        stream = begin(connection)
        assert await stream.next() is not None
        stream.cancel()
        with pytest.raises(CallCancelled):
            await stream.next()
        await stream.ended()
        await server.ended.wait()


async def test_cancelled_wait_does_not_cancel_the_read() -> None:
    """The next wait gets the message."""
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
        assert read_response(message).error_message.startswith("a 0")


@pytest.mark.slow
async def test_cancel_in_mid_stream_leaks_no_memory() -> None:
    async with serving(Server(count=1_000_000, size=256 * KB)) as connection:

        async def cancel_in_mid_stream(times: int) -> None:
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
            await cancel_in_mid_stream(100)
            gc.collect()
            return psutil.Process().memory_info().rss - before

        await cancel_in_mid_stream(60)
        gc.collect()
        # The smallest of three: a leak grows each time, the rest of the process does not.
        grown = min([await growth() for _ in range(3)])
        assert grown < 13 * 256 * KB, f"{grown / KB:.0f} KB kept"


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 10, 100])
async def test_cancel_before_the_request_is_sent_leaves_no_task(turns: int) -> None:
    """In whichever iteration of the event loop it happens."""
    async with serving(Server(count=1)) as connection:
        stream = begin(connection)
        waiting = asyncio.ensure_future(stream.next())
        for _ in range(turns):
            await asyncio.sleep(0)
        stream.cancel()
        async with asyncio.timeout(60.0):
            await stream.ended()
            with suppress(CallCancelled):
                await waiting
