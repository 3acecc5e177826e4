"""Replies over HTTP on a real aiohttp server: what comes together, a client that reads slowly, and errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
from aiohttp import web

from causeway_server.router.errors import CloudFailed
from causeway_server.router.serving import responses
from causeway_server.router.serving.aiohttp_connection import aiohttp_response
from causeway_server.router.serving.responses import HttpReplyWriter, ServerResponse, header_lines
from causeway_server.router.types import Chunk, Request


class Head(msgspec.Struct, frozen=True):
    model: str = "m"


Answer = Callable[[HttpReplyWriter[Head]], Awaitable[ServerResponse]]


@asynccontextmanager
async def reply_of(answer: Answer, *, stream: bool = True) -> AsyncIterator[asyncio.StreamReader]:
    async def handle(http: web.BaseRequest) -> web.StreamResponse:
        def lines(_head: Head, media_type: str) -> str:
            return header_lines({"Content-Type": media_type})

        request = Request(kind="chat", model="m", stream=stream)
        return aiohttp_response(await answer(HttpReplyWriter(request, http, lines, id="1", created=1)))

    server = await asyncio.get_running_loop().create_server(web.Server(handle), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b"POST / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    try:
        yield reader
    finally:
        writer.close()
        server.close()


async def send(reply: HttpReplyWriter[Head], *chunks: Chunk) -> None:
    for chunk in chunks:
        if (slow := reply.send(chunk)) is not None:
            await slow


async def http_chunks(reader: asyncio.StreamReader) -> list[bytes]:
    found = []
    while size := int(await reader.readline(), 16):
        found.append((await reader.readexactly(size + 2))[:-2])
    return found


async def test_chunks_that_come_together_leave_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "_TOGETHER_S", 60.0)

    async def answer(reply: HttpReplyWriter[Head]) -> ServerResponse:
        await reply.commit(Head())
        await send(reply, *(Chunk(text, tokens=1) for text in "abcd"), Chunk(finish_reason="stop"))
        await reply.end()
        return reply.response

    async with reply_of(answer) as reader:
        assert b"transfer-encoding: chunked" in (await reader.readuntil(b"\r\n\r\n")).lower()
        pieces = await http_chunks(reader)
    texts = [[part[:1] for part in piece.split(b'"content":"')[1:]] for piece in pieces]
    assert texts == [[b'"', b"a"], [b"b", b"c", b"d"]]
    assert pieces[-1].endswith(b"data: [DONE]\n\n")


async def test_the_source_waits_for_a_client_that_reads_slowly() -> None:
    count, made = 200, 0

    async def answer(reply: HttpReplyWriter[Head]) -> ServerResponse:
        nonlocal made
        await reply.commit(Head())
        for made in range(1, count + 1):  # noqa: B007
            await send(reply, Chunk("x" * 100_000, tokens=1))
        await send(reply, Chunk(finish_reason="stop"))
        await reply.end()
        return reply.response

    async with reply_of(answer) as reader:
        await reader.readuntil(b"\r\n\r\n")
        before = -1
        while before != made:  # until the source waits
            before = made
            await asyncio.sleep(0.05)
        assert made < count
        body = b"".join(await http_chunks(reader))
    assert body.count(b"x" * 100_000) == count
    assert body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_after_the_first_byte_is_an_event_and_before_it_a_status(stream: bool) -> None:
    async def answer(reply: HttpReplyWriter[Head]) -> ServerResponse:
        await reply.commit(Head())
        await send(reply, Chunk("a", tokens=1))
        return await reply.fail(CloudFailed("broken", phase="stream"), {"x-request-id": "1"})

    async with reply_of(answer, stream=stream) as reader:
        head = await reader.readuntil(b"\r\n\r\n")
        if not stream:
            assert head.startswith(b"HTTP/1.1 502 ")
            assert b"x-request-id: 1\r\n" in head
            return
        assert head.startswith(b"HTTP/1.1 200 ")
        body = b"".join(await http_chunks(reader))
    assert body.count(b'"error"') == 1
    assert b"[DONE]" not in body
