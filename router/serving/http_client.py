"""An HTTP/1.1 client of one server: a pool of connections, each with its current answer.

1. A request uses the connection that was idle last, or a new one; at the limit it waits for its turn.
2. It is sent again only where a pooled connection ended before anything of an answer came: the server closed it for
   idleness just as it was reused. A new connection that ends without an answer may have delivered the request.
3. A connection can be reused if its answer is complete, nothing follows it, and both sides keep it alive. Otherwise it
   is closed, which stops the server's work.
4. Heads, trailers and unread bytes are bounded: reading from the connection pauses while there are too many.
5. What a server sends before the first request is the answer to that: it refuses the connection.
6. After a change of the certificates a pooled connection is not used again.
7. Interim responses (1xx) are skipped, redirects not followed, and proxies of the environment not used.
8. Requests leave at the end of a turn of the event loop, all in a row: the server wakes once for them, and what it
   sends, tokens above all, arrives together. One that was given up by then is not sent.

A single timer per connection bounds its answers: it is moved when it fires, not for each request.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import zlib
from collections import deque
from collections.abc import Mapping
from typing import Any, Final, Protocol, cast
from urllib.parse import urlsplit

import aiohappyeyeballs
from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from .logs import redacted
from .request import LENGTH, KnownHead
from .tls.connection import connect
from .tls.contexts import TlsContext

log = logging.getLogger(__name__)

_MAX_HEAD_BYTES: Final = 64 * 1024  # maximum size of a head, or of the trailers
_MAX_FIELD_BYTES: Final = 8190
_MAX_FIELDS: Final = 128
_BUFFER_BYTES: Final = 256 * 1024  # unread bytes beyond which reading pauses
_INFLATED_BYTES: Final = 1024 * 1024  # maximum decompressed bytes per step
_TIMER_STEP_S: Final = 0.002  # timers may fire this much early
_SWITCHING: Final = 101
_GZIP: Final = b"\x1f\x8b"
_UNREADABLE_ENCODINGS: Final = frozenset({b"br", b"zstd"})


class HttpClientError(Exception):
    """The exchange with the server failed."""


class ConnectError(HttpClientError):
    """The connection could not be opened. `cause`: the system's error; None after a timeout."""

    def __init__(self, cause: OSError | None) -> None:
        super().__init__("connect timeout" if cause is None else str(cause))
        self.cause = cause


class DisconnectedError(HttpClientError):
    """The connection ended before the head of an answer was complete. `begun`: some of its bytes had arrived."""

    def __init__(self, *, begun: bool) -> None:
        super().__init__("The connection ended without an answer.")
        self.begun = begun


class MalformedError(HttpClientError):
    """The server's bytes are not an HTTP answer, or exceed its bounds."""


class TruncatedError(HttpClientError):
    """The connection ended before the body was complete."""


class BodyListener(Protocol):
    """A receiver of a body as it arrives, without waking the task that waits for it."""

    def arrived(self) -> bool:
        """Take the arrived bytes. Returns whether they were taken; if not, the task wakes."""
        ...


class ChunkTaker(Protocol):
    """Takes whole chunks of a body, without their being parsed."""

    def __call__(self, data: bytes, /) -> bool:
        """Take received bytes if they are one chunk of a known form; return False, and do nothing, if they are not."""
        ...


class ResponseOwner(Protocol):
    """The receiver of a response in callbacks, without a task that waits for it."""

    def changed(self) -> None:
        """Take note that the head, a part of the body, its end, or an error has come. Raises nothing."""
        ...


class KnownAnswer(KnownHead):
    """The head of a good answer that came in one read, with a length, over a connection that is kept. `facts`: the
    caller's reading of it, for the next answer with it.
    """

    __slots__ = ("facts", "headers")

    def __init__(self, before: bytes, after: bytes, headers: dict[bytes, bytes]) -> None:
        super().__init__(before, after)
        self.headers = headers
        self.facts: object = None


