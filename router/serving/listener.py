"""The HTTP/1.1 server over TCP and Unix sockets, with limits on connections, headers and time.

A `Connection` answers plain requests itself, at a third of aiohttp's cost. At the first request that is not plain
(another path, a WebSocket, a head that `read_head` does not know, malformed bytes) it moves to aiohttp's low-level
server, with all bytes that were not answered, and stays there. So there is one HTTP server that refuses, and what is
answered here is what that one would have answered. aiohttp is imported for the first connection that moves, in a thread
beside the answers in progress; most daemons never need its 11 MB.

Misbehaving clients are treated as follows:

1. malformed HTTP, or headers beyond the limits: 400 with OpenAI's error object, and the connection is closed
2. a head that does not arrive within `read_timeout_s`, or a connection idle for so long: closed
3. one connection too many: to make room, a connection is closed, in this order: the longest silent one of the peers
   with the most connections, then one that waits between two requests, then one of another peer whose request was
   refused before its body had arrived; if every connection has a request in progress, the new one gets a 429 at once.
   Each address has its own limit, so that a flood over the network does not lock out programs on the machine
4. pipelined requests: answered in order; only a few are read ahead, and the next one is not begun before the client
   has read most of the answer to the last one
5. requests with a client certificate that has expired since its connection was opened: refused;
   requests under a foreign `Host` or of a foreign web page: refused, see `router.web_origins`
6. a client that disconnects: its handler and its work are cancelled
7. requests that outlast the drain: they are cancelled and end with an error, before their connections are closed
8. a request begins when its body is here; if that takes more than a moment, or the body is large, aiohttp receives it,
   with its limits of time and memory

Requests for streams that arrive together begin four in each turn of the event loop (`StreamTurns`): what the others'
servers have answered meanwhile is sent in between, so that the first tokens of half of them do not wait for the reading
of all. Streams that begin together get their tokens together, which wakes the process once for all of them. For whole
answers the time to the last byte counts, and it is shortest without these turns.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final, Protocol, cast

import anyio
import msgspec

from ..errors import AuthenticationFailed, CausewayError, Draining, QueueFull
from ..openai.answer import encode_error
from ..trackers import FairShare, network_of
from ..web_origins import WebOrigins
from .addresses import BACKLOG, ListeningSockets, bind_tcp, bind_unix_socket, url_of
from .logs import redacted
from .request import HttpExchange, PlainHead, PlainRequest, has_response_begun, read_head, read_request_id
from .responses import (
    STOPPED,
    ExchangeHandler,
    Handler,
    PrebuiltResponse,
    ServerResponse,
    WholeResponse,
    answer_plain,
    error_response,
    refusal,
)
from .tls.contexts import TlsContext
from .tls.peers import PeerCertificate, peer_certificate

if TYPE_CHECKING:  # imported for the first connection that moves to it
    from aiohttp import web

    from .aiohttp_connection import AiohttpConnection

log = logging.getLogger(__name__)

_FLUSH_S = 0.25  # on close: time for complete answers that are not yet sent
_CANCEL_S = 2.0  # on close: time for cancelled handlers to end
_LOG_INTERVAL_S = 60.0  # between two lines about refused connections
_MOMENT_S = 0.05
_MOMENT_BYTES = 64 * 1024  # maximum size of a request that arrives in pieces
_AIOHTTP = f"{__package__}.aiohttp_connection"
_LAST = "new_server"  # the last name of that module: without it another thread is importing it
_AHEAD_BYTES = 64 * 1024  # maximum size of requests that were sent ahead
_BEGUN_IN_TURN = 4  # streams; with more of them first tokens wait longer, with fewer a token costs more


class ConnectionStats(msgspec.Struct, frozen=True):
    """The connections of an address. `closed_idle`: closed to make room; `refused`: refused ones."""

    address: str  # tcp, unix
    open: int
    closed_idle: int
    refused: int


class ConnectionTable:
    """The connections of an address. Decides which one is closed to make room for a new one (3). `address`: tcp or
    unix, for metrics and messages; `monotonic`: the clock, seconds.
    """

    def __init__(self, address: str, max_connections: int, monotonic: Callable[[], float]) -> None:
        self._address = address
        self._monotonic = monotonic
        self._open = FairShare(max_connections)  # by peer
        # Both have the oldest connection first. Connections that have sent a request are closed last: they are not part
        # of a flood, and their clients expect to use them again.
        self._silent: dict[Connection, None] = {}
        self._between_requests: dict[Connection, None] = {}
        self._closed_idle = 0
        self._refused = 0
        self._reported = 0
        self._report_at = float("-inf")

    def stats(self) -> ConnectionStats:
        return ConnectionStats(self._address, self._open.held, self._closed_idle, self._refused)

    def admit(self, connection: Connection) -> bool:
        """Add a new connection. Returns False if there is no room."""
        if self._open.held >= self._open.capacity and not self._make_room(connection.peer):
            self._refuse()
            return False
        self._open.count(connection, connection.peer)
        self._silent[connection] = None
        return True

    def remove(self, connection: Connection) -> None:
        self._open.release(connection)
        self._silent.pop(connection, None)
        self._between_requests.pop(connection, None)

    def begin_request(self, connection: Connection) -> None:
        """Note that the head of a request has arrived on this connection."""
        self._silent.pop(connection, None)
        self._between_requests.pop(connection, None)

    def end_request(self, connection: Connection) -> None:
        if connection.is_open:  # it was neither lost nor closed to make room
            self._between_requests[connection] = None

    def _make_room(self, peer: str) -> bool:
        crowding = (one for one in self._idle() if self._open.crowds(one.peer))
        victim = next(crowding, None) or self._unfinished(peer)
        if victim is None:
            most = self._open.held_by(peer)
            victim = next((one for one in self._idle() if self._open.held_by(one.peer) >= most), None)
        if victim is None:
            return False
        self.remove(victim)
        victim.force_close()
        self._closed_idle += 1
        return True

    def _idle(self) -> Iterator[Connection]:
        """Yield the candidates for closing, the longest silent one first. Some are not idle: the task of a new one has
        not begun, or a response is still being written.
        """
        return (one for one in chain(self._silent, self._between_requests) if one.is_idle)

    def _unfinished(self, peer: str) -> Connection | None:
        """Return a connection, of another peer with many, whose request was answered but whose body still arrives."""
        ended = (one for one in self._between_requests if one.peer != peer and self._open.crowds(one.peer))
        return next(ended, None)

    def _refuse(self) -> None:
        """Count a refusal, and log at most one line per `_LOG_INTERVAL_S`."""
        self._refused += 1
        now = self._monotonic()
        if now < self._report_at:
            return
        log.warning(
            "Refused %d connections to %s, because all %d connections have a request in progress "
            "(server.max_connections).",
            self._refused - self._reported,
            self._address,
            self._open.capacity,
        )
        self._reported, self._report_at = self._refused, now + _LOG_INTERVAL_S


class Address(msgspec.Struct, frozen=True):
    """An address of a listener."""

    connections: ConnectionTable  # the connections of the address
    origins: WebOrigins  # the web pages that may send requests to it
    key: str  # the configuration key of the address, for errors
    host: str = ""  # the TCP host, with `port`; port 0: any free port
    port: int = 0
    socket: str = ""  # the path of a Unix socket, instead of host and port
    tls: TlsContext | None = None  # the TLS of the TCP address; None: none


class DirectWork(Protocol):
    """A request that is answered in callbacks, without a task. It ends with `Connection.answered` or `hand_over`."""

    def cancel(self) -> object:
        """Stop, because the client has left or the server ends."""
        ...


class StreamTurns:
    """The turns of requests for streams, the oldest first: `_BEGUN_IN_TURN` in each turn of the event loop."""

    def __init__(self) -> None:
        self._waiting: deque[Connection] = deque()
        self._begun = 0  # in this turn of the loop

    def take(self, connection: Connection) -> bool:
        """Return whether the connection's request may begin now; otherwise it begins in a later turn."""
        if self._begun == _BEGUN_IN_TURN:
            self._waiting.append(connection)
            return False
        self._count()
        return True

    def _count(self) -> None:
        if not self._begun:
            asyncio.get_running_loop().call_soon(self._turn)
        self._begun += 1

    def _turn(self) -> None:
        self._begun = 0
        while self._waiting and self._begun < _BEGUN_IN_TURN:
            connection = self._waiting.popleft()
            try:
                has_begun = connection.begin_turn()
            except Exception as error:
                log.error("A request could not be begun: %s.", redacted(error))
                connection.force_close()
                continue
            if has_begun:
                self._count()


