"""Pieces → bytes: complete answers, streamed answers and errors, as an HTTP client receives them.

aiohttp's own response builds a multidict of headers and serialises it again; for a cache hit that costs as much as
everything else together. A complete answer is therefore written as prebuilt bytes (`PrebuiltResponse`), in one write.
"""

from __future__ import annotations

import asyncio
import math
import time
from email.utils import formatdate

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.client_exceptions import ClientConnectionResetError

from router.errors import AuthenticationFailed, CausewayError, ClientGone
from router.openai import AnswerEncoder, CachedAnswer, coalesce, encode_embeddings, encode_error, error_event
from router.types import Embeddings, Request

from ..serving.reply import AnswerHead, Piece
from .aiohttp_internals import DeferredHeadStream

SERVER = "causeway"
JSON = "application/json"
EVENTS = "text/event-stream; charset=utf-8"
STALLED_S = 30.0  # a client that reads nothing for so long is disconnected
_PREFIX = {"chat": "chatcmpl-", "completion": "cmpl-", "embedding": "emb-"}


class HttpReplyWriter:
    """The response to one client (`Reply`). Afterwards `response`, or after an error `fail`, is for the server."""

    def __init__(self, request: Request, http: web.BaseRequest, *, id: str, created: int) -> None:  # noqa: A002
        self._request = request
        self._http = http
        self._id = id
        self._created = created
        self._head: AnswerHead | None = None
        self._cached_body: bytes | None = None
        self._pieces: list[Piece] = []
        self._stream: web.StreamResponse | None = None
        self._encoder: AnswerEncoder | None = None
        self._prebuilt: PrebuiltResponse | None = None
        self._opening = b""  # the first event, sent together with the first content

    # --- for the service (Reply) -------------------------------------------------------------------------------------

    async def commit(self, head: AnswerHead) -> None:
        self._head = head
        if not self._request.stream:
            return
        self._encoder = AnswerEncoder(self._request, self._answer_id, head.model, self._created)
        self._opening = self._encoder.start()
        self._stream = DeferredHeadStream(headers=_headers(head, EVENTS))
        await self._stream.prepare(self._http)

    async def send(self, piece: Piece) -> None:
        if self._stream is None or self._encoder is None or isinstance(piece, Embeddings):
            self._pieces.append(piece)
            return
        data = self._encoder.chunk(piece)
        if data:
            await self._write(self._stream, self._opening + data)
            self._opening = b""

    async def replay(self, head: AnswerHead, answer: CachedAnswer | Embeddings) -> None:
        self._head = head
        if isinstance(answer, Embeddings):
            self._pieces = [answer]
        elif self._request.stream:
            usage = self._request.include_usage
            self._cached_body = answer.stream(self._answer_id, self._created, include_usage=usage)
        else:
            self._cached_body = answer.whole(self._answer_id, self._created)

    async def end(self) -> None:
        if self._stream is not None and self._encoder is not None:
            await self._write(self._stream, self._opening + self._encoder.end())
            return
        assert self._head is not None
        media_type = EVENTS if self._request.stream else JSON
        body = self._cached_body if self._cached_body is not None else self._encode(self._head)
        prebuilt = PrebuiltResponse(_header_lines(self._head, media_type), body)
        try:
            prebuilt.send(self._http)
        except ConnectionError as error:
            raise ClientGone("the client closed the connection") from error
        self._prebuilt = prebuilt

    # --- for the server ----------------------------------------------------------------------------------------------

    @property
    def response(self) -> web.StreamResponse:
        """The response that was sent, for the server to finish."""
        response = self._stream or self._prebuilt
        assert response is not None
        return response

    async def fail(self, error: CausewayError, *, policy: str) -> web.StreamResponse:
        """Before the first byte: a status and the error object. After it: an error event that ends the stream.

        `policy`: name@revision.
        """
        if self._stream is None:
            return error_response(error, {"x-causeway-decision": self._id, "x-causeway-policy": policy})
        await self._write(self._stream, error_event(error))
        return self._stream

    @property
    def _answer_id(self) -> str:
        return _PREFIX[self._request.kind] + self._id

    def _encode(self, head: AnswerHead) -> bytes:
        first = self._pieces[0]
        if isinstance(first, Embeddings):
            return encode_embeddings(self._request, first, head.model)
        chunks = [piece for piece in self._pieces if not isinstance(piece, Embeddings)]
        return AnswerEncoder(self._request, self._answer_id, head.model, self._created).whole(*coalesce(chunks))

    async def _write(self, stream: web.StreamResponse, data: bytes) -> None:
        """Raises ClientGone when the client has disconnected or stopped reading."""
        try:
            async with asyncio.timeout(STALLED_S):
                await stream.write(data)
        except ConnectionError as error:
            raise ClientGone("the client closed the connection") from error
        except TimeoutError:
            if self._http.transport is not None:
                self._http.transport.abort()
            raise ClientGone(f"the client read nothing for {STALLED_S:g} s") from None


