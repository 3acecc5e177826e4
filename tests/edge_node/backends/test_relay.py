"""Text that goes to the client as it arrives, past the task that reads the answer: nothing is lost, doubled or late."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import aclosing

import msgspec
import pytest

from causeway_server.router.errors import StreamBroken
from causeway_server.router.types import Chunk
from tests.waiting import until

from .test_cloud import call, connected

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Upstream:
    """Streams what the test says, when it says so."""

    def __init__(self) -> None:
        self.writer: asyncio.StreamWriter | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(_HEAD)
        self.writer = writer

    async def send(self, data: bytes) -> None:
        await until(lambda: self.writer)
        assert self.writer is not None
        self.writer.write(b"%x\r\n%b\r\n" % (len(data), data) if data else b"0\r\n\r\n")


class Seen:
    """The texts in their order, and by which way each came. Takes `takes` events (`TextRelay`)."""

    def __init__(self, takes: int) -> None:
        self.chunks: list[Chunk] = []
        self.ways = ""
        self._takes = takes

    def take(self, texts: Sequence[bytes], index: int) -> bool:
        if self._takes == 0:
            return False
        self._takes -= 1
        for text in texts:
            self.add(Chunk(msgspec.json.decode(text), index, 1), "r")
        return True

    def add(self, chunk: Chunk, way: str) -> None:
        self.chunks.append(chunk)
        self.ways += way

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)


def event(text: str | None = None, finish: str | None = None, **delta: object) -> bytes:
    inner = delta if text is None else {"content": text, **delta}
    choice = {"index": 0, "delta": inner, "finish_reason": finish}
    return b"data: " + json.dumps({"id": "x", "choices": [choice]}).encode() + b"\n\n"


async def read(seen: Seen, pieces: list[bytes]) -> None:
    """Send each piece when the one before has been read."""
    upstream = Upstream()
    listener = await asyncio.start_server(upstream.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/v1"
    async with listener, connected(url, max_connections=1) as backend:
        one = msgspec.structs.replace(call(stream=True), relay=seen)

        async def consume() -> None:
            async with aclosing(backend.generate(one)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    seen.add(chunk, "i")

        consuming = asyncio.ensure_future(consume())
        for piece in pieces:
            count = len(seen.chunks)
            await upstream.send(piece)
            if b'"content": "' in piece and piece.endswith(b"\n\n"):
                await until(lambda count=count: len(seen.chunks) > count or consuming.done())  # type: ignore[misc]
        if upstream.writer is not None:
            upstream.writer.close()
        await consuming


TEXTS = ["a", "b", " ü", '"\n', "e", "f"]
END = [event(finish="stop"), b"data: [DONE]\n\n", b""]


@pytest.mark.parametrize(("takes", "ways"), [(99, "irrrrri"), (2, "irriiii"), (0, "iiiiiii")])
async def test_text_goes_to_the_relay_while_that_takes_it(takes: int, ways: str) -> None:
    """But for the first chunk, which shows what the others look like, and the end."""
    seen = Seen(takes)
    await read(seen, [*map(event, TEXTS), *END])
    assert seen.text == "".join(TEXTS)
    assert seen.ways == ways
    assert [chunk.finish_reason for chunk in seen.chunks if chunk.finish_reason] == ["stop"]


async def test_what_is_more_than_text_comes_from_the_iterator() -> None:
    seen = Seen(99)
    call_piece = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}
    calls = event("c", tool_calls=[call_piece])
    await read(seen, [event("a"), event("b"), calls, event("d"), event("e") + event("f"), event("g"), *END])
    assert seen.text == "abcdefg"
    assert seen.ways == "irirrrri"
    assert [delta.id for chunk in seen.chunks for delta in chunk.tool_calls] == ["c"]


@pytest.mark.parametrize("at", range(1, len(event("b"))))
async def test_an_event_in_two_pieces_is_one_chunk(at: int) -> None:
    seen = Seen(99)
    whole = event("b")
    await read(seen, [event("a"), whole[:at], whole[at:], event("c"), *END])
    assert seen.text == "abc"


async def test_a_stream_that_breaks_after_relayed_text_is_an_error() -> None:
    seen = Seen(99)
    with pytest.raises(StreamBroken):
        await read(seen, [event("a"), event("b")])
    assert seen.text == "ab"