def asks_for_stream(data: bytes) -> bool:
    """Return whether a request asks for a stream in one of the two usual spellings."""
    return b'"stream":true' in data or b'"stream": true' in data


class _NoWork:
    """Work that cannot be cancelled: it is done, or another one is cancelled."""

    def cancel(self) -> None:
        """Do nothing."""


ANSWERED: Final = _NoWork()


class DirectHandler(Protocol):
    """Begins the answer to a plain request in callbacks."""

    def __call__(self, http: PlainRequest, connection: Connection, /) -> DirectWork | None:
        """Return the work, or ANSWERED after a whole answer was written; None if a task must answer the request."""
        ...


class Connection(asyncio.Protocol):
    """A connection of a listener, from its beginning to its end, whichever server answers its requests.

    Attributes:
        address: The listener's address that accepted it.
        peer: The network of the client; "" over a Unix socket.
        reading_paused: Whether reading is paused because of requests that were sent ahead.
        task: The task that answers the request in progress.
        certificate: The client's certificate, where the address asks for one.
        direct: The request in progress, if it is answered in callbacks.
    """

    def __init__(self, listener: Listener, address: Address) -> None:
        self.address = address
        self.peer = ""
        self.transport: asyncio.Transport | None = None
        self.writing_paused = False
        self.task: asyncio.Task[None] | None = None
        self.certificate: PeerCertificate | None = None
        self.direct: DirectWork | None = None
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._remote: str | None = None
        self._received = b""  # bytes of requests that have not begun
        self.reading_paused = False
        self._head: PlainHead | None = None  # head of the last request
        self._ends = False  # whether the connection ends after the request in progress
        self._moved: AiohttpConnection | None = None
        self._writable: asyncio.Future[None] | None = None
        self._close_at = 0.0  # time at which it is closed if no request begins
        self._idle_timer: asyncio.TimerHandle | None = None
        self._rest_timer: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Whether it waits for the head of a request."""
        if self._moved is not None:
            return self._moved.is_idle
        return not self._is_busy and not self._received

    @property
    def _is_moving(self) -> bool:
        """Whether it waits for aiohttp, which gets all bytes."""
        return isinstance(self.direct, _NoWork) and self.direct is not ANSWERED

    @property
    def _is_busy(self) -> bool:
        return self.task is not None or self.direct is not None

    @property
    def is_open(self) -> bool:
        return (self if self._moved is None else self._moved).transport is not None

    def close(self) -> None:
        """Close the connection after the answer to the request in progress."""
        self._ends = True
        if self._moved is None and not self._is_busy:
            if self._received:
                self._move(self._received)
            else:
                self.force_close()

    def force_close(self) -> None:
        """Close the connection as soon as the written bytes are sent."""
        if self._moved is not None:
            self._moved.force_close()
        elif self.transport is not None:
            self.transport.close()
            self.transport = None

    def release(self) -> None:
        """Release the place of a lost connection."""
        self._cancel_timers()
        self._listener.release(self)

    # --- asyncio.Protocol --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)
        address = transport.get_extra_info("peername")
        if address:  # "" over the Unix socket
            self._remote = str(address[0])
            self.peer = network_of(self._remote)
            if (accepted := transport.get_extra_info("socket")) is not None:
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if self.address.tls is not None:
            self.certificate = peer_certificate(transport)
        if (refusal := self._listener.admit(self)) is not None:
            transport.write(refusal)
            transport.close()
            return
        self.transport = transport
        self._expect_request()

    def data_received(self, data: bytes) -> None:
        if self.task is None and self.direct is None:
            if not asks_for_stream(data) or self._listener.turns.take(self):
                self._begin(self._received + data if self._received else data)
                return
        elif self._ends and not self._is_moving:
            return
        self._received += data
        if len(self._received) > _AHEAD_BYTES and not self.reading_paused and self.transport is not None:
            self.reading_paused = True
            self.transport.pause_reading()

    def begin_turn(self) -> bool:
        """Begin the request that waits for its turn, if it still does. Return whether it did."""
        if self._is_busy or self.transport is None or not self._received:
            return False
        data, self._received = self._received, b""
        self._begin(data)
        return True

    def pause_writing(self) -> None:
        self.writing_paused = True

    def resume_writing(self) -> None:
        self.writing_paused = False
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._received = b""
        self.release()
        self._wake()
        work = self.task or self.direct
        if work is not None:
            self._listener.cancel(work)

    # --- requests ----------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Wait until the client has read most of the written bytes. Raises ConnectionError if it has disconnected."""
        if self.writing_paused and self.transport is not None:
            self._writable = self._writable or self._loop.create_future()
            await asyncio.shield(self._writable)
        if self.transport is None:
            raise ConnectionResetError("the connection is closed")

    def _wake(self) -> None:
        writable, self._writable = self._writable, None
        if writable is not None:
            writable.set_result(None)

    def _begin(self, data: bytes) -> None:
        """Start the request at the beginning of `data`, wait for the rest of its body, or move to aiohttp."""
        head = self._head
        body = None if head is None else head.match(data)
        if head is None or body is None:
            head = read_head(data, self._listener.plain)
            body = None if head is None else head.match(data)
            if head is None or body is None:
                self._move(data)
                return
            self._head = head
        begin, end = body
        if len(data) < end:
            self._await_rest(data, end)
            return
        if self._rest_timer is not None:
            self._rest_timer.cancel()
            self._rest_timer = None
        self._received = data[end:]
        http = PlainRequest(self, head, data[begin:end], self._remote)
        if self._listener.direct is not None and self.certificate is None and self._admits(http):
            self.direct = self._listener.direct(http, self)
            if self.direct is ANSWERED:
                self.address.connections.begin_request(self)
                if self._received:  # further ones are answered later, so that many do not fill the stack
                    self._loop.call_soon(self.answered, http)
                else:
                    self.answered(http)
                return
            if self.direct is not None:
                self._listener.begin_direct(self.direct, self)
                return
        self.task = self._loop.create_task(self._answer(http))

    def _admits(self, http: PlainRequest) -> bool:
        """Set the CORS headers of a request; return whether it may be answered (5). A task refuses it."""
        head = http.head
        if head.cors is None:
            try:
                head.cors = self.address.origins.admit(http.method, http.headers)
            except CausewayError:
                return False
        http.cors = head.cors
        return True

    def _await_rest(self, data: bytes, size: int) -> None:
        """Wait a moment for the rest of a request of `size` bytes (1)."""
        if size > _MOMENT_BYTES:
            self._move(data)
            return
        self._received = data
        if self._rest_timer is None:
            self._rest_timer = self._loop.call_later(_MOMENT_S, self._rest_is_late)

    def _rest_is_late(self) -> None:
        self._rest_timer = None
        self._move(self._received)

    def answered(self, http: PlainRequest) -> None:
        """Continue after an answer in callbacks, which was written."""
        work, self.direct = self.direct, None
        self._listener.end_request(work, self)
        if self.writing_paused:  # (4)
            response = PrebuiltResponse(http, "", b"")
            response.ended = True
            self.task = self._loop.create_task(self._answer(http, response))
        elif self.transport is not None:
            self._end(kept=True)

    def hand_over(self, http: PlainRequest) -> asyncio.Task[None]:
        """Let a task answer the request whose answer was begun in callbacks. Returns the task."""
        work, self.direct = self.direct, None
        self.task = self._loop.create_task(self._answer(http))
        self._listener.replace(work, self.task)
        return self.task

    async def _answer(self, http: PlainRequest, response: ServerResponse | None = None) -> None:
        kept = False
        try:
            if response is None:
                response = await self._listener.serve(http, self)
            kept = await answer_plain(http, response)
        except ConnectionError:
            pass  # the client has left
        except Exception as failure:
            log.error("A request failed in the HTTP server: %s.", redacted(failure))
            if not http.output_size:
                failed = error_response(CausewayError("The server failed."))
                failed.force_close()
                await answer_plain(http, failed)
        finally:
            self.task = None
            if self.transport is not None:
                self._end(kept=kept)

    def _end(self, *, kept: bool) -> None:
        """Continue with the next request after an answer."""
        if not kept or self._ends or self.transport is None:
            self.force_close()
            return
        self._expect_request()
        if self.reading_paused:
            self.reading_paused = False
            self.transport.resume_reading()
        if self._received:
            data, self._received = self._received, b""
            self._begin(data)

    # --- idle connections, and those that move -----------------------------------------------------------------------

    def _expect_request(self) -> None:
        self._close_at = self._loop.time() + self._listener.read_timeout_s
        if self._idle_timer is None:
            self._idle_timer = self._loop.call_at(self._close_at, self._check_idle)

    def _check_idle(self) -> None:
        """Close a connection that has been idle for too long. A busy one is checked again after its request."""
        self._idle_timer = None
        if self._loop.time() < self._close_at:
            self._idle_timer = self._loop.call_at(self._close_at, self._check_idle)
        elif self.is_idle:
            self.force_close()

    def _cancel_timers(self) -> None:
        for timer in (self._idle_timer, self._rest_timer):
            if timer is not None:
                timer.cancel()
        self._idle_timer = self._rest_timer = None

    def _move(self, data: bytes) -> None:
        """Let aiohttp read `data` and all later bytes, once it is imported."""
        if self.transport is not None:
            self._received, self._head = data, None
            if self._rest_timer is not None:
                self._rest_timer.cancel()
                self._rest_timer = None
            self._listener.move(self)

    def take_over(self, moved: AiohttpConnection) -> bool:
        """Let aiohttp read the received bytes and all later ones. Return whether a request may have arrived."""
        transport, self.transport = self.transport, None
        if transport is None:
            return False
        self._cancel_timers()
        data, self._received = self._received, b""
        self._moved = moved
        if self.reading_paused:
            transport.resume_reading()
        moved.take_over(transport, data, self._close_at)
        if self._ends:
            moved.close()
        return b"\r\n\r\n" in data


