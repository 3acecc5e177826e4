"""Read a cloud server's response: complete, streamed, or an error. Bounded in bytes and in time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import aiohttp

from router.errors import CausewayError, CloudTimeout, CloudUnreadable, Phase
from router.openai import StreamDecoder, decode_answer
from router.sse import SSEParser
from router.types import Chunk

from ..backend import BackendRequest
from .error_mapping import client_error, status_error

MAX_ANSWER_BYTES = 16 * 1024 * 1024
MAX_ERROR_BYTES = 64 * 1024
_END_S = 0.05
_USAGE_S = 1.0  # after the end of every choice, for the usage and the end of the body
_BLANK = b"\xef\xbb\xbf \t\r\n"


class StreamReader:
    """Reads a streamed answer: server-sent events → chunks.

    Args:
        until: deadline of the first chunk, monotonic seconds; the call's deadline is that of the rest.
    """

    def __init__(self, response: aiohttp.ClientResponse, call: BackendRequest, until: float) -> None:
        self._content = response.content
        self._call = call
        self._parser = SSEParser()
        self._decoder = StreamDecoder(call.id, call.request.sequences)
        self._document: list[bytes] | None = None  # pieces of an answer that is JSON in spite of the request
        self._timer = _StreamTimer(response.content, until)
        self._size_bytes = 0
        self._has_events = False
        self._phase: Phase = "first_token"
        self._error: CausewayError | None = None

    async def next(self) -> Sequence[Chunk]:
        """Return the chunks that arrive next, none after the last.

        Raises:
            CloudTimeout, StreamBroken: The answer is late, or stops before its end.
            CloudUnreadable, CloudFailed: The bytes are not an answer, or report an error.
        """
        if self._error is not None:
            raise self._error
        while not self._decoder.done:
            data = await self._read()
            if data:
                if chunks := self._take(data):
                    return chunks
            elif self._document is None:
                if self._size_bytes and not self._has_events:
                    raise CloudUnreadable(f"{self._call.target.name}'s stream has no events")
                return self._decoder.finish()
            else:
                self._decoder.done = True
                return decode_answer(b"".join(self._document), self._call.id)
        return ()

    async def _read(self) -> bytes:
        """Return the bytes that arrive next; none at the end, and where nothing but the end is missing."""
        try:
            data = await self._content.readany()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            if self._decoder.whole:
                return b""
            if isinstance(error, TimeoutError):
                raise too_slow(self._call, self._phase) from error
            raise client_error(error, self._call.target.name, "stream") from error
        if not self._size_bytes and data.lstrip(_BLANK)[:1] == b"{":  # no event begins so
            self._document = []
        self._size_bytes += len(data)
        if self._size_bytes > MAX_ANSWER_BYTES:
            raise _too_large(self._call)
        return data

    def _take(self, data: bytes) -> Sequence[Chunk]:
        if self._document is not None:
            self._document.append(data)
            return ()
        if self._parser.idle and (text := self._decoder.feed_text(data)) is not None:
            return (text,)
        chunks = self._decode(data)
        if self._decoder.whole:
            self._timer.move(min(self._call.deadline, asyncio.get_running_loop().time() + _USAGE_S))
        elif chunks and self._phase == "first_token":
            self._phase = "stream"
            self._timer.move(self._call.deadline)
        return chunks

    def _decode(self, data: bytes) -> list[Chunk]:
        """The chunks of all events that `data` completes. The next call raises an error that comes after chunks."""
        chunks: list[Chunk] = []
        try:
            for event in self._parser.feed(data):
                self._has_events = True
                chunks += self._decoder.feed(event.data)
        except CausewayError as error:
            if not chunks:
                raise
            self._error = error
        return chunks

    async def read_end(self) -> None:
        """Read the end of the body, so that the connection can be reused."""
        self._timer.cancel()
        if self._content.at_eof():
            return
        with contextlib.suppress(TimeoutError, aiohttp.ClientError):
            async with asyncio.timeout(_END_S):
                await self._content.readany()

    def close(self) -> None:
        self._timer.cancel()


class _StreamTimer:
    """Fails the reads of a body from a moment on: one timer per stream, as one per read costs more than the read."""

    def __init__(self, content: aiohttp.StreamReader, until: float) -> None:
        self._content = content
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_at(until, self._expire)

    def move(self, until: float) -> None:
        self._timer.cancel()
        self._timer = self._loop.call_at(until, self._expire)

    def cancel(self) -> None:
        self._timer.cancel()

    def _expire(self) -> None:
        self._content.set_exception(TimeoutError())


async def read_whole(response: aiohttp.ClientResponse, call: BackendRequest) -> bytes:
    """A complete body. Raises CloudTimeout, CloudUnreadable, CloudFailed or StreamBroken."""
    try:
        async with asyncio.timeout_at(call.deadline):
            body = await read_body(response, MAX_ANSWER_BYTES)
    except TimeoutError as error:
        raise too_slow(call, "first_token") from error
    except (aiohttp.ClientError, OSError) as error:
        raise client_error(error, call.target.name, "stream") from error
    if body is None:
        raise _too_large(call)
    return body


async def read_error(response: aiohttp.ClientResponse, call: BackendRequest, until: float) -> CausewayError:
    """The error for a response whose status is not 200, with the server's message if it arrives in time."""
    body: bytes | None = b""
    try:
        async with asyncio.timeout_at(until):
            body = await read_body(response, MAX_ERROR_BYTES)
    except (TimeoutError, aiohttp.ClientError, OSError):
        pass
    finally:
        response.release()
    return status_error(response.status, response.headers, body or b"", call.target.name)


async def read_body(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes | None:
    """The body, or None when it is larger."""
    pieces: list[bytes] = []
    size_bytes = 0
    while piece := await response.content.readany():
        size_bytes += len(piece)
        if size_bytes > limit_bytes:
            return None
        pieces.append(piece)
    return b"".join(pieces)


def too_slow(call: BackendRequest, phase: Phase) -> CloudTimeout:
    return CloudTimeout(f"{call.target.name} took too long", phase=phase)


def _too_large(call: BackendRequest) -> CloudUnreadable:
    return CloudUnreadable(f"{call.target.name}'s answer exceeds {MAX_ANSWER_BYTES} bytes", phase="stream")
