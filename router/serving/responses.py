"""The bytes that an HTTP client receives for complete answers, streamed answers and errors.

Heads and chunks are built here (`PrebuiltResponse`, `EventStream`), because aiohttp's own response is slow: it builds a
multidict of headers and serialises it again, which costs as much as the rest of a cache hit, and passes each write
through four layers, which costs as much as the rest of a streamed token's work in Python. `aiohttp_connection` gives
them to aiohttp where that reads the requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import lru_cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeAlias, TypeVar

import msgspec
from multidict import istr

from ..anthropic import replies as anthropic
from ..anthropic.encoder import MessageEncoder
from ..anthropic.request import MessageTerms
from ..errors import CausewayError, ClientGone
from ..openai.answer import (
    AnswerEncoder,
    CachedAnswer,
    coalesce,
    encode_error,
    encode_whole,
    error_event,
    error_headers,
)
from ..openai.embeddings import encode_embeddings
from ..openai.responses.encoder import CompactionEncoder, ResponseEncoder, failure
from ..openai.responses.request import ResponseEcho
from ..openai.upstream.decode import EventTemplate
from ..types import Embeddings, Request
from .reply import AnswerHead, Piece, TextSink
from .request import NO_HEADERS, AiohttpRequest, HttpExchange, PlainRequest, PlainTransport

if TYPE_CHECKING:
    from aiohttp import web

ServerResponse: TypeAlias = "WholeResponse | WrittenResponse | web.StreamResponse"
"""The answer of a handler."""
SERVER = "causeway"
JSON = "application/json"
EVENTS = "text/event-stream; charset=utf-8"
STALLED_S = 30.0  # a client that reads nothing for this long is disconnected
STOPPED = "The server has stopped before the answer was complete. Send the request again."
_TOGETHER_S = 0.001
_CLOSED = "The client closed the connection."
_READY_BYTES = 16 * 1024  # maximum size of events that are sent together
_encoder = msgspec.json.Encoder()
COMMENT = b": \n\n"
_decode_text = msgspec.json.Decoder(str).decode
_NO_HEAD = (b"\n", slice(0), b"")  # no chunk begins like this
_MAX_HEADS = 256
_ORIGIN: Final = istr("Origin")
_REASONS: Final = {status.value: status.phrase for status in HTTPStatus}
_DAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
STREAMED = {"Content-Type": EVENTS, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""The headers of an event stream. The last one stops nginx from buffering the stream."""
Echo = ResponseEcho | MessageTerms
"""The fields of a body that its answer needs, if the answer's form is not that of the request's kind."""
_PREFIX = {"chat": "chatcmpl-", "completion": "cmpl-", "embedding": "emb-"}


class Handler(Protocol):
    """A function that answers a request."""

    def __call__(self, http: AiohttpRequest, /) -> Awaitable[ServerResponse]: ...


class ExchangeHandler(Protocol):
    """Answers one request, which may be a plain one."""

    def __call__(self, http: HttpExchange, /) -> Awaitable[ServerResponse]: ...


class ReplyHead(Protocol):
    """The head of an answer, known with its first piece. `model`: the name that clients use."""

    @property
    def model(self) -> str: ...


Head = TypeVar("Head", bound=ReplyHead)
_Head = TypeVar("_Head", contravariant=True)


class HeadLines(Protocol[_Head]):
    """A function that returns the header lines of a response, as `header_lines` does."""

    def __call__(self, head: _Head, media_type: str, /) -> str: ...


class KeepResponse(Protocol):
    """Stores a whole Response object before the client gets its end."""

    async def __call__(self, response: bytes, /) -> bool:
        """Return whether it is stored. Raises CausewayError if the client must not get it otherwise."""
        ...