class Listener:
    """The HTTP server: listens on its addresses and counts the requests in progress.

    Args:
        handle: Answers a request; may raise only CancelledError. It takes plain requests if there are `plain` ones.
        read_timeout_s: Maximum time for a head to arrive, and between two requests.
        plain: Method and path of plain requests that are answered without aiohttp; then an attribute, by request line.
        wall_clock: Unix time in seconds, for the dates of certificates.
        direct: Answers plain requests in callbacks where it can, once their head was admitted.
    Attributes:
        connections, turns: The open connections, and the turns of requests for streams.
    """

    def __init__(
        self,
        handle: Handler,
        addresses: Sequence[Address],
        read_timeout_s: float,
        plain: Collection[tuple[str, str]] = (),
        wall_clock: Callable[[], float] = time.time,
        direct: DirectHandler | None = None,
    ) -> None:
        self.direct = direct
        self.plain = {f"{method} {path} HTTP/1.1\r\n".encode(): (method, path) for method, path in plain}
        self.read_timeout_s = read_timeout_s
        self.connections: set[Connection] = set()
        self.turns = StreamTurns()
        self._refusal = _refusal()
        self._wall_clock = wall_clock
        self._handle = cast("ExchangeHandler", handle)
        self._addresses = addresses
        self._idle: asyncio.Event | None = None  # set when no request is left, while `drain` waits
        self._requests: set[DirectWork] = set()  # a task per request, or its work in callbacks
        self._http: web.Server | None = None  # None until a connection moves
        self._moving: list[Connection] = []  # while aiohttp is imported
        self._sockets: list[ListeningSockets] = []
        self._paths: list[Path] = []  # of Unix sockets that are bound
        self._closing = False
        self.port: int | None = None
        """The TCP port; None before `start`, or without TCP."""

    @property
    def url(self) -> str:
        """The URL of the TCP address."""
        tcp = next(address for address in self._addresses if address.host)
        return url_of(tcp.host, self.port or 0, tls=tcp.tls is not None)

    @property
    def in_flight(self) -> int:
        """The number of requests that are being answered."""
        return len(self._requests)

    async def start(self) -> None:
        """Listen on all addresses. Raises ConfigError if one cannot be bound."""
        loop = asyncio.get_running_loop()
        for address in self._addresses:
            new_connection = partial(Connection, self, address)
            if address.socket:
                path = Path(address.socket)
                bound = bind_unix_socket(path, address.key)
                self._sockets.append(await loop.create_unix_server(new_connection, sock=bound, backlog=BACKLOG))
                self._paths.append(path)
            else:
                listening = await bind_tcp(new_connection, address.host, address.port, address.key, address.tls)
                self._sockets.append(listening)
                self.port = listening.sockets[0].getsockname()[1]

    def stop_accepting(self) -> None:
        """Stop accepting connections; close idle ones now, busy ones after their answer."""
        for listening in self._sockets:
            listening.close()
        for connection in tuple(self.connections):
            connection.close()

    async def drain(self, timeout_s: float) -> bool:
        """Wait for the requests in progress. Returns False if some are left."""
        with anyio.move_on_after(timeout_s):
            if self._requests:
                self._idle = self._idle or asyncio.Event()
                self._idle.clear()
                await self._idle.wait()
        return not self._requests

    async def close(self) -> None:
        """Cancel the requests in progress and wait until they have sent their errors."""
        self._closing = True
        self.stop_accepting()
        for request in tuple(self._requests):
            self.cancel(request)  # (7)
        await self.drain(_CANCEL_S)
        answering = [connection.task for connection in self.connections if connection.task is not None]
        if answering:
            await asyncio.wait(answering, timeout=_FLUSH_S)
        if self._http is not None:
            await self._http.shutdown(timeout=_FLUSH_S)
        for connection in tuple(self.connections):
            connection.force_close()
        for path in self._paths:
            path.unlink(missing_ok=True)

    # --- for the connections -----------------------------------------------------------------------------------------

    def admit(self, connection: Connection) -> bytes | None:
        """Add a new connection; return what it is refused with if there is no room for it. (3)"""
        if not connection.address.connections.admit(connection):
            return self._refusal
        self.connections.add(connection)
        return None

    def release(self, connection: Connection) -> None:
        """Remove a connection that is lost."""
        connection.address.connections.remove(connection)
        self.connections.discard(connection)
        self._end_move(connection)

    def move(self, connection: Connection) -> None:
        """Let aiohttp read the further requests of a connection, at once or when it is imported."""
        if self._http is not None or hasattr(sys.modules.get(_AIOHTTP), _LAST):
            self._take_over(connection)
            return
        connection.direct = _NoWork()
        self._requests.add(connection.direct)
        self._moving.append(connection)
        if len(self._moving) == 1:
            importing = asyncio.get_running_loop().run_in_executor(None, import_module, _AIOHTTP)
            importing.add_done_callback(self._imported)

    def _imported(self, importing: asyncio.Future[ModuleType]) -> None:
        moving, self._moving = self._moving, []
        if (failure := importing.exception()) is not None:
            log.error("The HTTP server could not be imported: %s.", redacted(failure))
            for connection in moving:
                connection.force_close()
            return
        gc.freeze()  # as `tune_garbage_collector` does
        for connection in moving:
            self._take_over(connection)

    def _take_over(self, connection: Connection) -> None:
        from .aiohttp_connection import AiohttpConnection, new_server

        self._http = self._http or new_server(self._serve_aiohttp)  # (6)
        if not connection.take_over(AiohttpConnection(self._http, connection, self.read_timeout_s)):
            self._end_move(connection)

    def _end_move(self, connection: Connection) -> None:
        if isinstance(connection.direct, _NoWork):
            self._forget(connection.direct)
            connection.direct = None

    async def _serve_aiohttp(self, http: web.BaseRequest) -> web.StreamResponse:
        from .aiohttp_connection import aiohttp_response

        connection = http.protocol.plain  # type: ignore[attr-defined]  # it is an AiohttpConnection
        return aiohttp_response(await self.serve(http, connection))

    async def serve(self, http: HttpExchange, connection: Connection) -> ServerResponse:
        """Return the answer to one request of a connection, in the task of the request. Raises CancelledError only."""
        task = connection.task or asyncio.current_task()
        assert task is not None
        address = connection.address
        self._requests.add(task)
        self._end_move(connection)
        address.connections.begin_request(connection)
        try:
            if connection.certificate is not None and connection.certificate.ends < self._wall_clock():
                raise AuthenticationFailed("The client certificate has expired. Connect again with a new certificate.")
            if isinstance(http, PlainRequest):
                cors = http.head.cors
                if cors is None:
                    cors = http.head.cors = address.origins.admit(http.method, http.headers)  # (5)
                http.cors = cors
            elif cors := address.origins.admit(http.method, http.headers):  # (5)
                http.cors = cors  # type: ignore[attr-defined]  # it is an HttpRequest
                preflight = address.origins.preflight(http.method, http.headers)
                if preflight is not None:
                    return WholeResponse(status=204, headers={**preflight})
            return await self._handle(http)
        except CausewayError as error:  # raised by `admit`; the handler raises none
            request_id = read_request_id(http.headers)
            response = refusal(http, error, request_id, {"x-request-id": request_id})
            if connection.certificate is not None:  # it may have expired
                response.force_close()
            return response
        except asyncio.CancelledError:
            if not self._closing or has_response_begun(http):
                raise
            task.uncancel()
            request_id = read_request_id(http.headers)
            return refusal(http, Draining(STOPPED), request_id, {"x-request-id": request_id})  # (7)
        finally:
            self.end_request(task, connection)

    def begin_direct(self, work: DirectWork, connection: Connection) -> None:
        """Note that a request is being answered in callbacks."""
        self._requests.add(work)
        connection.address.connections.begin_request(connection)

    def replace(self, work: DirectWork | None, task: asyncio.Task[None]) -> None:
        """Note that a task answers the request of this work now."""
        self._requests.add(task)
        if work is not None:
            self._requests.discard(work)

    def cancel(self, work: DirectWork) -> None:
        """Stop the answer to a request. A task that was just begun takes over first what was done in callbacks."""
        if isinstance(work, asyncio.Task):
            asyncio.get_running_loop().call_soon(work.cancel)
        else:
            work.cancel()

    def end_request(self, work: DirectWork | None, connection: Connection) -> None:
        """Note that a request is answered."""
        connection.address.connections.end_request(connection)
        self._forget(work)

    def _forget(self, work: DirectWork | None) -> None:
        if work is not None:
            self._requests.discard(work)
        if self._idle is not None and not self._requests:
            self._idle.set()


def _refusal() -> bytes:
    error = QueueFull("Every connection to this server has a request in progress.")
    body = encode_error(error)
    head = (
        f"HTTP/1.1 {error.status} Too Many Requests\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
