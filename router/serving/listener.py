"""Listens over TCP and Unix sockets for HTTP/1.1, bounded in connections, headers and time.

Plain requests are read by `plain_connection`, all others by aiohttp's low-level server.

Misbehaving clients are treated as follows:

1. malformed HTTP, or headers beyond the limits: 400 with OpenAI's error object, and the connection is closed
2. a head that does not arrive within `read_timeout_s`, or a connection idle for so long: closed
3. one connection too many: to make room, a connection is closed, in this order: the longest silent one of the peers
   with the most connections, then one that waits between two requests, then one of another peer whose request was
   refused before its body had arrived; if every connection has a request in progress, the new one gets a 429 at once.
   Each address has its own limit, so that a flood over the network does not lock out programs on the machine
4. pipelined requests: answered in order; only a few are read ahead
5. requests under a foreign `Host` or of a foreign web page: refused, see `router.web_origins`
6. a client that disconnects: its handler and its work are cancelled
7. requests that outlast the drain: they are cancelled and end with an error, before their connections are closed
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import cast

import anyio
import msgspec
from aiohttp import web

from ..errors import CausewayError, Draining, QueueFull
from ..openai.answer import encode_error
from ..trackers import FairShare
from ..web_origins import WebOrigins
from .http.addresses import BACKLOG, bind_tcp, bind_unix_socket, url_of
from .http.aiohttp_connection import AiohttpConnection, has_response_begun, make_request
from .http.plain_connection import PlainConnection
from .http.plain_request import HttpExchange, PlainRequest
from .request import ExchangeHandler, Handler, read_request_id
from .responses import CORS, STOPPED, error_response

log = logging.getLogger(__name__)

_FLUSH_S = 0.25  # on close: time for complete answers that are not yet sent
_CANCEL_S = 2.0  # on close: time for cancelled handlers to end
_LOG_INTERVAL_S = 60.0  # between two lines about refused connections


class ConnectionStats(msgspec.Struct, frozen=True):
    """The connection counts of an address. `closed_idle`: connections closed to make room; `refused`: connections
    refused.
    """

    address: str  # tcp, unix
    open: int
    closed_idle: int
    refused: int


class ConnectionTable:
    """The connections of an address. Decides which one is closed to make room for a new one (3).

    Args:
        address: The kind, tcp or unix, for metrics and messages.
        max_connections: The limit.
        monotonic: The clock, seconds.
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
            "Refused %d %s connections: all %d have a request in progress (server.max_connections).",
            self._refused - self._reported,
            self._address,
            self._open.capacity,
        )
        self._reported, self._report_at = self._refused, now + _LOG_INTERVAL_S


class Address(msgspec.Struct, frozen=True):
    """An address of a listener.

    Attributes:
        connections: The connections of the address.
        origins: The web pages that may send requests to it.
        key: The configuration key of the address, for errors.
        host: The TCP host, with `port`; port 0: any free port.
        socket: The path of a Unix socket, instead of host and port.
    """

    connections: ConnectionTable
    origins: WebOrigins
    key: str
    host: str = ""
    port: int = 0
    socket: str = ""


Connection = PlainConnection[Address]


class Listener:
    """The HTTP server: listens on its addresses and counts the requests in progress.

    Args:
        handle: Answers a request; may raise only CancelledError. It takes plain requests if there are `plain` ones.
        read_timeout_s: Maximum time for a head to arrive, and between two requests.
        plain: Method and path of the requests that are answered without aiohttp if they are plain ones.

    Attributes:
        plain: Method and path by request line.
        connections: Those that are open.
    """

    def __init__(
        self,
        handle: Handler,
        addresses: Sequence[Address],
        read_timeout_s: float,
        plain: Collection[tuple[str, str]] = (),
    ) -> None:
        self.plain = {f"{method} {path} HTTP/1.1\r\n".encode(): (method, path) for method, path in plain}
        self.read_timeout_s = read_timeout_s
        self.connections: set[Connection] = set()
        self._refusal = _refusal()
        self._handle = cast("ExchangeHandler", handle)
        self._addresses = addresses
        self._idle: asyncio.Event | None = None  # set when no request is left, while `drain` waits
        self._requests: set[asyncio.Task[object]] = set()  # one task per request
        self._http: web.Server | None = None
        self._sockets: list[asyncio.AbstractServer] = []
        self._paths: list[Path] = []  # of Unix sockets that are bound
        self._closing = False
        self.port: int | None = None
        """The TCP port; None before `start`, or without TCP."""

    @property
    def url(self) -> str:
        """The URL of the TCP address."""
        host = next(address.host for address in self._addresses if address.host)
        return url_of(host, self.port or 0)

    @property
    def in_flight(self) -> int:
        """The number of requests that are being answered."""
        return len(self._requests)

    async def start(self) -> None:
        """Listen on all addresses. Raises ConfigError if one cannot be bound."""
        self._http = web.Server(self._serve_aiohttp, request_factory=make_request, handler_cancellation=True)  # (6)
        loop = asyncio.get_running_loop()
        for address in self._addresses:
            new_connection = partial(PlainConnection, self, address)
            if address.socket:
                path = Path(address.socket)
                bound = bind_unix_socket(path, address.key)
                self._sockets.append(await loop.create_unix_server(new_connection, sock=bound, backlog=BACKLOG))
                self._paths.append(path)
            else:
                listening = await bind_tcp(new_connection, address.host, address.port, address.key)
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
        for request in self._requests:
            request.cancel()  # (7)
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

    def aiohttp_connection(self, connection: Connection) -> AiohttpConnection:
        """Return what reads the further requests of a connection."""
        assert self._http is not None
        return AiohttpConnection(self._http, connection, self.read_timeout_s)

    async def _serve_aiohttp(self, http: web.BaseRequest) -> web.StreamResponse:
        connection = http.protocol.plain  # type: ignore[attr-defined]  # it is an AiohttpConnection
        return await self.serve(http, connection)

    async def serve(self, http: HttpExchange, connection: Connection) -> web.StreamResponse:
        """Return the answer to one request of a connection, in the task of the request. Raises CancelledError only."""
        task = asyncio.current_task()
        assert task is not None
        address = connection.address
        self._requests.add(task)
        address.connections.begin_request(connection)
        try:
            cors = address.origins.admit(http.method, http.headers)  # (5)
            if cors:
                if isinstance(http, PlainRequest):
                    http.cors = cors
                else:
                    http[CORS] = cors
                preflight = address.origins.preflight(http.method, http.headers)
                if preflight is not None:
                    return web.Response(status=204, headers=preflight)
            return await self._handle(http)
        except CausewayError as error:  # raised by `admit`; the handler raises none
            return error_response(error, {"x-request-id": read_request_id(http.headers)})
        except asyncio.CancelledError:
            if not self._closing or has_response_begun(http):
                raise
            task.uncancel()
            return error_response(Draining(STOPPED), {"x-request-id": read_request_id(http.headers)})  # (7)
        finally:
            address.connections.end_request(connection)
            self._requests.discard(task)
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