@dataclass(eq=False, repr=False)
class HttpReplyWriter(Generic[Head]):
    """The HTTP response to a client (`ClientReply`). At the end the server takes `response`, or after an error the
    result of `fail`. `echo`: of a Response object of OpenAI's, or a Message of Anthropic's. `heartbeat_s`: the maximum
    silence of a stream; 0: no limit. A stream without an answer by then begins with a comment, and with its id in the
    headers `id_headers`. `keep`: stores the Response object; None: it is not stored. `compacted`: what binds a
    compacted response: whether it is private, and its tags. `temperature`: that of a model by the answer's head, if the
    request sets none; None: unknown.
    """

    request: Request
    http: HttpExchange
    lines: HeadLines[Head]
    _: KW_ONLY
    id: str
    created: int
    echo: Echo | None = None
    heartbeat_s: float = 0.0
    id_headers: Sequence[str] = ("x-request-id",)
    keep: KeepResponse | None = None
    compacted: Callable[[], tuple[bool, Sequence[str]]] = lambda: (False, ())
    temperature: Callable[[Head], float | None] = lambda _: None

    def __post_init__(self) -> None:
        self._begun_at = time.monotonic()
        self._head: Head | None = None
        self._cached_body: bytes | None = None
        self._pieces: list[Piece] = []
        self._stream: EventStream | None = None
        self._encoder: AnswerEncoder | ResponseEncoder | MessageEncoder | None = None
        self._prebuilt: PrebuiltResponse | None = None
        self._opening = b""  # the first event, sent together with the first content
        self._failed = False
        self._sends = 0  # the stream's number of sends at the last heartbeat
        self._exchange: TextExchange | None = None
        if self.heartbeat_s and self.request.stream:
            self.begin_heartbeat()

    def begin_heartbeat(self) -> None:
        asyncio.get_running_loop().call_later(self.heartbeat_s / 2, self._look)

    # --- for the service (ClientReply) --------------------------------------------------------------------------------

    async def commit(self, head: Head) -> None:
        self.begin(head)

    def begin(self, head: Head) -> None:
        """Do what `commit` does."""
        self._head = head
        if not self.request.stream:
            return
        self._encoder = self._new_encoder(head.model)
        self._opening = self._encoder.start()
        if self._stream is None:
            self._stream = EventStream(self.http, self._lines(head, EVENTS))

    def send(self, piece: Piece) -> Awaitable[None] | None:
        if self._stream is None or self._encoder is None or isinstance(piece, Embeddings):
            self._pieces.append(piece)
            return None
        data = self._encoder.chunk(piece)
        if not data:
            return None
        if self._opening:
            data, self._opening = self._opening + data, b""
        self._stream.send(data, last=piece.finish_reason is not None)
        return self._stream.drain() if self._stream.client_behind else None

    def adopt(
        self, head: Head | None, stream: EventStream, encoder: AnswerEncoder | MessageEncoder | None, opening: bytes
    ) -> None:
        """Take over a stream that was begun in callbacks. `opening`: the first event, if it was not sent."""
        self._head, self._stream, self._encoder, self._opening = head, stream, encoder, opening

    def exchange(self, template: EventTemplate) -> TextExchange | None:
        """Return what passes on an upstream's chunks of text as the next events, the same one as long as that may go
        on; None if `send` must.
        """
        if self._stream is None or self._opening or isinstance(self._encoder, ResponseEncoder | None):
            return None
        around, known = self._encoder.around.get(template.index), self._exchange
        if around is None or known is None or known.template is not template or known.around is not around:
            self._exchange = None if around is None else TextExchange(template, around, self._stream.connection)
        return self._exchange

    def count(self, exchange: TextExchange) -> None:
        """Count the texts that were passed on, as `send` does."""
        assert isinstance(self._encoder, AnswerEncoder | MessageEncoder)
        assert self._stream is not None
        self._encoder.tokens += exchange.tokens
        self._stream.sends += exchange.tokens
        exchange.tokens = 0

    def flush(self, *, holds: bool = False) -> None:
        """Send the events that are ready. `holds`: whether further ones wait for the next call, for one write."""
        if self._stream is not None:
            self._stream.holds = holds
            self._stream.flush()

    def text_sink(self, index: int) -> TextSink | None:
        if self._stream is None or self._opening or isinstance(self._encoder, ResponseEncoder | None):
            return None
        return EventTexts(self._stream, self._encoder, index) if index in self._encoder.around else None

    @property
    def finished(self) -> bool:
        return self._encoder is not None and self._encoder.finished

    async def replay(self, head: Head, answer: CachedAnswer | Embeddings) -> None:
        self._head = head
        if isinstance(answer, Embeddings):
            self._pieces = [answer]
        elif self.echo is not None:
            encoder = self._new_encoder(answer.model)
            if self.request.stream:
                events = [encoder.start(), *map(encoder.chunk, answer.chunks)]
                await self._kept(encoder)
                self._cached_body = b"".join((*events, encoder.end()))
            else:
                self._cached_body = await self._kept(encoder, encoder.whole(answer.choices, answer.usage))
        elif self.request.stream:
            usage = self.request.include_usage
            self._cached_body = answer.stream(self._answer_id, self.created, include_usage=usage)
        else:
            self._cached_body = answer.whole(self._answer_id, self.created)

    async def end(self) -> None:
        assert self._head is not None
        if self._stream is not None:
            if self.keep is not None:
                await self._kept(self._encoder)
            self.end_stream()
            return
        media_type = EVENTS if self.request.stream else JSON
        if self._cached_body is not None:
            body = self._cached_body
        else:
            body = self._encode(self._head)
            if self.keep is not None:
                body = await self._kept(self._encoder, body)
        prebuilt = PrebuiltResponse(self.http, self._lines(self._head, media_type), body)
        prebuilt.end()
        self._prebuilt = prebuilt

    def end_stream(self) -> None:
        """Send the end of a stream that has begun. Raises ClientGone."""
        assert self._stream is not None
        end = b"" if self._encoder is None else self._opening + self._encoder.end()
        self._stream.end(end if self._cached_body is None else self._cached_body)

    def _look(self) -> None:
        """Send a comment if nothing was sent since the last heartbeat, and schedule the next, until the end."""
        stream = self._stream
        if self._prebuilt is not None or self._failed:
            return
        if stream is not None and (stream.ended or stream.client_left):
            return
        if stream is None:
            transport = self.http.transport
            if transport is None or transport.is_closing():
                return
            stream = self._stream = EventStream(self.http, waiting_lines(self.id_headers, self.id) + self._id_line)
        passed_on = 0 if self._exchange is None else self._exchange.tokens
        if stream.sends + passed_on == self._sends:
            with contextlib.suppress(ClientGone):  # the next event raises it
                stream.send(COMMENT)
        stream.flush()
        self._sends = stream.sends + passed_on
        self.begin_heartbeat()

    # --- for the server ----------------------------------------------------------------------------------------------

    @property
    def response(self) -> WrittenResponse:
        """The response that was sent, for the server to finish."""
        response = self._stream or self._prebuilt
        assert response is not None
        return response

    async def fail(self, error: CausewayError, headers: Mapping[str, str]) -> WholeResponse | WrittenResponse:
        """Return a response with the error and `headers`; after the first byte, end the stream with the error."""
        self._failed = True
        if self._stream is None:
            return refusal(self.http, error, self.id, headers)
        if isinstance(self._encoder, ResponseEncoder):
            event = self._encoder.fail(error)
        elif isinstance(self.echo, ResponseEcho):
            event = failure(error, 0)
        else:
            is_message = isinstance(self.echo, MessageTerms)
            event = anthropic.error_event(error, self.id) if is_message else error_event(error)
        self._stream.end(event)
        return self._stream

    @property
    def _id_line(self) -> str:
        return request_id_line(self.id, self.echo)

    def _lines(self, head: Head, media_type: str) -> str:
        return self.lines(head, media_type) + self._id_line

    def _new_encoder(self, model: str) -> AnswerEncoder | ResponseEncoder | MessageEncoder:
        if self.echo is None:
            return AnswerEncoder(self.request, self._answer_id, model, self.created)
        if isinstance(self.echo, MessageTerms):
            return MessageEncoder(self.request, self.echo, f"msg_{self.id}", model)
        name = self.echo.id or f"resp_{self.id}"
        kind = CompactionEncoder if self.echo.compacts else ResponseEncoder
        temperature = None if self._head is None else self.temperature(self._head)
        encoder = kind(self.request, self.echo, name, model, self.created, self._elapsed_s, temperature)
        if isinstance(encoder, CompactionEncoder):
            encoder.bound = self.compacted
        return encoder

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._begun_at

    @property
    def _answer_id(self) -> str:
        return _PREFIX[self.request.kind] + self.id

    def _encode(self, head: Head) -> bytes:
        first = self._pieces[0]
        if isinstance(first, Embeddings):
            return encode_embeddings(self.request, first, head.model)
        chunks = [piece for piece in self._pieces if not isinstance(piece, Embeddings)]
        if self.echo is None:
            return encode_whole(self.request, self._answer_id, head.model, self.created, chunks)
        encoder = self._encoder = self._new_encoder(head.model)
        return encoder.whole(*coalesce(chunks))

    async def _kept(self, encoder: AnswerEncoder | ResponseEncoder | MessageEncoder | None, body: bytes = b"") -> bytes:
        """Store a finished response, and return it; one that is not stored says so. `body`: the response, if known."""
        if self.keep is None or not isinstance(encoder, ResponseEncoder) or not encoder.finished:
            return body
        if await self.keep(body or encoder.complete()):
            return body
        encoder.forget()
        return encoder.complete()


