"""A listener that answers plain requests itself gives the answers that it gives through aiohttp."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import pytest

from causeway_server.router.errors import InvalidRequest
from causeway_server.router.serving.listener import ANSWERED, Address, Connection, ConnectionTable, DirectWork, Listener
from causeway_server.router.serving.request import HttpExchange, PlainRequest, arrived_body, read_authorization
from causeway_server.router.serving.responses import (
    EventStream,
    PrebuiltResponse,
    ServerResponse,
    error_response,
    json_response,
)
from causeway_server.router.web_origins import WebOrigins
from tests.jumping_loop import JumpingLoop, run_jumping
from tests.waiting import until

from .test_plain_head import OTHER, PLAIN, post
from .test_plain_verdicts import Wire

PAGE = "https://page.example"
CHAT = post(b"Content-Length: 2")
CLOSING = post(b"Connection: close", b"Content-Length: 2")
_CHANGES = re.compile(rb"\r\n(Date|x-request-id): [^\r]*")


class Server:
    """A listener whose handler answers with what it got. `gate`: what requests with the body `ww` wait for."""

    def __init__(self, *, plain: bool, read_timeout_s: float = 20.0, most: int = 100) -> None:
        self.gate = asyncio.Event()
        self.handled: list[bool] = []  # whether it was a plain request
        self.ended: list[str] = []  # requests that waited
        self.table = ConnectionTable("tcp", most, lambda: 0.0)
        address = Address(self.table, WebOrigins([PAGE], ["localhost"]), "", "127.0.0.1")
        lines = [("POST", "/v1/chat/completions"), ("GET", "/healthz")] if plain else []
        self.listener = Listener(self._handle, (address,), read_timeout_s, lines)

    async def _handle(self, http: HttpExchange) -> ServerResponse:
        self.handled.append(isinstance(http, PlainRequest))
        if http.path == "/healthz":
            return json_response({"status": "ok"})
        body = arrived_body(http, 64) if isinstance(http, PlainRequest) else await http.content.read()
        if body == b"ww":
            try:
                await self.gate.wait()
                self.ended.append("answered")
            except asyncio.CancelledError:
                self.ended.append("cancelled")
                raise
        if body == b"xx":
            raise RuntimeError("a fault of the handler")
        if body == b"ee":
            return error_response(InvalidRequest("no"), {"x-request-id": "1"})
        if body == b"ss":
            stream = EventStream(http, "Content-Type: text/event-stream\r\n")
            stream.send(b"one")
            stream.send(b"two")
            stream.end(b"three")
            return stream
        content = f"{http.method} {http.path} {read_authorization(http)} {body!r}".encode()
        return PrebuiltResponse(http, "Content-Type: text/plain\r\n", content)


@asynccontextmanager
async def serving(*, plain: bool = True, read_timeout_s: float = 20.0, most: int = 100) -> AsyncIterator[Server]:
    server = Server(plain=plain, read_timeout_s=read_timeout_s, most=most)
    await server.listener.start()
    try:
        yield server
    finally:
        server.gate.set()
        await server.listener.close()
        await until(lambda: server.table.stats().open == 0)


@asynccontextmanager
async def connected(server: Server) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.listener.port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def talk(server: Server, *pieces: bytes) -> bytes:
    """Send pieces, and a request that ends the connection; return all that came back, without what changes."""
    async with connected(server) as (reader, writer):
        for piece in (*pieces, CLOSING):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        return _CHANGES.sub(b"", await read_to_end(reader))


async def read_to_end(reader: asyncio.StreamReader) -> bytes:
    received = b""
    try:
        while data := await reader.read(65536):
            received += data
    except ConnectionError:
        pass
    return received


STREAMS = {
    **{name: data for name, data in PLAIN.items() if name != "a body that has not come"},
    **{name: data for name, data in OTHER.items() if not name.startswith("half")},
    "an error": post(b"Content-Length: 2", body=b"ee"),
    "a fault": post(b"Content-Length: 2", body=b"xx"),
    "a stream": post(b"Content-Length: 2", body=b"ss"),
    "an error, a stream and an answer": b"".join(
        post(b"Content-Length: 2", body=body) for body in (b"ee", b"ss", b"{}")
    ),
    "a page": post(b"Origin: " + PAGE.encode(), b"Content-Length: 2", body=b"ee"),
    "a stream for a page": post(b"Origin: " + PAGE.encode(), b"Content-Length: 2", body=b"ss"),
    "a foreign page": post(b"Origin: https://other.example", b"Content-Length: 2"),
    "a foreign page by its site": post(b"Sec-Fetch-Site: cross-site", b"Content-Length: 2"),
    "a foreign host": CHAT.replace(b"localhost", b"evil.example"),
    "a key": post(b"Authorization: Bearer k", b"Content-Length: 2"),
    "two keys": post(b"Authorization: Bearer k", b"Authorization: Bearer l", b"Content-Length: 2"),
}


@pytest.mark.parametrize("sent", STREAMS.values(), ids=STREAMS)
async def test_both_servers_give_the_same_answer(sent: bytes) -> None:
    """Status, headers in any order, body, and the end of the connection."""
    async with serving() as ours, serving(plain=False) as other:
        assert parsed(await talk(ours, sent)) == parsed(await talk(other, sent))


def parsed(received: bytes) -> list[tuple[bytes, frozenset[bytes], bytes]]:
    answers = []
    for answer in re.split(rb"(?=HTTP/1\.1 )", received)[1:]:
        head, _, body = answer.partition(b"\r\n\r\n")
        status, *lines = head.split(b"\r\n")
        headers = frozenset(line.lower() for line in lines)
        answers.append((status, headers, unchunked(body) if b"transfer-encoding: chunked" in headers else body))
    return answers


def unchunked(body: bytes) -> bytes:
    """Return a body without its framing: what is written within a millisecond may be one chunk or several."""
    pieces = []
    while size := int((length := body.partition(b"\r\n"))[0], 16):
        pieces.append(length[2][:size])
        body = length[2][size + 2 :]
    assert length[2] == b"\r\n", "the last chunk ends the body"
    return b"".join(pieces)


async def test_a_stream_of_bytes_may_come_in_any_two_pieces() -> None:
    sent = CHAT + b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" + CHAT
    async with serving() as server:
        whole = parsed(await talk(server, sent))
        assert len(whole) == 4
        for at in range(1, len(sent)):
            assert parsed(await talk(server, sent[:at], sent[at:])) == whole


async def test_a_connection_moves_at_its_first_request_that_is_not_plain_and_stays() -> None:
    async with serving() as server, connected(server) as (reader, writer):
        for request in (CHAT, CHAT, CHAT.replace(b"/v1", b"//v1"), CHAT):
            writer.write(request)
            await reader.readuntil(b"b'{}'")
        assert server.handled == [True, True, False, False]


async def test_a_body_that_is_late_or_large_is_received_by_aiohttp() -> None:
    async with serving() as server, connected(server) as (reader, writer):
        writer.write(CHAT[:-1])
        await until(lambda: server.listener.in_flight == 1)  # it is read, whether its body is there or not
        writer.write(CHAT[-1:])
        await reader.readuntil(b"b'{}'")
        async with connected(server) as (_, large):
            large.write(post(b"Content-Length: 100000", body=b""))
            await until(lambda: server.listener.in_flight == 1)
        assert server.handled == [False, False]


@pytest.mark.parametrize(("seconds", "is_kept"), [(4.0, True), (6.0, False)])
def test_the_rest_of_a_refused_upload_is_read_for_a_while(seconds: float, is_kept: bool) -> None:
    """A client that sends on may read the refusal afterwards, and its connection stays."""

    async def upload(loop: JumpingLoop) -> None:
        async with serving() as server, connected(server) as (reader, writer):
            writer.write(post(b"Content-Length: 300000", body=b"x" * 100_000).replace(b"localhost", b"evil.example"))
            assert b" 421 " in await reader.readuntil(b"\r\n\r\n")
            loop.jump(seconds)
            await server.listener.drain(0.0)
            writer.write(b"x" * 200_000 + CLOSING)
            assert (b" 200 OK" in await read_to_end(reader)) is is_kept

    run_jumping(upload)


async def test_a_client_that_leaves_ends_its_request() -> None:
    async with serving() as server:
        async with connected(server) as (_, writer):
            writer.write(CHAT.replace(b"{}", b"ww"))
            await until(lambda: server.listener.in_flight == 1)
        await until(lambda: server.ended == ["cancelled"])
        await until(lambda: server.table.stats().open == 0)


@pytest.mark.parametrize("sent", [b"", CHAT, CHAT + CHAT[:20]], ids=["silent", "between", "half a head"])
async def test_an_idle_connection_is_closed_in_time(sent: bytes) -> None:
    async with serving(read_timeout_s=0.1) as server, connected(server) as (reader, writer):
        writer.write(sent)
        assert (await read_to_end(reader)).count(b"HTTP/1.1 200 ") == min(1, len(sent))


async def test_a_long_request_outlasts_the_time_of_idle_connections() -> None:
    async with serving(read_timeout_s=0.05) as server, connected(server) as (reader, writer):
        writer.write(CHAT.replace(b"{}", b"ww"))
        await until(lambda: server.listener.in_flight == 1)
        async with connected(server) as (other, _):
            assert await read_to_end(other) == b""
        server.gate.set()
        assert (await read_to_end(reader)).count(b"HTTP/1.1 200 ") == 1


async def test_requests_that_are_sent_ahead_wait_outside() -> None:
    """While one request is answered, the rest of a flood stays in the socket's buffers, and is answered afterwards."""
    count = 5_000
    async with serving() as server, connected(server) as (reader, writer):
        writer.write(CHAT.replace(b"{}", b"ww"))
        await until(lambda: server.listener.in_flight == 1)
        writer.write(CHAT * count)
        (connection,) = server.listener.connections
        await until(lambda: connection.reading_paused)
        writer.write(CLOSING)
        server.gate.set()
        assert (await read_to_end(reader)).count(b"HTTP/1.1 200 ") == count + 2