class HttpResponse:
    """A response: its head, and its body as it arrives. The caller must `release` it.

    Attributes:
        status: The status of the final response.
        complete: Whether the whole body has arrived; some of it may not have been taken yet.
        error: The error that ended the answer, raised after the arrived bytes are read.
        listener: The receiver that is called first while a task waits for the body.
        owner: The receiver of every change; None: tasks wait for them.
        lines: The header lines of its request, if `OpenAIServer.begin` sent it.
        sent: The whole request, if `HttpClient.begin` sent it.
        known: The same head, but for its length, of an answer before; None: there was none.
    """

    def __init__(self, connection: HttpConnection) -> None:
        self.status = 0
        self.complete = False
        self.error: Exception | None = None
        self.listener: BodyListener | None = None
        self.owner: ResponseOwner | None = None
        self.lines = ""
        self.sent = b""
        self.known: KnownAnswer | None = None
        self.headers: dict[bytes, bytes] = {}
        """The first value of each header, by lower-case name."""
        self._connection = connection
        self._pieces: list[bytes] = []
        self._size_bytes = 0
        self._inflater: _Inflater | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_resent(self) -> bool:
        """Whether the request is sent again if the connection ends before anything of an answer has come (2)."""
        return self._connection.served > 0

    @property
    def is_encoded(self) -> bool:
        """Whether the body is compressed."""
        return self._inflater is not None

    @property
    def is_crowded(self) -> bool:
        """Whether so many bytes are unread that no more arrive."""
        return self._size_bytes > _BUFFER_BYTES

    def header(self, name: bytes, default: str = "") -> str:
        """Return the first value of a header. `name`: the lower-case name."""
        value = self.headers.get(name)
        return default if value is None else value.decode("utf-8", "surrogateescape")

    def offer_chunks(self, take: ChunkTaker | None) -> None:
        """Let `take` have what arrives from now on, at the beginning of a chunk, before this response gets it."""
        if not self.complete:  # else the connection may have another request
            self._connection.offer_chunks(take)

    def ends_with(self, data: bytes) -> bool:
        """Return whether the last received bytes, `data`, end with a chunk, that is, an event and the end of the line
        after it; else they would end with the event.
        """
        last = self._pieces[-1] if self._pieces else b""
        return last.endswith(b"\n\n") and data.endswith(b"\r\n") and data[:-2].endswith(last)

    def bound(self, until: float) -> None:
        """Set the time (the loop's clock, s) at which the answer fails with TimeoutError unless it is complete."""
        if not self.complete and self.error is None:
            self._connection.bound(until)

    def extend(self, until: float) -> None:
        """Move the bound of an answer that is arriving to a later time."""
        self._connection.until = until

    def peek(self) -> bytes:
        """Return the bytes that `take` would return; b"" where the body is compressed."""
        if len(self._pieces) > 1:
            self._pieces = [b"".join(self._pieces)]
        return self._pieces[0] if self._pieces and self._inflater is None else b""

    def take(self) -> bytes:
        """Return the bytes that have arrived and were not taken yet; b"" if there are none. Raises MalformedError."""
        pieces = self._pieces
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        if self._size_bytes > _BUFFER_BYTES and not self.complete:
            self._connection.resume()
        self._size_bytes = 0
        if self._inflater is not None:
            data, rest = self._inflater.feed(data)
            if rest:
                self.add(rest)
        return data

    def whole(self) -> bytes | None:
        """Return the whole body if it has arrived; None if it has not, or if it is compressed."""
        return self.take() if self.complete and self._inflater is None else None

    async def read(self) -> bytes:
        """Wait for bytes; return b"" at the end. Raises TimeoutError; MalformedError or TruncatedError."""
        while True:
            while not self._pieces:
                if self.error is not None:
                    raise self.error
                if self.complete:
                    if self._inflater is not None and not self._inflater.ended:
                        raise MalformedError("The encoded body ends too early.")
                    return b""
                await self.wait()
            if data := self.take():  # empty while there are too few compressed bytes
                return data

    def release(self, within_s: float = 0.0) -> None:
        """Close the connection, unless the rest of the body arrives within this time."""
        if self.complete or self.error is not None:
            return
        if within_s > 0.0:
            self._connection.bound(asyncio.get_running_loop().time() + within_s)
        else:
            self._connection.close()

    def discard(self) -> None:
        """Close the connection, even after the whole body, unless it has another request already: servers close it
        after an answer that they could not finish, and would take the next request with it.
        """
        if not self.complete:
            self.release()
        elif self._connection.has_no_request:
            self._connection.close()

    # --- for the connection ------------------------------------------------------------------------------------------

    def wait(self) -> asyncio.Future[None]:
        """Return a future that is done at the next change."""
        waiter = self._waiter = self._connection.loop.create_future()
        return waiter

    def wake(self) -> None:
        if self.owner is not None:
            self.owner.changed()
            return
        if self._waiter is None or self._waiter.done():
            return
        if self.listener is None or self.complete or self.error is not None or not self.listener.arrived():
            self._waiter.set_result(None)

    def take_known(self, head: KnownAnswer, body: bytes) -> None:
        """Take a whole answer, whose head was read before."""
        self.headers, self.known = {**head.headers, b"content-length": b"%d" % len(body)}, head
        self.status, self.complete = 200, True
        self.add(body)

    def known_head(self, data: bytes) -> KnownAnswer | None:
        """Return the head of this answer, which is complete and came as `data`; None if it cannot come again."""
        begin = len(data) - self._size_bytes
        length = LENGTH.search(data, 0, begin)
        if length is None or not data.startswith(b"HTTP/1.1 200") or not data.endswith(b"\r\n\r\n", 0, begin):
            return None
        if self._inflater is not None or int(length[1]) != self._size_bytes:
            return None
        return KnownAnswer(data[: length.start(1)], data[length.end(1) : begin], self.headers)

    def begin(self, status: int) -> None:
        """Take the status of a complete head. Raises MalformedError for an unknown encoding."""
        encoding = self.headers.get(b"content-encoding", b"").strip().lower()
        if encoding in _UNREADABLE_ENCODINGS:
            raise MalformedError("The body has an encoding that was not requested.")
        if encoding in (b"gzip", b"deflate"):
            self._inflater = _Inflater(encoding)
        self.status = status

    def add(self, data: bytes) -> bool:
        """Take bytes of the body. Returns whether too many are unread."""
        self._pieces.append(data)
        self._size_bytes += len(data)
        return self._size_bytes > _BUFFER_BYTES

    @property
    def has_length(self) -> bool:
        """Whether the body ends at its length, or with its last chunk, and not with the connection."""
        coding = self.headers.get(b"transfer-encoding", b"").lower()
        return b"content-length" in self.headers or b"chunked" in coding

    def fail(self, error: Exception) -> None:
        """End the answer with an error, which is raised after the arrived bytes are read."""
        if not self.complete and self.error is None:
            self.error = error
            self.wake()