@dataclass(eq=False, slots=True)
class WholeResponse:
    """A response that is complete, such as an error. `keep_alive`: whether the connection may be kept."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    keep_alive: bool = True

    def force_close(self) -> None:
        """Close the connection after this response."""
        self.keep_alive = False


class WrittenResponse:
    """A response that is written here, and not by aiohttp. `lines`: of `header_lines`."""

    status_line = "200 OK"
    closes = False  # whether the connection must be closed after it

    def __init__(self, http: HttpExchange, lines: str) -> None:
        self.ended = False
        self._http = http
        self.connection = http.protocol
        self._lines = lines

    @property
    def keep_alive(self) -> bool:
        return self._http.keep_alive and not self.closes

    @property
    def client_left(self) -> bool:
        transport = self.connection.transport
        return transport is None or transport.is_closing()

    @property
    def client_behind(self) -> bool:
        """Whether the client reads more slowly than the server writes, so that `drain` waits."""
        return self.connection.writing_paused

    def end(self) -> None:
        """Write the rest. Raises ClientGone."""
        raise NotImplementedError

    async def drain(self) -> None:
        """Wait for a slow client. Raises ClientGone when it reads nothing, or has disconnected."""
        if not self.client_behind:
            return
        try:
            async with asyncio.timeout(STALLED_S):
                await self._http.writer.drain()
        except TimeoutError:
            if self._http.transport is not None:
                self._http.transport.abort()
            raise ClientGone(f"The client read nothing for {STALLED_S:g} s.") from None
        except ConnectionError as error:
            raise ClientGone(str(error)) from error

    async def prepare(self, request: object) -> None:
        """Do nothing for aiohttp, because the head is sent with the first bytes."""

    async def write_eof(self) -> None:
        """Finish the response once a slow client has read it; the next request waits, too. Raises ConnectionError."""
        try:
            if not self.ended:
                self.end()
            await self.drain()
        except ClientGone as gone:
            raise ConnectionResetError(gone.message) from gone

    def _write(self, data: bytes) -> None:
        """Write bytes to the transport. Raises ClientGone."""
        transport = self.connection.transport
        if transport is None or transport.is_closing():
            raise ClientGone(_CLOSED)
        transport.write(data)

    def _head(self, body: str) -> bytes:
        """Return the head, which then counts as written. `body`: the header line that delimits the body."""
        http = self._http
        connection = ""
        if not self.keep_alive:
            connection = "Connection: close\r\n"
        elif http.version[1] == 0:
            connection = "Connection: keep-alive\r\n"
        date = _date(int(time.time()))
        status = f"HTTP/1.{http.version[1]} {self.status_line}\r\n"
        head = f"{status}{self._lines}{body}Date: {date}\r\nServer: {SERVER}\r\n"
        cors = header_lines(cors_headers(http)) if _ORIGIN in http.headers else ""
        written = f"{head}{cors}{connection}\r\n".encode()
        http.writer.output_size += len(written)
        return written


class PrebuiltResponse(WrittenResponse):
    """A response whose head and body are one write."""

    def __init__(self, http: HttpExchange, lines: str, body: bytes) -> None:
        super().__init__(http, lines)
        self._bytes = body

    def end(self) -> None:
        """Write the whole response now, before the request is recorded. Raises ClientGone."""
        self.ended = True
        self._write(self._head(f"Content-Length: {len(self._bytes)}\r\n") + self._bytes)


class EventStream(WrittenResponse):
    """A stream of server-sent events. The head is sent with the first event. An event is written at once; further
    events within `_TOGETHER_S` are written together in the loop's next turn. For HTTP/1.0, which has no chunks, the
    body ends with the connection.
    """

    def __init__(self, http: HttpExchange, lines: str) -> None:
        super().__init__(http, lines)
        self._loop = asyncio.get_running_loop()
        self._chunked = http.version[1] > 0
        self._ready: list[bytes] = []
        self._ready_bytes = 0
        self._written_at = -math.inf
        self._begun = False
        self.sends = 0
        self.holds = False  # whether events wait for `flush`

    @property
    def keep_alive(self) -> bool:
        return self._chunked and self._http.keep_alive

    def send(self, events: bytes, *, last: bool = False) -> None:
        """Send events. Call `drain` while the client is behind. `sends` counts the calls. Raises ClientGone. `last`:
        the end probably follows in this turn of the loop, so the events wait for it.
        """
        self.sends += 1
        if self._ready_bytes:
            self._ready.append(events)
            self._ready_bytes += len(events)
            if self._ready_bytes > _READY_BYTES:
                self._write(self._framed(self._take()))
        elif not last and not self.holds and (now := self._loop.time()) - self._written_at > _TOGETHER_S:
            self._written_at = now
            framed = self._begun and self._chunked
            self._write(b"%x\r\n%b\r\n" % (len(events), events) if framed else self._framed(events))
        elif self.client_left:
            raise ClientGone(_CLOSED)
        else:
            self._ready.append(events)
            self._ready_bytes = len(events)
            if not self.holds:
                self._loop.call_soon(self.flush)

    def send_now(self, events: bytes) -> None:
        """Write events at once, instead of `send`. Raises ClientGone."""
        self._write(self._framed(events))

    def send_head(self) -> None:
        """Send only the head, as the answer to HEAD. Raises ClientGone."""
        self.ended = True
        self._write(self._framed(b""))

    def end(self, events: bytes = b"") -> None:
        """Send the last events, and the end of the body. Raises ClientGone."""
        self.ended = True
        self._write(self._framed(self._take() + events) + (b"0\r\n\r\n" if self._chunked else b""))

    def flush(self) -> None:
        """Send the events that are ready."""
        if events := self._take():
            with contextlib.suppress(ClientGone):  # the next `send` or `end` raises it
                self._write(self._framed(events))

    def _take(self) -> bytes:
        events = b"".join(self._ready)
        self._ready.clear()
        self._ready_bytes = 0
        return events

    def _framed(self, events: bytes) -> bytes:
        """Return the events as a chunk, with the head if it was not sent yet."""
        if self._chunked and events:
            events = b"%x\r\n%b\r\n" % (len(events), events)
        if self._begun:
            return events
        self._begun = True
        return self._head("Transfer-Encoding: chunked\r\n" if self._chunked else "") + events


class EventTexts:
    """Puts the events of a choice around texts that are encoded already (`TextSink`)."""

    def __init__(self, stream: EventStream, encoder: AnswerEncoder | MessageEncoder, index: int) -> None:
        self._stream = stream
        self._encoder = encoder
        self._before, self._after = encoder.around[index]
        self._between = self._after + self._before

    def send(self, texts: Sequence[bytes]) -> Awaitable[None] | None:
        self._encoder.tokens += len(texts)
        self._stream.send(self._before + self._between.join(texts) + self._after)
        return self._stream.drain() if self._stream.client_behind else None


class TextExchange:
    """Passes chunks of an upstream that are one event of text alone on to a stream, each in one step: it compares the
    bytes around the text with the upstream's `template`, exchanges them for those of the stream (`around`), and checks
    that the text is a JSON string. The caller resets `tokens`, the number of texts that went on, and sets `left_bytes`,
    the bytes that may still be taken.
    """

    __slots__ = ("_after", "_connection", "_end", "_heads", "around", "left_bytes", "template", "tokens")

    def __init__(
        self, template: EventTemplate, around: tuple[bytes, bytes], connection: web.RequestHandler | PlainTransport
    ) -> None:
        self.tokens = self.left_bytes = 0
        self.template, self.around, self._connection = template, around, connection
        self._after = b'"' + template.after + b"\r\n"
        self._end = around[1] + b"\r\n"
        self._heads: dict[int, tuple[bytes, slice, bytes]] = {}  # by size of the chunk, as `_learn` returns

    def events(self, texts: Sequence[bytes]) -> bytes:
        """Return the stream's events of texts, which are JSON strings, and count them."""
        before, after = self.around
        self.tokens += len(texts)
        return before + (after + before).join(texts) + after

    def take(self, data: bytes) -> bool:
        """Pass on one chunk (`ChunkTaker`)."""
        size, connection = len(data), self._connection
        head, place, own_head = self._heads.get(size) or self._learn(size)
        if not (data.startswith(head) and data.endswith(self._after)) or size > self.left_bytes:
            return False
        text = data[place]
        try:
            _decode_text(text)  # refuses line breaks, too
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False
        transport = connection.transport
        if connection.writing_paused or transport is None or transport.is_closing():
            return False
        transport.write(own_head + text + self._end)
        self.tokens += 1
        self.left_bytes -= size
        return True

    def _learn(self, size: int) -> tuple[bytes, slice, bytes]:
        """Return what precedes a text that is not empty, in a chunk of `size` bytes with its frame: the text's place,
        and what precedes it in the stream's chunk.
        """
        found = _NO_HEAD
        for digits in range(1, 6):
            length = size - digits - 4
            text = length - len(self.template.before) - len(self.template.after)
            if text > 2 and len(b"%x" % length) == digits:  # with its quotes
                before, after = self.around
                head = b"%x\r\n%b" % (length, self.template.before)
                own_head = b"%x\r\n%b" % (len(before) + text + len(after), before)
                found = head + b'"', slice(len(head), len(head) + text), own_head
        if len(self._heads) < _MAX_HEADS:
            self._heads[size] = found
        return found