class PrebuiltResponse(web.StreamResponse):
    """Status 200, head and body in one write. `lines`: header lines, each with its CRLF."""

    def __init__(self, lines: str, body: bytes) -> None:
        super().__init__()
        self._lines = lines
        self._bytes = body
        self._http: web.BaseRequest | None = None

    @property
    def keep_alive(self) -> bool | None:
        return self._http is not None and self._http.keep_alive

    def send(self, http: web.BaseRequest) -> None:
        """Write everything now, before the request is recorded. Raises ConnectionError when the client is gone."""
        self._http = http
        transport = http.transport
        if transport is None or transport.is_closing():
            raise ClientConnectionResetError("the client closed the connection")
        transport.write(self._head(http).encode("latin-1") + self._bytes)

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Do nothing: `send` has written the head."""
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """Wait for a client that reads slowly, so that its connection takes no further request meanwhile."""
        http = self._http
        assert http is not None
        if not http.protocol.writing_paused:
            return
        try:
            async with asyncio.timeout(STALLED_S):
                await http.writer.drain()
        except TimeoutError:
            if http.transport is not None:
                http.transport.abort()
            raise ClientConnectionResetError("the client stopped reading") from None

    def _head(self, http: web.BaseRequest) -> str:
        connection = ""
        if not http.keep_alive:
            connection = "Connection: close\r\n"
        elif http.version.minor == 0:
            connection = "Connection: keep-alive\r\n"
        return (
            f"HTTP/1.{http.version.minor} 200 OK\r\n{self._lines}Content-Length: {len(self._bytes)}\r\n"
            f"Date: {_date.now()}\r\nServer: {SERVER}\r\n{connection}\r\n"
        )


def error_response(error: CausewayError, headers: dict[str, str] | None = None) -> web.Response:
    """OpenAI's error object with the error's own status."""
    fields = {"Content-Type": JSON, "Server": SERVER, **(headers or {})}
    if error.retry_after_s is not None:
        # RFC 9110 allows whole seconds only: round up, so that the client does not retry too early.
        fields["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, AuthenticationFailed):
        fields["WWW-Authenticate"] = "Bearer"
    return web.Response(status=error.status, body=encode_error(error), headers=fields)


def _header_lines(head: AnswerHead, media_type: str) -> str:
    """The same as `_headers`, as lines. All but the id is equal for most cache hits, and remembered."""
    key = (media_type, head.route, head.target, head.reason, head.cache, head.cache_reason, head.policy, head.degraded)
    lines = _remembered_lines.get(key)
    if lines is None:
        if len(_remembered_lines) >= _MAX_REMEMBERED:
            _remembered_lines.clear()
        fields = _headers_without_id(head, media_type)
        lines = _remembered_lines[key] = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{lines}x-request-id: {head.id}\r\nx-causeway-decision: {head.id}\r\n"


def _headers(head: AnswerHead, media_type: str) -> dict[str, str]:
    fields = _headers_without_id(head, media_type)
    return {**fields, "x-request-id": head.id, "x-causeway-decision": head.id, "Server": SERVER}


def _headers_without_id(head: AnswerHead, media_type: str) -> dict[str, str]:
    headers = {
        "Content-Type": media_type,
        "x-causeway-route": head.route,
        "x-causeway-target": head.target,
        "x-causeway-reason": head.reason,
        "x-causeway-cache": head.cache,
        "x-causeway-policy": head.policy,
        "x-causeway-degraded": "true" if head.degraded else "false",
    }
    if head.cache_reason:
        headers["x-causeway-cache-reason"] = head.cache_reason
    if media_type is EVENTS:
        headers["Cache-Control"] = "no-cache"
        headers["X-Accel-Buffering"] = "no"  # otherwise nginx holds a stream back until its buffer is full
    return headers


class _Date:
    """The Date header (RFC 9110), formatted once per second."""

    def __init__(self) -> None:
        self._second = 0
        self._text = ""

    def now(self) -> str:
        second = int(time.time())
        if second != self._second:
            self._second, self._text = second, formatdate(second, usegmt=True)
        return self._text


_date = _Date()
_MAX_REMEMBERED = 256
_remembered_lines: dict[tuple[str | bool, ...], str] = {}
