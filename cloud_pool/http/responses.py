"""Chunks to bytes for one HTTP client: a whole answer, a stream, or an error."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Protocol

from aiohttp import web

from router.errors import CausewayError, ClientGone, Draining
from router.openai import AnswerEncoder, ResponseEncoder, coalesce, error_event
from router.serving.logs import redacted
from router.serving.responses import STOPPED, STREAMED, EventStream, body_response, header_lines
from router.types import Chunk

_log = logging.getLogger("causeway.cloud.responses")

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
    stream = EventStream(http, header_lines({**STREAMED, **headers}))
    stream.send(encoder.start() + encoder.chunk(first))
    try:
        async for chunk in chunks:
            on_chunk(chunk)
            if data := encoder.chunk(chunk):
                stream.send(data)
                if stream.client_behind:
                    await stream.drain()
    except ClientGone:
        raise
    except asyncio.CancelledError:
        if encoder.finished or http.transport is None or http.transport.is_closing():
            raise
        stopped = Draining(STOPPED)  # the client is there: the listener closes
        stream.end(error_event(stopped))
        raise BrokenStream(stopped, stream) from stopped
    except Exception as fault:
        if not encoder.finished:
            # A second response would land inside this one.
            failed = fault if isinstance(fault, CausewayError) else CausewayError("The gateway failed.")
            stream.end(error_event(failed))
            raise BrokenStream(failed, stream) from fault
        _log.info("a fault after the answer's end: %s", redacted(fault))
    stream.end(encoder.end())
    await stream.drain()
    return stream
