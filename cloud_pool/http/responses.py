"""Chunks to bytes for one HTTP client: a whole answer, a stream, or an error."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Protocol

from aiohttp import web

from router.errors import CausewayError, ClientGone, Draining
from router.openai import (
    AnswerEncoder,
    ResponseEncoder,
    coalesce,
    error_event,
)
from router.serving.logs import redacted
from router.serving.responses import STALLED_S, STOPPED, body_response
from router.types import Chunk

from .aiohttp_internals import BufferedHeadResponse

_log = logging.getLogger("causeway.cloud.responses")
_TOGETHER_S = 0.001
_READY_BYTES = 16 * 1024  # events that wait for each other

Encoder = AnswerEncoder | ResponseEncoder


class StreamEncoder(Protocol):
    """Encodes the events of a stream. `finished`: the client has all that it asked for, whatever follows."""

    @property
    def finished(self) -> bool: ...

    def start(self) -> bytes: ...

    def chunk(self, chunk: Chunk) -> bytes: ...

    def end(self) -> bytes: ...


OnChunk = Callable[[Chunk], None]
"""Gets each chunk before it is sent."""


class BrokenStream(Exception):
    """The answer broke after its first byte; the stream has ended with an error event."""

    def __init__(self, error: CausewayError, response: web.StreamResponse) -> None:
        super().__init__(error.code)
        self.error = error
        self.response = response


async def whole_response(
    chunks: AsyncGenerator[Chunk, None], on_chunk: OnChunk, encoder: Encoder, headers: Mapping[str, str]
) -> web.StreamResponse:
    """Collect the chunks into one JSON response. Raises CausewayError."""
    collected = []
    async for chunk in chunks:
        on_chunk(chunk)
        collected.append(chunk)
    return body_response(encoder.whole(*coalesce(collected)), headers=headers)


async def stream_response(
    http: web.BaseRequest,
    chunks: AsyncGenerator[Chunk, None],
    on_chunk: OnChunk,
    encoder: StreamEncoder,
    headers: Mapping[str, str],
) -> web.StreamResponse:
    """Send the chunks as server-sent events. The stream has one end: a fault after every choice's end changes nothing.

    Raises:
        CausewayError: before the first byte.
        BrokenStream: after it.
        ClientGone: the client has left or reads nothing.
    """
    first = await anext(chunks)
    on_chunk(first)
    response = BufferedHeadResponse(
        headers={"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **headers}
    )
    try:
        await response.prepare(http)
    except ConnectionError as error:
        raise ClientGone("the client has left") from error
    events = _EventWriter(http, response)
    await events.begin(encoder.start() + encoder.chunk(first))
    try:
        async for chunk in chunks:
            on_chunk(chunk)
            if data := encoder.chunk(chunk):
                await events.write(data)
    except ClientGone:
        raise
    except asyncio.CancelledError:
        if encoder.finished or http.transport is None or http.transport.is_closing():
            raise
        stopped = Draining(STOPPED)  # the client is there: the listener closes
        await events.end(error_event(stopped))
        raise BrokenStream(stopped, response) from stopped
    except Exception as fault:
        if not encoder.finished:
            # A second response would land inside this one.
            failed = fault if isinstance(fault, CausewayError) else CausewayError("The gateway failed.")
            await events.end(error_event(failed))
            raise BrokenStream(failed, response) from fault
        _log.info("a fault after the answer's end: %s", redacted(fault))
    await events.end(encoder.end())
    return response


class _EventWriter:
    """Writes a response's events straight to its transport: aiohttp's four layers cost as much as the rest of a token.

    An event is written at once, and those that come within `_TOGETHER_S` of it in one write in the loop's next turn.
    Each method raises ClientGone. Only a client that is behind gets a timer: one per token would cost as much as that.
    """

    def __init__(self, http: web.BaseRequest, response: web.StreamResponse) -> None:
        self._http = http
        self._protocol = http.protocol
        self._response = response
        self._chunked = http.version.minor > 0
        self._loop = asyncio.get_running_loop()
        self._written_at = -math.inf
        self._ready: list[bytes] = []
        self._ready_bytes = 0

    async def begin(self, events: bytes) -> None:
        """Send the head and the first events."""
        await self._await(self._response.write(events), len(events))

    async def write(self, events: bytes) -> None:
        if not self._ready and self._loop.time() - self._written_at > _TOGETHER_S:
            self._written_at = self._loop.time()
            self._send(events)
        else:
            if not self._ready:
                self._loop.call_soon(self._flush)
            self._ready.append(events)
            self._ready_bytes += len(events)
            if self._ready_bytes > _READY_BYTES:
                self._send(self._take())
        if self._protocol.writing_paused:
            await self._await(self._http.writer.drain())

    async def end(self, events: bytes) -> None:
        """Send the last events and the end of the body."""
        events = self._take() + events
        await self._await(self._response.write_eof(events), len(events))

    def _send(self, events: bytes) -> None:
        transport = self._protocol.transport
        if transport is None or transport.is_closing():
            raise ClientGone("the client has left")
        transport.write(b"%x\r\n%b\r\n" % (len(events), events) if self._chunked else events)

    def _flush(self) -> None:
        if events := self._take():
            with contextlib.suppress(ClientGone):  # the next `write` or `end` says so
                self._send(events)

    def _take(self) -> bytes:
        events = b"".join(self._ready)
        self._ready.clear()
        self._ready_bytes = 0
        return events

    async def _await(self, writing: Awaitable[None], size_bytes: int = 0) -> None:
        behind = self._protocol.writing_paused or size_bytes > _READY_BYTES
        try:
            async with asyncio.timeout(STALLED_S) if behind else contextlib.nullcontext():
                await writing
        except (ConnectionError, TimeoutError) as error:
            raise ClientGone("the client has left, or reads nothing any more") from error
