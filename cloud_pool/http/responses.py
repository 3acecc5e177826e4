"""Chunks to bytes for one HTTP client: a whole answer, a stream, or an error."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable, Mapping

import anyio
from aiohttp import web

from router.errors import AuthenticationFailed, CausewayError, ClientGone
from router.openai import AnswerEncoder, coalesce, encode_error, error_event
from router.types import Chunk

from .aiohttp_internals import BufferedHeadResponse

JSON = "application/json"
STALLED_S = 30.0
"""A client that reads nothing for this long counts as gone, so that its permit becomes free."""
_SMALL_BYTES = 16 * 1024


OnChunk = Callable[[Chunk], None]
"""Gets each chunk before it is sent."""


class BrokenStream(Exception):
    """The answer broke after its first byte; the stream has ended with an error event."""

    def __init__(self, error: CausewayError, response: web.StreamResponse) -> None:
        super().__init__(error.code)
        self.error = error
        self.response = response


async def whole_response(
    chunks: AsyncGenerator[Chunk, None], on_chunk: OnChunk, encoder: AnswerEncoder, headers: Mapping[str, str]
) -> web.StreamResponse:
    """Collect the chunks into one JSON response. Raises CausewayError."""
    collected = []
    async for chunk in chunks:
        on_chunk(chunk)
        collected.append(chunk)
    return web.Response(body=encoder.whole(*coalesce(collected)), content_type=JSON, headers=headers)


async def stream_response(
    http: web.BaseRequest,
    chunks: AsyncGenerator[Chunk, None],
    on_chunk: OnChunk,
    encoder: AnswerEncoder,
    headers: Mapping[str, str],
) -> web.StreamResponse:
    """Send the chunks as server-sent events.

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
    await _write(http, response, encoder.start() + encoder.chunk(first))
    try:
        async for chunk in chunks:
            on_chunk(chunk)
            if data := encoder.chunk(chunk):
                await _write(http, response, data)
        await _write(http, response, encoder.end())
    except ClientGone:
        raise
    except CausewayError as error:
        await _write(http, response, error_event(error))
        raise BrokenStream(error, response) from error
    return response


def error_response(error: CausewayError) -> web.Response:
    """Build OpenAI's error object with the error's status and Retry-After."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, AuthenticationFailed):
        headers["www-authenticate"] = "Bearer"
    return web.Response(body=encode_error(error), status=error.status, content_type=JSON, headers=headers)


async def _write(http: web.BaseRequest, response: web.StreamResponse, data: bytes) -> None:
    """Raises ClientGone."""
    transport = http.transport
    if transport is None:
        raise ClientGone("the client has left")
    # A timer for each token would cost as much as the token, and only a client that is behind can stall.
    cannot_stall = transport.get_write_buffer_size() == 0 and len(data) < _SMALL_BYTES
    try:
        if cannot_stall:
            await response.write(data)
        else:
            with anyio.fail_after(STALLED_S):
                await response.write(data)
    except (ConnectionError, TimeoutError) as error:
        raise ClientGone("the client reads nothing any more") from error
