"""Calls over HTTP/2 against a scripted peer that sends frames byte by byte as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
from anyio import create_task_group

from causeway_server.cloud_pool.upstreams.triton import http2
from causeway_server.cloud_pool.upstreams.triton.connection import (
    CallCancelled,
    CallFailed,
    ConnectFailed,
    GrpcStream,
    TritonConnection,
)

HEAD = b"\x88"
OK = b"\x00\x0bgrpc-status\x010"
Frame = tuple[int, int, int, bytes]


class Peer:
    """The server's side of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def begin(self, values: dict[int, int]) -> None:
        assert await self._reader.readexactly(len(http2.PREFACE)) == http2.PREFACE
        self.send(http2.settings(values))

    def send(self, *frames: bytes) -> None:
        self._writer.write(b"".join(frames))

    def answer(self, number: int, *messages: bytes) -> None:
        body = b"".join([b"\x00" + len(one).to_bytes(4, "big") + one for one in messages])
        self.send(http2.frame(http2.HEADERS, http2.END_HEADERS, number, HEAD))
        self.send(http2.frame(http2.DATA, 0, number, body))
        self.send(http2.frame(http2.HEADERS, http2.END_HEADERS | http2.END_STREAM, number, OK))

    async def next(self, *kinds: int) -> Frame:
        """Return the next frame of one of these types."""
        while True:
            head = await self._reader.readexactly(http2.FRAME_HEAD_BYTES)
            payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
            if head[3] in kinds:
                return head[3], head[4], int.from_bytes(head[5:], "big"), payload

    def close(self) -> None:
        self._writer.close()


class Peers:
    """A server whose connections come one after the other."""

    def __init__(self, settings: dict[int, int] | None = None) -> None:
        self._settings = settings
        self._came: asyncio.Queue[Peer] = asyncio.Queue()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer)
        if self._settings is not None:
            await peer.begin(self._settings)
        self._came.put_nowait(peer)

    async def next(self) -> Peer:
        return await self._came.get()


