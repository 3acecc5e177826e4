"""Chunks → bytes: how an answer, a refusal or a break reaches an HTTP client."""

from __future__ import annotations

import asyncio

from aiohttp import web

from router.errors import AuthenticationFailed, CausewayError, ClientGone
from router.openai import AnswerEncoder, CachedAnswer, coalesce, encode_embeddings, encode_error, error_event
from router.types import Embeddings, Request

from ..serving.reply import AnswerHead, Piece
from .prebuilt_response import SERVER, STALLED_S, PrebuiltResponse
from .request_reader import retry_after

JSON = "application/json"
EVENTS = "text/event-stream; charset=utf-8"
_PREFIX = {"chat": "chatcmpl-", "completion": "cmpl-", "embedding": "emb-"}


class EventStream(web.StreamResponse):
    """Its head waits for the first event and leaves in one piece with it: nobody is woken up twice for one token."""

    _send_headers_immediately = False  # aiohttp's switch, which its own whole Response turns the same way


class HttpReplyWriter:
    """One client's answer. Afterwards `response`, or after an error `fail`, is what the server returns."""

    def __init__(self, request: Request, http: web.BaseRequest, *, id: str, created: int) -> None:  # noqa: A002
        self._request = request
        self._http = http
        self._answer_id = _PREFIX[request.kind] + id
        self._created = created
        self._head: AnswerHead | None = None
        self._whole: bytes | None = None  # an answer that needs no encoding any more
        self._pieces: list[Piece] = []
        self._stream: web.StreamResponse | None = None
        self._encoder: AnswerEncoder | None = None
        self._ready: PrebuiltResponse | None = None
        self._opening = b""

    # --- the service's side (Reply) ----------------------------------------------------------------------------------

    async def commit(self, head: AnswerHead) -> None:
        self._head = head
        if not self._request.stream:
            return
        self._encoder = AnswerEncoder(self._request, self._answer_id, head.model, self._created)
        self._opening = self._encoder.start()
        self._stream = EventStream(headers=_headers(head, EVENTS))
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
            self._whole = answer.stream(self._answer_id, self._created, include_usage=usage)
        else:
            self._whole = answer.whole(self._answer_id, self._created)

    async def end(self) -> None:
        if self._stream is not None and self._encoder is not None:
            await self._write(self._stream, self._opening + self._encoder.end())
            return
        assert self._head is not None
        media = EVENTS if self._request.stream else JSON
        body = self._whole if self._whole is not None else self._encode(self._head)
        ready = PrebuiltResponse(_fields(self._head, media), body)
        try:
            ready.send(self._http)
        except ConnectionError as error:
            raise ClientGone("the client closed the connection") from error
        self._ready = ready

    # --- the server's side -------------------------------------------------------------------------------------------

    @property
    def response(self) -> web.StreamResponse:
        """What was sent, for the server to finish."""
        response = self._stream or self._ready
        assert response is not None
        return response

    async def fail(self, error: CausewayError, *, id: str, policy: str) -> web.StreamResponse:  # noqa: A002
        """Before the first byte: a status and the error object. After it: an error event, and the stream ends there."""
        if self._stream is None:
            return error_response(error, {"x-causeway-decision": id, "x-causeway-policy": policy})
        await self._write(self._stream, error_event(error))
        return self._stream

    def _encode(self, head: AnswerHead) -> bytes:
        first = self._pieces[0]
        if isinstance(first, Embeddings):
            return encode_embeddings(self._request, first, head.model)
        chunks = [piece for piece in self._pieces if not isinstance(piece, Embeddings)]
        return AnswerEncoder(self._request, self._answer_id, head.model, self._created).whole(*coalesce(chunks))

    async def _write(self, stream: web.StreamResponse, data: bytes) -> None:
        """Raises ClientGone when nobody takes the bytes."""
        try:
            async with asyncio.timeout(STALLED_S):
                await stream.write(data)
        except ConnectionError as error:
            raise ClientGone("the client closed the connection") from error
        except TimeoutError:
            if self._http.transport is not None:
                self._http.transport.abort()
            raise ClientGone(f"the client took no byte for {STALLED_S:g} s") from None


def error_response(error: CausewayError, headers: dict[str, str] | None = None) -> web.Response:
    known = {"Content-Type": JSON, "Server": SERVER, **(headers or {})}
    if error.retry_after_s is not None:
        known["Retry-After"] = retry_after(error.retry_after_s)
    if isinstance(error, AuthenticationFailed):
        known["WWW-Authenticate"] = "Bearer"
    return web.Response(status=error.status, body=encode_error(error), headers=known)


def _fields(head: AnswerHead, media: str) -> str:
    """The same as `_headers`, as the lines of a head. Most of it is the same for every hit."""
    known = (media, head.route, head.target, head.reason, head.cache, head.policy, head.degraded)
    lines = _lines.get(known)
    if lines is None:
        if len(_lines) >= _LINES:
            _lines.clear()
        lines = _lines[known] = "".join(f"{name}: {value}\r\n" for name, value in _story(head, media).items())
    return f"{lines}x-request-id: {head.id}\r\nx-causeway-decision: {head.id}\r\n"


def _headers(head: AnswerHead, media: str) -> dict[str, str]:
    return {**_story(head, media), "x-request-id": head.id, "x-causeway-decision": head.id, "Server": SERVER}


def _story(head: AnswerHead, media: str) -> dict[str, str]:
    """All but the id."""
    headers = {
        "Content-Type": media,
        "x-causeway-route": head.route,
        "x-causeway-target": head.target,
        "x-causeway-reason": head.reason,
        "x-causeway-cache": head.cache,
        "x-causeway-policy": head.policy,
        "x-causeway-degraded": "true" if head.degraded else "false",
    }
    if media is EVENTS:
        headers["Cache-Control"] = "no-cache"
        headers["X-Accel-Buffering"] = "no"  # nginx would hold a stream back until its buffer is full
    return headers


_LINES = 256
_lines: dict[tuple[str | bool, ...], str] = {}