def send_plain(http: PlainRequest, lines: str, body: bytes) -> None:
    """Write a whole answer to a plain request at once. Raises ClientGone. `lines`: as returned by `header_lines`."""
    transport = http.protocol.transport
    if transport is None or transport.is_closing():
        raise ClientGone(_CLOSED)
    cors = header_lines(http.cors) if http.cors and _ORIGIN in http.headers else ""
    fixed = f"Date: {_date(int(time.time()))}\r\nServer: {SERVER}\r\n{cors}\r\n"
    head = f"HTTP/1.1 200 OK\r\n{lines}Content-Length: {len(body)}\r\n{fixed}".encode()
    http.output_size += len(head)
    transport.write(head + body)


async def answer_plain(http: PlainRequest, response: ServerResponse) -> bool:
    """Write the rest of a plain request's answer; return whether the connection is kept. Raises ConnectionError."""
    if isinstance(response, WholeResponse):
        cors = {} if _ORIGIN in http.headers else http.cors  # `_head` has them of a page
        written = PrebuiltResponse(http, header_lines({**response.headers, **cors}), response.body)
        written.status_line = f"{response.status} {_REASONS.get(response.status, '')}"
        written.closes = not response.keep_alive
        response = written
    assert isinstance(response, WrittenResponse)
    if not response.ended or response.client_behind:
        await response.write_eof()
    return response.keep_alive