async def test_a_drain_lets_requests_end_and_then_tells_the_rest() -> None:
    async with serving() as server, connected(server) as (reader, writer), connected(server) as (idle, _):
        writer.write(CHAT.replace(b"{}", b"ww") + CHAT)
        await until(lambda: server.listener.in_flight == 1 and server.table.stats().open == 2)
        server.listener.stop_accepting()
        assert await read_to_end(idle) == b""
        assert not await server.listener.drain(0.01)
        server.gate.set()
        assert await server.listener.drain(20.0)
        assert (await read_to_end(reader)).count(b"HTTP/1.1 200 ") == 1


async def test_a_request_that_the_end_cuts_is_told_so() -> None:
    async with serving() as server, connected(server) as (reader, writer):
        writer.write(CHAT.replace(b"{}", b"ww"))
        await until(lambda: server.listener.in_flight == 1)
        await server.listener.close()
        answer = await read_to_end(reader)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b'"draining"' in answer


async def test_a_source_waits_for_a_client_that_reads_slowly_and_ends_with_it() -> None:
    sent: list[int] = []

    async def handle(http: HttpExchange) -> ServerResponse:
        stream = EventStream(http, "Content-Type: text/event-stream\r\n")
        try:
            while True:
                stream.send(b"x" * 100_000)
                await stream.drain()
        finally:
            sent.append(stream.sends)

    table = ConnectionTable("tcp", 10, lambda: 0.0)
    address = Address(table, WebOrigins(), "", "127.0.0.1")
    listener = Listener(handle, (address,), 20.0, [("POST", "/v1/chat/completions")])
    await listener.start()
    _, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    writer.write(CHAT)
    await until(lambda: any(connection.writing_paused for connection in listener.connections))
    writer.transport.abort()
    await until(lambda: table.stats().open == 0 and sent)
    await listener.close()
    assert sent[0] < 1000


