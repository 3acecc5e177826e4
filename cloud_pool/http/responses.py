"""Chunks → bytes for one HTTP client: a whole answer, a stream, or a refusal."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable, Mapping

import anyio
from aiohttp import web

from router.errors import AuthenticationFailed, CausewayError, ClientGone
from router.openai import AnswerEncoder, coalesce, encode_error, error_event
from router.types import Chunk

JSON = "application/json"
STALLED_S = 30.0
"""A client that takes nothing for so long is gone; its place in the tier is somebody else's."""
_SMALL_BYTES = 16 * 1024


Seen = Callable[[Chunk], None]
"""Is told each chunk before it is sent."""


class EventStream(web.StreamResponse):
    """Its head waits for the first event and leaves in one piece with it: nobody is woken up twice for one token."""

    _send_headers_immediately = False  # aiohttp's switch, which its own whole Response turns the same way


class BrokenStream(Exception):
    """The answer broke after its first byte, and the client has been told inside the stream."""

    def __init__(self, error: CausewayError, response: web.StreamResponse) -> None:
        super().__init__(error.code)
        self.error = error
        self.response = response


async def whole(
    chunks: AsyncGenerator[Chunk, None], seen: Seen, encoder: AnswerEncoder, headers: Mapping[str, str]
) -> web.StreamResponse:
    """Raises CausewayError."""
    found = []
    async for chunk in chunks:
        seen(chunk)
        found.append(chunk)
    return web.Response(body=encoder.whole(*coalesce(found)), content_type=JSON, headers=headers)


async def streamed(
    http: web.BaseRequest,
    chunks: AsyncGenerator[Chunk, None],
    seen: Seen,
    encoder: AnswerEncoder,
    headers: Mapping[str, str],
) -> web.StreamResponse:
    """Raises CausewayError before the first byte, and after it BrokenStream, or ClientGone."""
    first = await anext(chunks)
    seen(first)
    stream = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **headers}
    response = EventStream(headers=stream)
    try:
        await response.prepare(http)
    except ConnectionError as error:
        raise ClientGone("the client has left") from error
    await _write(http, response, encoder.start() + encoder.chunk(first))
    try:
        async for chunk in chunks:
            seen(chunk)
            if data := encoder.chunk(chunk):
                await _write(http, response, data)
        await _write(http, response, encoder.end())
    except ClientGone:
        raise
    except CausewayError as error:
        await _write(http, response, error_event(error))
        raise BrokenStream(error, response) from error
    return response


def refusal(error: CausewayError) -> web.Response:
    """OpenAI's error object, with its status and when to come back."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, AuthenticationFailed):
        headers["www-authenticate"] = "Bearer"
    return web.Response(body=encode_error(error), status=error.status, content_type=JSON, headers=headers)


async def _write(http: web.BaseRequest, response: web.StreamResponse, data: bytes) -> None:
    """Raises ClientGone when the client has left, or takes nothing any more."""
    transport = http.transport
    if transport is None:
        raise ClientGone("the client has left")
    # A timer for each token would cost as much as the token: only a client that is behind can stall.
    cannot_stall = transport.get_write_buffer_size() == 0 and len(data) < _SMALL_BYTES
    try:
        if cannot_stall:
            await response.write(data)
        else:
            with anyio.fail_after(STALLED_S):
                await response.write(data)
    except (ConnectionError, TimeoutError) as error:
        raise ClientGone("the client does not take the answer any more") from error