def error_response(error: CausewayError, headers: Mapping[str, str] = {}) -> WholeResponse:
    """Return OpenAI's error object with the error's own status and headers."""
    return body_response(encode_error(error), error.status, {**error_headers(error), **headers})


def refusal(
    http: HttpExchange, error: CausewayError, request_id: str, headers: Mapping[str, str] = {}
) -> WholeResponse:
    """Return an error in the dialect of its request. `request_id` is part of it, and of Anthropic's headers."""
    if not anthropic.is_anthropic(http.path, http.headers):
        return error_response(error, headers)
    more = {**anthropic.error_head(error, request_id), **headers}
    return body_response(anthropic.encode_error(error, request_id), error.status, more)


def json_response(value: object, status: int = 200, headers: Mapping[str, str] = {}) -> WholeResponse:
    """Return a value as JSON."""
    return body_response(_encoder.encode(value), status, headers)


def body_response(body: bytes, status: int = 200, headers: Mapping[str, str] = {}) -> WholeResponse:
    """Return bytes that are JSON."""
    return WholeResponse(body, status, {"Content-Type": JSON, **headers})


def header_lines(fields: Mapping[str, str]) -> str:
    """Return the lines of a response's headers, each with CRLF. Raises ValueError for a line break in a value."""
    if any("\r" in value or "\n" in value for value in fields.values()):
        raise ValueError("A header's value contains a line break.")
    return "".join(f"{name}: {value}\r\n" for name, value in fields.items())