class _Inflater:
    """A reader of compressed bodies, which some servers send in spite of `Accept-Encoding: identity`."""

    def __init__(self, encoding: bytes) -> None:
        self._is_gzip = encoding == b"gzip"
        self._stream: zlib._Decompress | None = None

    @property
    def ended(self) -> bool:
        return self._stream is None or self._stream.eof

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        """Return decoded bytes, and the rest of `data` if the limit is reached. Raises MalformedError."""
        if not data:
            return b"", b""
        if self._stream is None or self._begins_member(data):
            raw = not self._is_gzip and data[0] & 0xF != zlib.DEFLATED  # some servers leave out zlib's header
            self._stream = zlib.decompressobj(31 if self._is_gzip else -zlib.MAX_WBITS if raw else zlib.MAX_WBITS)
        try:
            found = self._stream.decompress(data, _INFLATED_BYTES)
        except zlib.error:
            raise MalformedError("The body is not in its declared encoding.") from None
        rest = self._stream.unused_data
        return found, rest if self._begins_member(rest) else self._stream.unconsumed_tail

    def _begins_member(self, data: bytes) -> bool:
        """Return whether another member of a gzip file begins (RFC 1952, 2.2). Any other rest is ignored."""
        is_over = self._is_gzip and self._stream is not None and self._stream.eof
        return is_over and bool(data) and _GZIP.startswith(data[:2])


