"""Streams of events on a real aiohttp server: framing, writes, and clients that leave or read slowly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from causeway_server.router.errors import ClientGone
from causeway_server.router.serving.aiohttp_connection import aiohttp_response
from causeway_server.router.serving.responses import EventStream, header_lines

LINES = "Content-Type: text/event-stream\r\n"
Script = Callable[[EventStream], Awaitable[None]]


@asynccontextmanager
async def client_of(script: Script) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        stream = EventStream(request, LINES)
        await script(stream)
        return aiohttp_response(stream)

    server = await asyncio.get_running_loop().create_server(web.Server(handle), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    try:
        yield reader, writer
    finally:
        writer.close()
        server.close()


async def three_events(stream: EventStream) -> None:
    for event in (b"one", b"two", b"three"):
        stream.send(event)
    stream.end(b"four")


async def test_the_first_event_leaves_with_the_head_and_what_is_ready_together_in_one_chunk() -> None:
    async with client_of(three_events) as (reader, writer):
        for _ in range(2):  # the connection is kept
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"Transfer-Encoding: chunked\r\n" in head
            assert await reader.readuntil(b"0\r\n\r\n") == b"3\r\none\r\nc\r\ntwothreefour\r\n0\r\n\r\n"


async def test_a_stream_over_http_1_0_ends_with_the_connection() -> None:
    async with client_of(three_events) as (reader, writer):
        writer.write(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert b"Connection: close" in head
        assert b"Transfer-Encoding" not in head
        assert body == b"onetwothreefour"


async def test_an_event_that_is_ready_leaves_although_the_next_one_does_not_come() -> None:
    go_on = asyncio.Event()

    async def stalls(stream: EventStream) -> None:
        stream.send(b"one")
        stream.send(b"two")
        await go_on.wait()

    async with client_of(stalls) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b"3\r\ntwo\r\n")
        go_on.set()
        assert await reader.readuntil(b"0\r\n\r\n") == b"0\r\n\r\n"


async def test_the_last_event_and_the_end_leave_in_one_write() -> None:
    async def answer(stream: EventStream) -> None:
        stream.send(b"last", last=True)
        stream.end(b"end")

    async with client_of(answer) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.readuntil(b"0\r\n\r\n") == b"7\r\nlastend\r\n0\r\n\r\n"


@pytest.mark.parametrize("ends", [False, True])
async def test_a_client_that_left_is_an_error_for_the_sender(ends: bool) -> None:
    outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def until_gone(stream: EventStream) -> None:
        stream.send(b"one")
        try:
            while True:
                await asyncio.sleep(0)
                if not ends:
                    stream.send(b"more")
                elif stream.client_left:
                    stream.end(b"last")
        except ClientGone as error:
            outcome.set_result(str(error))

    async with client_of(until_gone) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b"one")
        writer.transport.abort()
        assert await outcome == "The client closed the connection."


async def test_a_sender_waits_for_a_client_that_reads_slowly() -> None:
    """Nothing is lost, and no more is buffered than the transport's own limit and one event."""
    event, count = b"x" * 100_000, 100
    sent = 0

    async def many(stream: EventStream) -> None:
        nonlocal sent
        for sent in range(1, count + 1):  # noqa: B007
            stream.send(event)
            await stream.drain()

    async with client_of(many) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        before = -1
        while before != sent:  # until the sender waits
            before = sent
            await asyncio.sleep(0.05)
        assert sent < count
        received = b""
        while not received.endswith(b"\r\n0\r\n\r\n"):
            received += await reader.read(1 << 20)
        assert received.count(b"x") == len(event) * count


def test_a_header_has_one_line() -> None:
    assert header_lines({"a": "b", "c": "é"}) == "a: b\r\nc: é\r\n"
    for value in ("a\r", "a\nb: c"):
        with pytest.raises(ValueError, match="line"):
            header_lines({"a": value})