def device_header_lines(head: AnswerHead, media_type: str) -> str:
    """Return the header lines of a device's answer. All but the id is cached, since it repeats for most cache hits."""
    return shared_header_lines(msgspec.structs.replace(head, id=""), media_type) + id_lines(head.id)


def request_id_line(decision_id: str, echo: Echo | None) -> str:
    """Return the header line with the id of a Message, where Anthropic's clients look for it; "" for other answers."""
    return f"request-id: {decision_id}\r\n" if isinstance(echo, MessageTerms) else ""


def waiting_lines(id_headers: Sequence[str], decision_id: str) -> str:
    """Return the header lines of a stream that begins before its answer."""
    return header_lines(STREAMED | dict.fromkeys(id_headers, decision_id))


def id_lines(decision_id: str) -> str:
    """Return the header lines with the id of an answer."""
    return f"x-request-id: {decision_id}\r\nx-causeway-decision: {decision_id}\r\n"


@lru_cache(maxsize=256)
def shared_header_lines(head: AnswerHead, media_type: str) -> str:
    """Return the header lines of a device's answer but for those of its id. `head`: without the id."""
    headers = {
        "Content-Type": media_type,
        "x-causeway-route": head.route,
        "x-causeway-target": head.target,
        "x-causeway-reason": head.reason,
        "x-causeway-cache": head.cache,
        "x-causeway-policy": head.policy,
        "x-causeway-degraded": "true" if head.degraded else "false",
    }
    more = {
        "x-causeway-cache-reason": head.cache_reason,
        "x-causeway-loosened": head.loosened,
        "x-causeway-trimmed": head.trimmed,
        "x-causeway-modalities": head.modalities,
        "x-causeway-variant": head.variant,
        "x-causeway-session": head.session,
    }
    headers |= {name: value for name, value in more.items() if value}
    return header_lines(headers | STREAMED if media_type is EVENTS else headers)


def cors_headers(http: HttpExchange) -> Mapping[str, str]:
    """Return the headers that the answer to a request gets, so that a page of an allowed origin may read it."""
    cors: Mapping[str, str] = getattr(http, "cors", NO_HEADERS)  # aiohttp's own requests have none
    return cors


@lru_cache(maxsize=1)
def _date(second: int) -> str:
    """Return the Date header (RFC 9110) for a Unix second."""
    year, month, day, hour, minute, seconds, weekday, *_ = time.gmtime(second)
    return f"{_DAYS[weekday]}, {day:02} {_MONTHS[month - 1]} {year} {hour:02}:{minute:02}:{seconds:02} GMT"