class Pool(Protocol):
    """The owner of connections. `head`: of its last usual answer."""

    head: KnownAnswer | None

    def write(self, transport: asyncio.Transport, data: bytes) -> None:
        """Send a request at the end of this turn of the event loop, unless its connection is closed by then."""
        ...

    def released(self, connection: HttpConnection) -> None:
        """Take a connection whose answer is complete."""
        ...

    def closed(self, connection: HttpConnection) -> None:
        """Forget a connection that is closed."""
        ...


class HttpConnection(asyncio.Protocol):
    """A connection and its current answer, if any. `served`: the number of its answers."""

    def __init__(self, pool: Pool) -> None:
        self.loop = asyncio.get_running_loop()
        self.served = 0
        self.idle_since = 0.0
        self.is_open = True
        self.tls: ssl.SSLContext | None = None  # of its handshake
        self.take_chunk: ChunkTaker | None = None  # has the chunks of the body first
        self.take_next: ChunkTaker | None = None  # the same, while a chunk begins
        self._is_between = False  # whether a chunk begins with the next byte
        self._pool = pool
        self._transport: asyncio.Transport
        self._parser = HttpResponseParser(self)
        # Lenient as in aiohttp: servers send such answers, and a client is not exposed to request smuggling.
        self._parser.set_dangerous_leniencies(
            lenient_headers=True, lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True
        )
        self._response: HttpResponse | None = None
        self._keeps_alive = False
        self._has_surplus = False  # bytes follow the answer, or came before its request
        self._early = b""  # bytes that came before the first request
        self._has_ended = False  # the server closed it before the first request
        self._is_fresh = False  # nothing of the answer has come
        self._is_paused = False
        self._fields = 0
        self._bare_bytes = 0  # bytes outside a body
        self._fault: MalformedError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self.until = 0.0

    def begin(self, data: bytes, until: float) -> HttpResponse:
        """Send a request. Returns its response, whose head is yet to arrive."""
        response = self._response = HttpResponse(self)
        self._fields = self._bare_bytes = 0
        self._is_fresh = True
        self.take_chunk = self.take_next = None
        self.bound(until)
        if not self._has_ended:
            self._pool.write(self._transport, data)
        if self._early:
            early, self._early, self._has_surplus = self._early, b"", True
            self.data_received(early)
        if self._has_ended:
            self._end()
        return response

    def bound(self, until: float) -> None:
        """Set the time at which the answer fails."""
        self.until = until
        if self._timer is not None and until < self._timer_at:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer, self._timer_at = self.loop.call_at(until, self._look), until

    def offer_chunks(self, take: ChunkTaker | None) -> None:
        """Let `take` have the chunks of the present answer, as of `HttpResponse`."""
        self.take_chunk, self.take_next = take, take if self._is_between else None

    def resume(self) -> None:
        """Resume reading."""
        if self.is_open and self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()

    def close(self) -> None:
        """Close the connection, at once if an answer is incomplete."""
        if not self.is_open:
            return
        self.is_open = False
        self.take_chunk = self.take_next = None
        if self._timer is not None:
            self._timer.cancel()
        if self._response is None:
            self._transport.close()
        else:
            response, self._response = self._response, None
            response.fail(
                TruncatedError("The answer was given up before its end.")
                if response.status
                else DisconnectedError(begun=True)
            )
            self._transport.abort()
        self._pool.closed(self)

    def _look(self) -> None:
        self._timer = None
        if self._response is None:
            return
        if self.loop.time() < self.until - _TIMER_STEP_S:
            self.bound(self.until)
        else:
            self._fail(TimeoutError())

    def _fail(self, error: Exception) -> None:
        if self._response is not None:
            self._response.fail(error)
        self.close()

    # --- asyncio.Protocol --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    @property
    def has_no_request(self) -> bool:
        return self._response is None

    def data_received(self, data: bytes) -> None:
        if self.take_next is not None and self.take_next(data):
            return
        response = self._response
        if response is None:  # there is no request
            if self.served:
                self.close()
                return
            self._early += data  # a refusal of the connection
            if len(self._early) > _MAX_HEAD_BYTES:
                self._transport.abort()
            return
        is_fresh, self._is_fresh = self._is_fresh, False
        if is_fresh and self._takes_known(response, data):
            self._finish(response)
            return
        self._bare_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self._has_surplus = True
            self._fault = self._fault or MalformedError(type(error).__name__)
        self._is_between = response.ends_with(data)
        self.take_next = self.take_chunk if self._is_between else None
        if response.complete:
            if is_fresh and self._keeps_alive and not self._has_surplus:
                self._pool.head = response.known_head(data)
            self._finish(response)
        elif self._fault is not None:
            self._fail(self._fault)
        elif self._bare_bytes > _MAX_HEAD_BYTES:
            self._fail(MalformedError("The head of the response is too large."))
        elif response.status:
            response.wake()

    def _takes_known(self, response: HttpResponse, data: bytes) -> bool:
        """Take `data` without the parser if it is a whole answer whose head was read before."""
        head = self._pool.head
        body = None if head is None else head.match(data)
        if head is None or body is None or body[1] != len(data):
            return False
        response.take_known(head, data[body[0] :])
        self._keeps_alive = True
        return True

    def eof_received(self) -> None:
        self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(is_whole=False)  # perhaps cut off by an attacker (RFC 9112, 9.8)

    def _end(self, *, is_whole: bool = True) -> None:
        """Handle the server's close, which completes only an answer without a declared length."""
        response = self._response
        if response is None and not self.served:
            self._has_ended = True  # its request is yet to come, and fails
        elif response is None or not response.status:
            self._fail(DisconnectedError(begun=self._bare_bytes > 0))
        elif response.has_length or not is_whole:
            self._fail(TruncatedError("The connection ended before the end of the body."))
        else:
            response.complete, self._keeps_alive = True, False
            self._finish(response)

    def _finish(self, response: HttpResponse) -> None:
        self._response = self.take_chunk = self.take_next = None
        self.served += 1
        if self._keeps_alive and not self._has_surplus and not self._transport.get_write_buffer_size():
            self.resume()
            self._pool.released(self)
        else:
            self.close()
        response.wake()

    # --- httptools ---------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._response is None or self._response.complete:
            self._has_surplus = True

    def on_header(self, name: bytes, value: bytes) -> None:
        response = self._response
        if response is None or response.complete or response.status:  # trailers
            return
        self._fields += 1
        if self._fields > _MAX_FIELDS or len(name) > _MAX_FIELD_BYTES or len(value) > _MAX_FIELD_BYTES:
            self._fault = MalformedError("The head of the response has too many or too large fields.")
        elif b"\0" in value:
            self._fault = MalformedError("A field in the head of the response contains a NUL.")
        else:
            response.headers.setdefault(name.lower(), value.rstrip())

    def on_headers_complete(self) -> None:
        response = self._response
        if response is None or response.complete or self._fault is not None:
            return
        status = self._parser.get_status_code()
        if 100 <= status < 200 and status != _SWITCHING:
            response.headers.clear()
            return
        try:
            response.begin(status)
        except MalformedError as error:
            self._fault = error

    def on_body(self, data: bytes) -> None:
        response = self._response
        if response is None or response.complete:
            return
        self._bare_bytes = 0
        if response.add(data) and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        response = self._response
        if response is not None and response.status and self._fault is None:  # else it was an interim response
            response.complete = True
            self._keeps_alive = self._parser.should_keep_alive()


