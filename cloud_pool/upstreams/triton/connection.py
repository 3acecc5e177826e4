"""Connection to one Triton, and its calls: gRPC over HTTP/2, a request and a stream of responses.

grpc.aio is not used: a call costs it 200 µs and a response 25 µs more than this, for threads, interceptors and
retries that a gateway does not use, and its import 15 MB.

1. A call opens the connection if there is none; calls that come meanwhile wait for it, at most CONNECT_S.
2. If the connection cannot be opened or does not use HTTP/2, these calls and the calls of the next moment fail with
   `connect_failed`.
3. If the connection is lost or violates the protocol, all its calls fail.
4. The server ends it (GOAWAY), or the pool finds it silent (`renew`): calls in progress stay on it, new ones do not.
5. A reader that falls READ_AHEAD responses behind holds the server back, through the stream's window.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

import anyio
from anyio.abc import TaskGroup

from causeway_server.router.serving.tls.connection import connect
from causeway_server.router.serving.tls.contexts import TlsContext

from . import http2
from .http2 import CallEnd, ProtocolError

CONNECT_S = 2.0
"""Limit of one connection attempt. Distant and busy servers need some tenths of a second."""
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.1, 1.0  # between attempts; a restarted Triton is back in seconds
_READ_AHEAD = 64  # responses that wait for the reader; beyond that the server is held back
_WINDOW = 256 * 1024  # bytes of a stream that may be under way
_ALL_WINDOWS = 2**31 - 1  # the connection's window holds back nothing, as one slow reader would hold back the others
_REFILL = 2**30
_MAX_RESPONSE_BYTES = 2**31 - 1
_LAST_STREAM = 2**31 - 1
_CLOSED = CallEnd("CANCELLED", "The connection is closed.")
_LOST = CallEnd("UNAVAILABLE", "The connection was lost.")
Take = Callable[[bytes], None]


class CallFailed(Exception):
    """The call ended with a status other than OK. `code`: its name."""

    def __init__(self, end: CallEnd) -> None:
        super().__init__(f"{end.code}: {end.details}")
        self.code = end.code
        self.details = end.details


class ConnectFailed(CallFailed):
    """No connection could be made, so nothing was sent."""


class CallCancelled(Exception):
    """The call was cancelled, by us or by the server; the waiting task was not."""


def _error_of(end: CallEnd) -> Exception | None:
    if end.code == "OK":
        return None
    return CallCancelled() if end.code == "CANCELLED" else CallFailed(end)


class GrpcStream:
    """A call: its request is sent, `next` reads the responses. `connect_failed`: nothing was sent."""

    def __init__(self, head: bytes, message: bytes) -> None:
        self.connect_failed = False
        self.head = head
        self.unsent = b"\x00" + len(message).to_bytes(4, "big") + message
        self.id = 0
        self.window = http2.FIRST_WINDOW
        self._connection: Http2Connection | None = None
        self._messages: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._ended: asyncio.Event | None = None
        self._take: Take | None = None  # gets the responses that have no consumer any more
        self._partial = b""
        self._unacknowledged = 0
        self._closed = False
        self._error: Exception | None = None
        self._is_left = False

    # --- for the reader ----------------------------------------------------------------------------------------------

    async def next(self) -> bytes | None:
        """Return the next response; None after the last one. Raises CallCancelled or CallFailed."""
        while not self._messages:
            if self._closed or self._is_left:
                if self._error is not None:
                    raise self._error
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        message = self._messages.popleft()
        self._refill()
        return message

    @property
    def is_over(self) -> bool:
        """Whether the call has ended."""
        return self._closed

    def discard(self, take: Take) -> None:
        """Pass all unread and future responses to `take`; the reader gets CallCancelled."""
        self._take = take
        while self._messages:
            take(self._messages.popleft())
        self._error, self._is_left = CallCancelled(), True
        self._wake()
        self._refill()

    def cancel(self) -> None:
        """Cancel the call unless it is over: the server stops its work, and responses still arriving are dropped."""
        self._messages.clear()
        if not self._closed:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.reset(self)
            self.end(CallCancelled())

    async def ended(self) -> None:
        """Wait until the call has ended. May be cancelled itself."""
        if not self._closed:
            self._ended = self._ended or asyncio.Event()
            await self._ended.wait()

    # --- for the connection ------------------------------------------------------------------------------------------

    def opened(self, connection: Http2Connection, number: int, window: int) -> None:
        self._connection, self.id, self.window = connection, number, window

    def data(self, payload: bytes) -> None:
        """Take a part of the responses. Raises ProtocolError."""
        self._unacknowledged += len(payload)
        data = self._partial + payload if self._partial else payload
        at, end = 0, len(data)
        while end - at >= 5:
            length = int.from_bytes(data[at + 1 : at + 5], "big")
            if data[at] or length > _MAX_RESPONSE_BYTES:
                raise ProtocolError("The server sent a response that is compressed or too long.")
            if end - at - 5 < length:
                break
            at += 5
            self._deliver(data[at : at + length])
            at += length
        self._partial = data[at:]
        self._refill()

    def end(self, error: Exception | None) -> None:
        """End the call; None: its status is OK."""
        if self._closed:
            return
        self._closed, self._connection = True, None
        self._error = self._error or error
        self._wake()
        if self._ended is not None:
            self._ended.set()

    def _deliver(self, message: bytes) -> None:
        if self._take is not None:
            self._take(message)
        else:
            self._messages.append(message)
            self._wake()

    def _refill(self) -> None:
        """Let the server send more, unless its reader is behind."""
        if self._unacknowledged >= _WINDOW // 2 and len(self._messages) < _READ_AHEAD and self._connection is not None:
            self._connection.write(http2.window_update(self.id, self._unacknowledged))
            self._unacknowledged = 0

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class Http2Connection(asyncio.Protocol):
    """An HTTP/2 connection. `ready` is done once the server has sent its settings, or False if it is lost before."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[bool] = self._loop.create_future()
        self.accepts = True  # new calls
        self._outgoing: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._streams: dict[int, GrpcStream] = {}
        self._waiting: deque[GrpcStream] = deque()  # until the server allows more streams at once
        self._received = b""
        self._block: tuple[int, int, bytes] | None = None  # stream, flags and beginning of unfinished headers
        self._next = 1
        self._max_streams = _LAST_STREAM
        self._frame_bytes = http2.MAX_FRAME_BYTES
        self._stream_window = self._window = http2.FIRST_WINDOW  # of what is sent
        self._unacknowledged = 0

    # --- for calls ---------------------------------------------------------------------------------------------------

    def start(self, stream: GrpcStream) -> None:
        """Send a request, unless it was cancelled in the meantime."""
        if stream.is_over:
            return
        if self._transport is None:
            stream.end(CallFailed(_LOST))
            return
        if len(self._streams) >= self._max_streams:
            self._waiting.append(stream)
            return
        number, self._next = self._next, self._next + 2
        self.accepts = self.accepts and self._next < _LAST_STREAM
        self._streams[number] = stream
        stream.opened(self, number, self._stream_window)
        head = http2.frame(http2.HEADERS, http2.END_HEADERS, number, stream.head)
        self.write(head + self._sendable(stream))

    def reset(self, stream: GrpcStream) -> None:
        """Cancel a call."""
        self.write(http2.frame(http2.RST_STREAM, 0, stream.id, http2.CANCEL.to_bytes(4, "big")))
        self._forget(stream.id)

    def write(self, data: bytes) -> None:
        """Write frames in the loop's next turn, with those of other calls: a system call costs as much as a call."""
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(data)

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        if self._transport is not None:
            self._transport.write(b"".join(outgoing))

    @property
    def is_closed(self) -> bool:
        return self._transport is None and self.ready.done()

    def retire(self) -> None:
        """Take no new calls, and close after the last one."""
        self.accepts = False
        self._close_if_unused()

    def close(self, end: CallEnd = _LOST) -> None:
        """Close the connection; its calls end."""
        self.accepts = False
        self._flush()
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()
        if not self.ready.done():
            self.ready.set_result(False)
        streams, self._streams = list(self._streams.values()), {}
        for stream in (*streams, *self._waiting):
            stream.end(_error_of(end))
        self._waiting.clear()

    # --- asyncio.Protocol --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        ours = {http2.HEADER_TABLE_SIZE: 0, http2.ENABLE_PUSH: 0, http2.INITIAL_WINDOW: _WINDOW}
        more = http2.window_update(0, _ALL_WINDOWS - http2.FIRST_WINDOW)
        self.write(http2.PREFACE + http2.settings(ours) + more)

    def data_received(self, data: bytes) -> None:
        received = self._received + data if self._received else data
        used = 0
        try:
            for kind, flags, number, payload in http2.split_frames(received):
                used += http2.FRAME_HEAD_BYTES + len(payload)
                if kind == http2.DATA:
                    self._on_data(flags, number, payload)
                else:
                    self._on_frame(kind, flags, number, payload)
        except ProtocolError as error:
            self.close(CallEnd("UNAVAILABLE", str(error)))
        except ValueError as error:
            self.close(CallEnd("UNAVAILABLE", f"The server sent data that cannot be read: {error}."))
        self._received = received[used:]

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.close()

    # --- frames ------------------------------------------------------------------------------------------------------

    def _on_data(self, flags: int, number: int, payload: bytes) -> None:
        self._unacknowledged += len(payload)
        if self._unacknowledged >= _REFILL:
            self.write(http2.window_update(0, self._unacknowledged))
            self._unacknowledged = 0
        stream = self._streams.get(number)
        if stream is not None:
            stream.data(http2.without_padding(flags, payload) if flags else payload)
            if flags & http2.END_STREAM:
                self._finish(number, CallEnd("INTERNAL", "The stream ended without a status."))

    def _on_frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if (self._block is not None) != (kind == http2.CONTINUATION):
            raise ProtocolError("The server sent headers in a wrong order.")
        match kind:
            case http2.HEADERS:
                block = http2.without_padding(flags, payload)
                self._on_headers(number, flags, block[5:] if flags & http2.PRIORITY else block)
            case http2.CONTINUATION if self._block is not None and self._block[0] == number:
                _, first, block = self._block
                if len(block) > http2.MAX_FRAME_BYTES:
                    raise ProtocolError("The server sent headers that are too long.")
                self._on_headers(number, first | flags, block + payload)
            case http2.RST_STREAM:
                self._finish(number, http2.reset_end(int.from_bytes(payload, "big")))
            case http2.SETTINGS if not flags & http2.ACK:
                self._on_settings(http2.read_settings(payload))
            case http2.PING if not flags & http2.ACK:
                self.write(http2.frame(http2.PING, http2.ACK, 0, payload))
            case http2.GOAWAY:
                self._on_goaway(int.from_bytes(payload[:4], "big"))
            case http2.WINDOW_UPDATE:
                self._on_window(number, int.from_bytes(payload, "big"))
            case http2.PUSH_PROMISE | http2.CONTINUATION:
                raise ProtocolError("The server sent a frame that the client had not asked for.")

    def _on_headers(self, number: int, flags: int, block: bytes) -> None:
        self._block = None if flags & http2.END_HEADERS else (number, flags, block)
        if self._block is not None:
            return
        headers = http2.read_headers(block)
        if flags & http2.END_STREAM or headers.get(":status", "200") != "200":
            self._finish(number, http2.call_end(headers))

    def _on_settings(self, values: dict[int, int]) -> None:
        self._max_streams = values.get(http2.MAX_STREAMS, self._max_streams)
        window = values.get(http2.INITIAL_WINDOW, self._stream_window)
        for stream in self._streams.values():
            stream.window += window - self._stream_window
        self._stream_window = window
        self.write(http2.frame(http2.SETTINGS, http2.ACK, 0))
        if not self.ready.done():
            self.ready.set_result(True)
        self._send_more()

    def _on_goaway(self, last: int) -> None:
        self.accepts = False
        for number in [number for number in self._streams if number > last]:
            self._finish(number, CallEnd("UNAVAILABLE", "The server is shutting down."))
        while self._waiting:
            self._waiting.popleft().end(CallFailed(_LOST))
        self._close_if_unused()

    def _on_window(self, number: int, size: int) -> None:
        if not number:
            self._window += size
        elif (stream := self._streams.get(number)) is not None:
            stream.window += size
        self._send_more()

    def _send_more(self) -> None:
        for stream in [stream for stream in self._streams.values() if stream.unsent]:
            self.write(self._sendable(stream))
        while self._waiting and self.accepts and len(self._streams) < self._max_streams:
            self.start(self._waiting.popleft())

    def _sendable(self, stream: GrpcStream) -> bytes:
        """Return the DATA frames that the windows allow now."""
        frames = []
        while stream.unsent and (size := min(self._frame_bytes, self._window, stream.window, len(stream.unsent))) > 0:
            part, stream.unsent = stream.unsent[:size], stream.unsent[size:]
            self._window -= size
            stream.window -= size
            frames.append(http2.frame(http2.DATA, 0 if stream.unsent else http2.END_STREAM, stream.id, part))
        return b"".join(frames)

    def _finish(self, number: int, end: CallEnd) -> None:
        """End a call as the server says."""
        stream = self._streams.get(number)
        if stream is None:
            return
        if stream.unsent:  # the server has not read all of the request, and will not
            self.reset(stream)
        else:
            self._forget(number)
        stream.end(_error_of(end))

    def _forget(self, number: int) -> None:
        self._streams.pop(number, None)
        self._send_more() if self._waiting else self._close_if_unused()

    def _close_if_unused(self) -> None:
        if not self.accepts and not self._streams and not self._waiting:
            self.close()


