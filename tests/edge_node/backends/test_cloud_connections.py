"""When the cloud backend sends a request again: raw servers that close and reset new and pooled connections."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec
import pytest

from causeway_server.router.errors import CausewayError, CloudUnreachable, StreamBroken

from ..scripted import CLOUD_WORDS, whole_answer
from .test_cloud import CLOUD, answer_of, call, connected

_BODY = msgspec.json.encode(whole_answer("".join(CLOUD_WORDS)))
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
_STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"


class RawServer:
    """Answers each POST, except those that `faults` name by number: "close", "reset", "head", or "unfinished": a whole
    body, which is a stream without its end, on a connection that the server keeps for the next request.
    """

    def __init__(self, *faults: str) -> None:
        self._faults = faults
        self.posts = 0
        self.connections = 0
        self.arrived = asyncio.Condition()
        self.held = 0
        """POSTs to wait for before any of them is answered."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
                await reader.readexactly(int(length.split(b":")[1]))
                fault = self._faults[self.posts] if self.posts < len(self._faults) else ""
                async with self.arrived:
                    self.posts += 1
                    self.arrived.notify_all()
                    await self.arrived.wait_for(lambda: self.posts >= self.held)
                if fault == "unfinished":
                    writer.write(_STREAM)
                    continue
                if fault:
                    await self._break(writer, fault)
                    return
                writer.write(_HEAD + b"Content-Length: %d\r\n\r\n" % len(_BODY) + _BODY)
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    async def _break(self, writer: asyncio.StreamWriter, fault: str) -> None:
        if fault == "head":
            writer.write(_HEAD[:12])
        if fault == "reset":
            raw: socket.socket = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()


@asynccontextmanager
async def listening(server: RawServer) -> AsyncIterator[str]:
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    async with listener:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/v1"


@pytest.mark.parametrize("fault", ["close", "reset", "head"])
async def test_a_new_connection_that_ends_without_an_answer_is_one_post(fault: str) -> None:
    """The server may have done the work."""
    server = RawServer(fault)
    async with listening(server) as url, connected(url) as backend:
        with pytest.raises(CausewayError):
            await answer_of(backend, call())
        assert server.posts == 1
        assert await answer_of(backend, call()) == CLOUD


@pytest.mark.parametrize("fault", ["close", "reset"])
async def test_a_pooled_connection_that_ends_without_an_answer_is_replaced(fault: str) -> None:
    server = RawServer("", fault)
    async with listening(server) as url, connected(url) as backend:
        await answer_of(backend, call())
        assert await answer_of(backend, call()) == CLOUD
    assert (server.posts, server.connections) == (3, 2)


async def test_a_pooled_connection_of_which_something_was_read_is_one_post() -> None:
    server = RawServer("", "head")
    async with listening(server) as url, connected(url) as backend:
        await answer_of(backend, call())
        with pytest.raises(CloudUnreachable):
            await answer_of(backend, call())
    assert server.posts == 2


@pytest.mark.parametrize("faults", [["close"] * 3, ["reset", "close", "reset"]])
async def test_a_pool_of_ended_connections_is_used_up_before_a_new_one_answers(faults: Sequence[str]) -> None:
    server = RawServer("", "", "", *faults)
    server.held = 3
    async with listening(server) as url, connected(url) as backend:
        await asyncio.gather(*[answer_of(backend, call()) for _ in range(3)])
        assert await answer_of(backend, call()) == CLOUD
    assert (server.posts, server.connections) == (7, 4)


async def test_a_pooled_connection_and_then_a_new_one_that_end_are_two_posts_and_an_error() -> None:
    server = RawServer("", "close", "close")
    async with listening(server) as url, connected(url) as backend:
        await answer_of(backend, call())
        with pytest.raises(CloudUnreachable):
            await answer_of(backend, call())
    assert server.posts == 3


async def test_a_connection_is_not_used_again_after_a_stream_without_an_end() -> None:
    """uvicorn closes it when the application fails within a stream, after the end of the body."""
    server = RawServer("unfinished")
    async with listening(server) as url, connected(url) as backend:
        with pytest.raises(StreamBroken):
            await answer_of(backend, call(stream=True))
        assert await answer_of(backend, call()) == CLOUD
    assert (server.posts, server.connections) == (2, 2)
