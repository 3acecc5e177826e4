"""Read a cloud server's response: complete, streamed, or an error. Bounded in bytes and in time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aiohttp

from router.errors import CausewayError, CloudFailed, CloudTimeout, Phase
from router.openai import StreamDecoder
from router.sse import SSEParser
from router.types import Chunk

from ..backend import BackendRequest
from .error_mapping import client_error, status_error

MAX_ANSWER_BYTES = 16 * 1024 * 1024
MAX_ERROR_BYTES = 64 * 1024
_END_S = 0.05


async def read_stream(response: aiohttp.ClientResponse, call: BackendRequest, until: float) -> AsyncIterator[Chunk]:
    """Server-sent events → chunks. `until` is the deadline of the first chunk, the call's deadline that of the rest."""
    parser, decoder = SSEParser(), StreamDecoder()
    timer = _StreamTimer(response.content, until)
    size_bytes = 0
    phase: Phase = "first_token"
    try:
        while not decoder.done:
            data = await _read_more(response, call, phase)
            if not data:
                break
            size_bytes += len(data)
            if size_bytes > MAX_ANSWER_BYTES:
                raise _too_large(call)
            if parser.idle and (text := decoder.feed_text(data)) is not None:
                yield text
                continue
            for event in parser.feed(data):
                for chunk in decoder.feed(event.data):
                    if phase == "first_token":
                        phase = "stream"
                        timer.move(call.deadline)
                    yield chunk
        for chunk in decoder.finish():
            yield chunk
    finally:
        timer.cancel()
    with contextlib.suppress(TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(_END_S):
            await response.content.readany()  # the end of the body, so that the connection can be reused


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


async def _read_more(response: aiohttp.ClientResponse, call: BackendRequest, phase: Phase) -> bytes:
    """The next bytes, b"" at the end."""
    try:
        return await response.content.readany()
    except TimeoutError as error:
        raise too_slow(call, phase) from error
    except (aiohttp.ClientError, OSError) as error:
        raise client_error(error, call.target.name, "stream") from error


async def read_whole(response: aiohttp.ClientResponse, call: BackendRequest) -> bytes:
    """A complete body. Raises CloudTimeout, CloudFailed or StreamBroken."""
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


def _too_large(call: BackendRequest) -> CloudFailed:
    return CloudFailed(f"{call.target.name}'s answer exceeds {MAX_ANSWER_BYTES} bytes", phase="stream")