def asking(body: bytes) -> bytes:
    return post(b"Content-Length: %d" % len(body), body=body)


STREAM = asking(b'{"stream":true}')


class _Burst:
    """Connections in memory, whose requests a handler notes when they begin."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.wires: list[Wire] = []
        address = Address(ConnectionTable("tcp", 100, lambda: 0.0), WebOrigins([], ["localhost"]), "", "127.0.0.1")
        self._listener = Listener(self._handle, (address,), 20.0, [("POST", "/v1/chat/completions")], direct=self._note)
        for _ in range(11):
            connection = Connection(self._listener, address)
            wire = Wire()
            wire.set_protocol(connection)
            connection.connection_made(wire)
            self.wires.append(wire)

    def _note(self, http: PlainRequest, connection: Connection) -> DirectWork | None:
        if b"fault" in http.body:
            raise RuntimeError("a fault of the handler")
        self.begun.append(next(n for n, wire in enumerate(self.wires) if wire.protocol is connection))
        return ANSWERED

    async def _handle(self, http: HttpExchange) -> ServerResponse:
        raise AssertionError("it is answered in callbacks")


async def test_streams_that_arrive_together_begin_four_in_each_turn_and_others_at_once() -> None:
    burst = _Burst()
    for wire, request in zip(burst.wires, (*[STREAM] * 9, asking(b"{}"), asking(b'{"stream": true}')), strict=True):
        wire.receive(request)
    assert burst.begun == [0, 1, 2, 3, 9]
    for further in ([4, 5, 6, 7], [8, 10], []):
        before = len(burst.begun)
        await asyncio.sleep(0)
        assert burst.begun[before:] == further
    burst.wires[1].receive(STREAM)
    assert burst.begun[-1] == 1


async def test_a_stream_whose_client_leaves_before_its_turn_is_not_begun_and_holds_nobody_up() -> None:
    burst = _Burst()
    for wire in burst.wires[:9]:
        wire.receive(STREAM)
    cast("asyncio.Protocol", burst.wires[5].protocol).connection_lost(None)
    await asyncio.sleep(0)
    assert burst.begun == [0, 1, 2, 3, 4, 6, 7, 8]


async def test_a_stream_that_cannot_be_begun_holds_nobody_up() -> None:
    """Its connection is closed."""
    burst = _Burst()
    for number, wire in enumerate(burst.wires):
        wire.receive(asking(b'{"stream":true,"fault":1}') if number == 5 else STREAM)
    for _ in range(3):
        await asyncio.sleep(0)
    assert burst.begun == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10]
    assert [number for number, wire in enumerate(burst.wires) if wire.is_closing()] == [5]


async def test_a_stream_that_waits_for_its_turn_is_whole_when_the_rest_comes() -> None:
    burst = _Burst()
    for wire in burst.wires[:4]:
        wire.receive(STREAM)
    head, body = asking(b'{"stream":true, "n": 1}')[:-4], asking(b'{"stream":true, "n": 1}')[-4:]
    burst.wires[4].receive(head)
    burst.wires[4].receive(body + STREAM)  # the next one is sent ahead
    for _ in range(3):
        await asyncio.sleep(0)
    assert burst.begun == [0, 1, 2, 3, 4, 4]


async def test_what_is_sent_ahead_while_a_stream_waits_for_its_turn_waits_outside() -> None:
    burst = _Burst()
    for wire in burst.wires[:5]:
        wire.receive(STREAM)
    burst.wires[4].receive(STREAM * 1_000)
    assert not burst.wires[4].reads
    await until(lambda: burst.begun.count(4) == 1_001)
    assert burst.wires[4].reads