@asynccontextmanager
async def connected(peers: Peers) -> AsyncIterator[TritonConnection]:
    server = await asyncio.start_server(peers.accept, "127.0.0.1", 0)
    try:
        with anyio.fail_after(60.0):
            async with create_task_group() as tasks:
                connection = TritonConnection(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", tasks)
                yield connection
                connection.close()
                tasks.cancel_scope.cancel()
    finally:
        server.close()


def call(connection: TritonConnection, message: bytes = b"ask") -> GrpcStream:
    return connection.call("/a/B", message, timeout_s=60.0)


async def messages(stream: GrpcStream) -> list[bytes]:
    found = []
    while (message := await stream.next()) is not None:
        found.append(message)
    return found


async def test_request_is_one_head_and_its_body() -> None:
    peers = Peers({})
    async with connected(peers) as connection:
        stream = call(connection)
        peer = await peers.next()
        assert await peer.next(http2.HEADERS) == (http2.HEADERS, http2.END_HEADERS, 1, stream.head)
        assert await peer.next(http2.DATA) == (http2.DATA, http2.END_STREAM, 1, b"\x00\x00\x00\x00\x03ask")
        peer.answer(1, b"one", b"two")
        assert await messages(stream) == [b"one", b"two"]


async def test_messages_and_headers_may_come_in_pieces_with_padding() -> None:
    peers = Peers({})
    async with connected(peers) as connection:
        stream = call(connection)
        peer = await peers.next()
        await peer.next(http2.DATA)
        peer.send(
            http2.frame(http2.HEADERS, http2.PADDED | http2.PRIORITY, 1, b"\x01" + b"\x00" * 5 + b"\x00"),
            http2.frame(http2.CONTINUATION, http2.END_HEADERS, 1, HEAD),
            http2.frame(http2.DATA, http2.PADDED, 1, b"\x02\x00\x00\x00\x00\x00\x00"),
            http2.frame(http2.DATA, 0, 1, b"\x03a"),
            http2.frame(250, 0, 0, b"an unknown frame"),
            http2.frame(http2.DATA, 0, 1, b"bc"),
            http2.frame(http2.HEADERS, http2.END_STREAM | http2.END_HEADERS, 1, OK),
        )
        assert await messages(stream) == [b"abc"]


async def test_request_waits_for_the_servers_window() -> None:
    """The stream's window is 4 bytes, then grows; another call is not held up."""
    peers = Peers({http2.INITIAL_WINDOW: 4})
    async with connected(peers) as connection:
        stream = call(connection)
        peer = await peers.next()
        assert (await peer.next(http2.DATA))[3] == b"\x00\x00\x00\x00"
        peer.send(http2.window_update(1, 3))
        assert (await peer.next(http2.DATA))[3] == b"\x03as"
        peer.send(http2.settings({http2.INITIAL_WINDOW: 100}))
        assert await peer.next(http2.DATA) == (http2.DATA, http2.END_STREAM, 1, b"k")
        peer.answer(1, b"one")
        assert await messages(stream) == [b"one"]


async def test_calls_wait_for_a_free_stream() -> None:
    """A waiting call that is cancelled never starts."""
    peers = Peers({http2.MAX_STREAMS: 1})
    async with connected(peers) as connection:
        first, left, last = call(connection), call(connection), call(connection, b"last")
        peer = await peers.next()
        await peer.next(http2.DATA)
        left.cancel()
        peer.answer(1, b"one")
        assert await messages(first) == [b"one"]
        assert (await peer.next(http2.DATA))[2:] == (3, b"\x00\x00\x00\x00\x04last")
        peer.answer(3, b"two")
        assert await messages(last) == [b"two"]
        with pytest.raises(CallCancelled):
            await left.next()


async def test_cancelled_call_is_reset_and_its_rest_is_ignored() -> None:
    peers = Peers({})
    async with connected(peers) as connection:
        stream = call(connection)
        peer = await peers.next()
        await peer.next(http2.DATA)
        stream.cancel()
        assert await peer.next(http2.RST_STREAM) == (http2.RST_STREAM, 0, 1, b"\x00\x00\x00\x08")
        peer.answer(1, b"late")
        other = call(connection)
        await peer.next(http2.DATA)
        peer.answer(3, b"one")
        assert await messages(other) == [b"one"]


async def test_ping_is_answered() -> None:
    peers = Peers({})
    async with connected(peers) as connection:
        call(connection)
        peer = await peers.next()
        peer.send(http2.frame(http2.PING, 0, 0, b"12345678"))
        assert await peer.next(http2.PING) == (http2.PING, http2.ACK, 0, b"12345678")


async def test_server_that_goes_away_ends_what_it_has_not_begun() -> None:
    """Calls in progress stay on the connection, new ones use another."""
    peers = Peers({})
    async with connected(peers) as connection:
        begun, lost = call(connection), call(connection)
        peer = await peers.next()
        for _ in range(2):
            await peer.next(http2.DATA)
        peer.send(http2.frame(http2.GOAWAY, 0, 0, b"\x00\x00\x00\x01" + bytes(4)))
        with pytest.raises(CallFailed, match="UNAVAILABLE"):
            await lost.next()
        assert not lost.connect_failed
        later = call(connection)
        other = await peers.next()
        await other.next(http2.DATA)
        other.answer(1, b"new")
        peer.answer(1, b"old")
        assert (await messages(begun), await messages(later)) == ([b"old"], [b"new"])


async def test_renewed_connection_keeps_its_calls() -> None:
    peers = Peers({})
    async with connected(peers) as connection:
        old = call(connection)
        peer = await peers.next()
        await peer.next(http2.DATA)
        connection.renew()
        new = call(connection)
        other = await peers.next()
        await other.next(http2.DATA)
        other.answer(1, b"new")
        peer.answer(1, b"old")
        assert (await messages(old), await messages(new)) == ([b"old"], [b"new"])
        with pytest.raises(asyncio.IncompleteReadError):  # it closes after its last call
            await peer.next(http2.DATA)


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        pytest.param(http2.frame(http2.RST_STREAM, 0, 1, b"\x00\x00\x00\x07"), "UNAVAILABLE", id="refused"),
        pytest.param(http2.frame(http2.RST_STREAM, 0, 1, b"\x00\x00\x00\x02"), "INTERNAL", id="reset"),
        pytest.param(http2.frame(http2.DATA, http2.END_STREAM, 1), "INTERNAL", id="no status"),
        pytest.param(http2.frame(http2.HEADERS, http2.END_HEADERS, 1, b"\x8d"), "UNIMPLEMENTED", id="HTTP 404"),
        pytest.param(http2.frame(http2.PUSH_PROMISE, 0, 1), "UNAVAILABLE", id="push"),
        pytest.param(http2.frame(http2.CONTINUATION, 0, 1), "UNAVAILABLE", id="continuation of nothing"),
        pytest.param(http2.frame(http2.HEADERS, 0, 1, HEAD) + http2.window_update(0, 1), "UNAVAILABLE", id="order"),
        pytest.param(http2.frame(http2.HEADERS, http2.END_HEADERS, 1, b"\xbe"), "UNAVAILABLE", id="dynamic table"),
        pytest.param(http2.frame(http2.DATA, 0, 1, b"\x01\x00\x00\x00\x00"), "UNAVAILABLE", id="compressed"),
        pytest.param(b"HTTP/1.1 400 Bad Request\r\n\r\n", "UNAVAILABLE", id="HTTP/1.1"),
    ],
)
async def test_broken_call_fails_and_the_next_one_works(sent: bytes, code: str) -> None:
    peers = Peers({})
    async with connected(peers) as connection:
        stream = call(connection)
        peer = await peers.next()
        await peer.next(http2.DATA)
        peer.send(sent)
        with pytest.raises(CallFailed, match=code):
            await stream.next()
        assert not stream.connect_failed
        await stream.ended()
        later = call(connection)
        if code == "UNAVAILABLE" and sent[3] != http2.RST_STREAM:
            peer = await peers.next()
        number = (await peer.next(http2.DATA))[2]
        peer.answer(number, b"one")
        assert await messages(later) == [b"one"]


