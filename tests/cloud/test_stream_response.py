"""Streams of the gateway on a real aiohttp server: what comes together, and clients that read slowly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from cloud_pool.http.responses import stream_response
from router.openai import AnswerEncoder
from router.types import Chunk, Request


@asynccontextmanager
async def answer_to(request: bytes, chunks: AsyncGenerator[Chunk, None]) -> AsyncIterator[asyncio.StreamReader]:
    async def handle(http: web.BaseRequest) -> web.StreamResponse:
        encoder = AnswerEncoder(Request(kind="chat", model="m", stream=True), "id", "m", 1)
        return await stream_response(http, chunks, lambda _: None, encoder, {})

    server = await asyncio.get_running_loop().create_server(web.Server(handle), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(request)
    try:
        yield reader
    finally:
        writer.close()
        server.close()


async def five_chunks() -> AsyncGenerator[Chunk, None]:
    for text in "abcd":
        yield Chunk(text, tokens=1)
    yield Chunk(finish_reason="stop")


async def http_chunks(reader: asyncio.StreamReader) -> list[bytes]:
    found = []
    while size := int(await reader.readline(), 16):
        found.append((await reader.readexactly(size + 2))[:-2])
    return found


async def test_chunks_that_come_together_leave_together() -> None:
    async with answer_to(b"POST / HTTP/1.1\r\nHost: localhost\r\n\r\n", five_chunks()) as reader:
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"transfer-encoding: chunked" in head.lower()
        pieces = await http_chunks(reader)
    texts = [[part[:1] for part in piece.split(b'"content":"')[1:]] for piece in pieces]
    assert texts == [[b'"', b"a"], [b"b", b"c", b"d"]]
    assert pieces[-1].endswith(b"data: [DONE]\n\n")


async def test_the_source_waits_for_a_client_that_reads_slowly() -> None:
    count, made = 200, 0

    async def many() -> AsyncGenerator[Chunk, None]:
        nonlocal made
        for made in range(1, count + 1):  # noqa: B007
            yield Chunk("x" * 100_000, tokens=1)
        yield Chunk(finish_reason="stop")

    async with answer_to(b"POST / HTTP/1.1\r\nHost: localhost\r\n\r\n", many()) as reader:
        await reader.readuntil(b"\r\n\r\n")
        before = -1
        while before != made:  # until the source waits
            before = made
            await asyncio.sleep(0.05)
        assert made < count
        body = b"".join(await http_chunks(reader))
    assert body.count(b"x" * 100_000) == count
    assert body.endswith(b"data: [DONE]\n\n")