class TritonConnection:
    """The way to one server: a connection at a time, opened when it is needed, by `tasks`.

    A firewall or NAT that forgets a connection, or a host that vanishes, leaves it open at our end. TCP notices after
    minutes; pings would notice sooner, but Triton treats frequent ones as an attack (GOAWAY, too_many_pings). So the
    pool, which knows when an endpoint is silent, has the connection renewed. `server_name`: in the certificate; "": the
    host of `address`.
    """

    def __init__(self, address: str, tasks: TaskGroup, tls: TlsContext | None = None, server_name: str = "") -> None:
        self._address = address
        self._tls = tls
        self._server_name = server_name or address.rpartition(":")[0].strip("[]")
        self._tasks = tasks
        self._connection: Http2Connection | None = None
        self._used: set[Http2Connection] = set()
        self._opening: list[GrpcStream] | None = None  # calls that wait for the connection
        self._pause_s = 0.0
        self._retry_at = 0.0
        self._is_closed = False

    def call(
        self, path: str, message: bytes, *, timeout_s: float, metadata: Sequence[tuple[str, str]] = ()
    ) -> GrpcStream:
        """Start a call of the method `path` with one request; the server cancels it after `timeout_s`.

        `metadata`: names in lower case, and ASCII values.
        """
        more = b"".join([http2.header(name, value) for name, value in metadata])
        start = http2.request_head(path, self._address, tls=self._tls is not None)
        stream = GrpcStream(start + http2.timeout_header(timeout_s) + more, message)
        connection = self._connection
        if connection is not None and connection.accepts:
            connection.start(stream)
        elif self._is_closed:
            stream.end(CallCancelled())
        elif self._opening is not None:
            self._opening.append(stream)
        elif asyncio.get_running_loop().time() < self._retry_at:
            _fail_connect([stream])
        else:
            self._opening = [stream]
            self._tasks.start_soon(self._open)
        return stream

    async def unary(
        self, path: str, message: bytes, *, timeout_s: float, metadata: Sequence[tuple[str, str]] = ()
    ) -> bytes:
        """Return the one response of a call. Raises CallFailed or CallCancelled."""
        stream = self.call(path, message, timeout_s=timeout_s, metadata=metadata)
        response = None
        try:
            with anyio.fail_after(timeout_s):
                response = await stream.next()
                if response is not None and await stream.next() is None:
                    return response
        except TimeoutError:
            raise CallFailed(CallEnd("DEADLINE_EXCEEDED", f"No response came in {timeout_s:g} s.")) from None
        finally:
            stream.cancel()
        raise CallFailed(CallEnd("INTERNAL", "The call has not exactly one response."))

    def renew(self) -> None:
        """Use a new connection for new calls; calls in progress stay on theirs."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.retire()

    def close(self) -> None:
        """Close all connections; their calls end."""
        self._is_closed = True
        for connection in tuple(self._used):
            connection.close(_CLOSED)
        for stream in self._opening or ():
            stream.end(CallCancelled())

    async def _open(self) -> None:
        """Open the connection for the calls that wait for it (1), (2)."""
        connection: Http2Connection | None = None
        try:
            with anyio.move_on_after(CONNECT_S):
                connection = await self._connected()
        finally:
            waiting, self._opening = self._opening or [], None
            if connection is None:
                self._pause_s = min(_MAX_PAUSE_S, 2.0 * self._pause_s) or _MIN_PAUSE_S
                self._retry_at = asyncio.get_running_loop().time() + self._pause_s
                _fail_connect(waiting)
        if connection is not None:
            self._pause_s = 0.0
            self._connection = connection
            for stream in waiting:
                connection.start(stream)

    async def _connected(self) -> Http2Connection | None:
        host, _, port = self._address.rpartition(":")
        try:
            connection = await connect(
                self._new_connection, host.strip("[]"), int(port), tls=self._tls, server_name=self._server_name
            )
        except (OSError, ValueError):
            return None
        try:
            if await connection.ready and not self._is_closed:
                return connection
        except asyncio.CancelledError:
            connection.close(_CLOSED)
            raise
        connection.close(_CLOSED)
        return None

    def _new_connection(self) -> Http2Connection:
        connection = Http2Connection()
        self._used = {one for one in self._used if not one.is_closed} | {connection}
        return connection


def _fail_connect(streams: Sequence[GrpcStream]) -> None:
    for stream in streams:
        stream.connect_failed = True
        stream.end(ConnectFailed(CallEnd("UNAVAILABLE", "The connection could not be made.")))