async def test_lost_connection_fails_its_calls() -> None:
    peers = Peers({})
    async with connected(peers) as connection:
        stream = call(connection)
        peer = await peers.next()
        await peer.next(http2.DATA)
        peer.close()
        with pytest.raises(CallFailed, match="UNAVAILABLE"):
            await stream.next()
        assert not stream.connect_failed


async def test_peer_that_closes_before_its_settings_is_a_failed_connect() -> None:
    """Calls of the next moment fail at once, without another attempt."""
    peers = Peers(None)
    async with connected(peers) as connection:
        waiting = [call(connection), call(connection)]
        (await peers.next()).close()
        for stream in (*waiting, call(connection)):
            with pytest.raises(ConnectFailed):
                await stream.next()
            assert stream.connect_failed


async def test_closed_connection_cancels_its_calls_and_takes_no_more() -> None:
    peers = Peers({})
    async with connected(peers) as connection:
        stream = call(connection)
        await (await peers.next()).next(http2.DATA)
        connection.close()
        for one in (stream, call(connection)):
            with pytest.raises(CallCancelled):
                await one.next()


@pytest.mark.parametrize("replies", [0, 2])
async def test_unary_call_has_exactly_one_response(replies: int) -> None:
    peers = Peers({})
    async with connected(peers) as connection:
        asking = asyncio.ensure_future(connection.unary("/a/B", b"", timeout_s=60.0))
        peer = await peers.next()
        await peer.next(http2.DATA)
        peer.answer(1, *[b"one"] * replies)
        with pytest.raises(CallFailed, match="INTERNAL"):
            await asking


async def test_unary_call_is_bounded_in_time() -> None:
    peers = Peers({})
    async with connected(peers) as connection:
        with pytest.raises(CallFailed, match="DEADLINE_EXCEEDED"):
            await connection.unary("/a/B", b"", timeout_s=0.01)