_ADDRESSES_S: Final = 10.0  # time for which the addresses of a name are cached
_OTHER_ADDRESS_S: Final = 0.25  # delay until the next address of a name is also tried


class HttpClient:
    """A pool of at most `limit` connections to one server; `close` it. `url`: `http://HOST[:PORT]` or `https://…`, with
    an encoded host; path and query are ignored. DNS, connection and TLS together may take `connect_timeout_s`; an
    unused connection is closed after `idle_s`.
    """

    def __init__(
        self, url: str, *, tls: TlsContext | None, limit: int, connect_timeout_s: float, idle_s: float
    ) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        usual = 443 if parts.scheme == "https" else 80
        self._port = parts.port or usual
        name = f"[{self._host}]" if ":" in self._host else self._host
        self._host_field = name if self._port == usual else f"{name}:{self._port}"
        self._tls = tls if parts.scheme == "https" else None
        self._limit = limit
        self._connect_timeout_s = connect_timeout_s
        self._idle_s = idle_s
        self.head: KnownAnswer | None = None
        self._is_closed = False
        self._used = 0  # open connections and those that are being opened
        self._open: set[HttpConnection] = set()
        self._idle: list[HttpConnection] = []  # the most recently used one last
        self._waiters: deque[asyncio.Future[HttpConnection | None]] = deque()
        self._unsent: list[tuple[asyncio.Transport, bytes]] = []  # requests of this turn of the event loop
        self._sweep: asyncio.TimerHandle | None = None
        self._addresses: tuple[list[Any], float] = ([], 0.0)  # addresses and their expiry

    @property
    def is_ready(self) -> bool:
        """Whether a connection is idle."""
        return bool(self._idle) and self._is_usable(self._idle[-1])  # which was used last

    def begin(self, method: str, target: str, lines: str, until: float, body: bytes) -> HttpResponse | None:
        """Send a request on an idle connection. Returns its response, whose head is yet to arrive; None if there is no
        such connection. The arguments are those of `request`, which may wait for the response.
        """
        connection = self._idle_connection()
        if connection is None:
            return None
        data = self._message(method, target, lines, body)
        response = connection.begin(data, until)
        response.sent = data
        return response

    async def request(
        self,
        method: str,
        target: str,
        lines: str,
        until: float,
        body: bytes | None = None,
        begun: HttpResponse | None = None,
    ) -> HttpResponse:
        """Send a request. Returns the response when its head has arrived; the caller must release it.

        Args:
            target: Path and query, encoded.
            lines: The lines of the headers (`field_lines`), without Host and Content-Length.
            until: The time by which the answer must be complete, unless its `bound` is moved (the loop's clock, s).
            begun: The response of the same request, which was sent by `begin`.
        Raises:
            HttpClientError, TimeoutError: There is no answer, or none in time.
        """
        data = self._message(method, target, lines, body) if begun is None else begun.sent
        while True:
            if begun is None:
                connection = self._idle_connection() or await self._acquire(until)
                response = connection.begin(data, until)
            else:
                response, begun = begun, None
            try:
                while not response.status:  # until the head is here
                    if response.error is not None:
                        raise response.error
                    await response.wait()
                return response
            except BaseException as error:
                response.release()  # a connection whose answer has just arrived may have another request already
                if not isinstance(error, DisconnectedError) or not response.is_resent or error.begun:  # (2)
                    raise

    def _message(self, method: str, target: str, lines: str, body: bytes | None) -> bytes:
        length = "" if body is None else f"Content-Length: {len(body)}\r\n"
        start = f"{method} {target} HTTP/1.1\r\nHost: {self._host_field}\r\n"
        return f"{start}{lines}{length}\r\n".encode() + (body or b"")

    def close(self) -> None:
        """Close all connections. Waiting requests and all further ones fail."""
        self._is_closed = True
        for connection in [*self._open]:
            connection.close()
        if self._sweep is not None:
            self._sweep.cancel()

    # --- for the connections -----------------------------------------------------------------------------------------

    def write(self, transport: asyncio.Transport, data: bytes) -> None:
        """Send a request, together with those of the other connections (8)."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._write)
        self._unsent.append((transport, data))

    def _write(self) -> None:
        unsent, self._unsent = self._unsent, []
        for transport, data in unsent:
            try:
                if not transport.is_closing():
                    transport.write(data)
            except Exception as error:  # of one connection: the others' requests are sent
                log.error("A request could not be sent: %s.", redacted(error))
                transport.abort()

    def released(self, connection: HttpConnection) -> None:
        """Take back a connection whose answer is complete."""
        connection.idle_since = connection.loop.time()
        if self._waiters and not self._is_usable(connection):
            connection.close()  # the request that waits opens another
            return
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(connection)
                return
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep = connection.loop.call_later(self._idle_s, self._close_idle)

    def closed(self, connection: HttpConnection) -> None:
        """Remove a closed connection."""
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        self._free()

    # --- the pool ----------------------------------------------------------------------------------------------------

    def _idle_connection(self) -> HttpConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if self._is_usable(connection):
                return connection
            connection.close()
        return None

    def _is_usable(self, connection: HttpConnection) -> bool:
        """Return whether an idle connection may get a request (6)."""
        is_fresh = connection.loop.time() - connection.idle_since < self._idle_s
        return is_fresh and (self._tls is None or connection.tls is self._tls.newest())

    async def _acquire(self, until: float) -> HttpConnection:
        """Return a new connection, or an idle one if the limit is reached. Raises ConnectError, TimeoutError."""
        while self._used >= self._limit:
            waiter: asyncio.Future[HttpConnection | None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                async with asyncio.timeout_at(until):
                    connection = await waiter
            except BaseException:
                if waiter.done() and not waiter.cancelled():
                    self._give_back(waiter.result())
                raise
            if connection is None:
                return await self._connect(until)
            if connection.is_open:
                return connection
        self._used += 1
        return await self._connect(until)

    def _give_back(self, connection: HttpConnection | None) -> None:
        if connection is None:
            self._free()
        elif connection.is_open:
            self.released(connection)

    def _free(self) -> None:
        """Let the longest waiting request open a connection."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self._used -= 1

    def _close_idle(self) -> None:
        self._sweep = None
        if not self._idle:
            return
        loop = self._idle[0].loop
        for connection in [one for one in self._idle if loop.time() - one.idle_since >= self._idle_s - _TIMER_STEP_S]:
            connection.close()
        if self._idle:
            self._sweep = loop.call_at(self._idle[0].idle_since + self._idle_s, self._close_idle)

    async def _connect(self, until: float) -> HttpConnection:
        """Open a connection, which `_used` already counts."""
        loop = asyncio.get_running_loop()
        by = min(until, loop.time() + self._connect_timeout_s)
        try:
            async with asyncio.timeout_at(by):
                connection = await self._connection(loop)
        except BaseException as error:
            self._free()
            self._addresses = ([], 0.0)
            if isinstance(error, OSError) and not (isinstance(error, TimeoutError) and error.errno is None):
                raise ConnectError(error) from error
            if isinstance(error, TimeoutError) and by < until:
                raise ConnectError(None) from error
            raise
        self._open.add(connection)
        if self._is_closed:
            connection.close()
            raise ConnectError(None)
        return connection

    async def _connection(self, loop: asyncio.AbstractEventLoop) -> HttpConnection:
        if self._is_closed:
            raise ConnectError(None)
        addresses, good_until = self._addresses
        if loop.time() >= good_until:
            addresses = await loop.getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
            )
            self._addresses = (addresses, loop.time() + _ADDRESSES_S)
        raw = await aiohappyeyeballs.start_connection(addresses, happy_eyeballs_delay=_OTHER_ADDRESS_S)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tls = None if self._tls is None else self._tls.newest()
        name = self._host.rstrip(".")
        connection = await connect(lambda: HttpConnection(self), sock=raw, tls=tls, server_name=name)
        connection.tls = tls
        return connection


def field_lines(fields: Mapping[str, str]) -> str:
    """Return the lines of headers, each with its CRLF. Raises ValueError for the end of a line in a value."""
    lines = "".join([f"{name}: {value}\r\n" for name, value in fields.items()])
    if lines.count("\n") != len(fields) or lines.count("\r") != len(fields):
        raise ValueError("A header's value contains a line break.")
    return lines
