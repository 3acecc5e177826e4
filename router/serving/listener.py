"""Sockets: TCP and Unix sockets, HTTP/1.1 by aiohttp's low-level server, bounded in connections, headers and time.

How misbehaving clients are treated:

1. malformed HTTP, or headers beyond the limits: 400 with OpenAI's error object, and the connection is closed
2. a head that does not arrive within `read_timeout_s`, or a connection idle for so long: closed
3. one connection too many: of the peers that have the most connections, the one that has been silent longest is closed
   to make room, before those that wait between two requests and, of another peer, those whose request was refused
   before its body had arrived; if every connection has a request in progress, the new one gets a 429 at once. Each
   address has connections of its own, so that a flood over the network does not lock out programs on the machine
4. pipelined requests: answered in order; only a few are read ahead
5. requests under a foreign `Host` or of a foreign web page: refused, see `router.web_origins`
6. a client that disconnects: its handler is cancelled, and with it the work
7. requests that outlast the drain: they are cancelled while their clients are still there, and end with an error
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

import anyio
import msgspec
from aiohttp import hdrs, web
from aiohttp.web_protocol import RequestHandler

from ..errors import CausewayError, ConfigError, Draining, InvalidRequest, QueueFull
from ..openai.answer import encode_error
from ..trackers import FairShare, network_of
from ..web_origins import WebOrigins
from .logs import redacted
from .request import Handler, plain_path, read_request_id
from .responses import CORS, SERVER, STOPPED, error_response

log = logging.getLogger(__name__)

_HEADERS = 64  # fields of a head, each of at most 8190 bytes
_BACKLOG = 4096
_LINGER_S = 2.0  # to read the rest of a refused request's body
_FLUSH_S = 0.25  # on close: for answers that are complete but not yet sent
_CANCEL_S = 2.0  # on close: for cancelled handlers to end
_LOG_INTERVAL_S = 60.0  # between two lines about refused connections


class ConnectionStats(msgspec.Struct, frozen=True):
    """The connections of one address. `closed_idle`: closed to make room; `refused`: there was no room."""

    address: str  # tcp, unix
    open: int
    closed_idle: int
    refused: int


class ConnectionTable:
    """The connections of one address; decides which one makes room for a new one (3).

    Args:
        address: tcp or unix, for metrics and messages.
        max_connections: the limit.
        monotonic: the clock, seconds.
    """

    def __init__(self, address: str, max_connections: int, monotonic: Callable[[], float]) -> None:
        self._address = address
        self._monotonic = monotonic
        self._open = FairShare(max_connections)  # by peer
        # Both have the oldest first. A connection that has sent a request is no flood, and its client expects to find
        # it open for the next one.
        self._silent: dict[_Connection, None] = {}
        self._between_requests: dict[_Connection, None] = {}
        self._closed_idle = 0
        self._refused = 0
        self._reported = 0
        self._report_at = float("-inf")

    def stats(self) -> ConnectionStats:
        return ConnectionStats(self._address, self._open.held, self._closed_idle, self._refused)

    def admit(self, connection: _Connection) -> bool:
        """Add a new connection. Returns False if there is no room for it."""
        if self._open.held >= self._open.capacity and not self._make_room(connection.peer):
            self._refuse()
            return False
        self._open.count(connection, connection.peer)
        self._silent[connection] = None
        return True

    def remove(self, connection: _Connection) -> None:
        self._open.release(connection)
        self._silent.pop(connection, None)
        self._between_requests.pop(connection, None)

    def begin_request(self, connection: _Connection) -> None:
        """A whole head has arrived."""
        self._silent.pop(connection, None)
        self._between_requests.pop(connection, None)

    def end_request(self, connection: _Connection) -> None:
        if connection.transport is not None:  # it is not lost, and has not made room
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

    def _idle(self) -> Iterator[_Connection]:
        """Yield the idle connections, the oldest silent one first. Some are not idle: the task of a new one has not
        begun, or the response is still being written."""
        return (one for one in chain(self._silent, self._between_requests) if is_between_requests(one))

    def _unfinished(self, peer: str) -> _Connection | None:
        """Return one whose request has its answer, but still sends its body, of another peer that has many."""
        ended = (one for one in self._between_requests if one.peer != peer and self._open.crowds(one.peer))
        return next(ended, None)

    def _refuse(self) -> None:
        """Count, and log at most one line per `_LOG_INTERVAL_S`."""
        self._refused += 1
        now = self._monotonic()
        if now < self._report_at:
            return
        log.warning(
            "%d %s connections refused: all %d have a request in progress (server.max_connections)",
            self._refused - self._reported,
            self._address,
            self._open.capacity,
        )
        self._reported, self._report_at = self._refused, now + _LOG_INTERVAL_S


class Address(msgspec.Struct, frozen=True):
    """An address of a listener.

    Attributes:
        connections: Holds the connections over it.
        origins: Which web pages may send requests there.
        key: The configuration key of the address, for errors.
        host: Where to listen on TCP, with `port`; 0: any free port.
        socket: The path of a Unix socket, in place of host and port.
    """

    connections: ConnectionTable
    origins: WebOrigins
    key: str
    host: str = ""
    port: int = 0
    socket: str = ""


class Listener:
    """Listens on its addresses and counts the requests in progress.

    Args:
        handle: Answers one request; may raise CancelledError only.
        read_timeout_s: The longest time in which a head arrives, and between two requests.
    """

    def __init__(self, handle: Handler, addresses: Sequence[Address], read_timeout_s: float) -> None:
        self._handle = handle
        self._addresses = addresses
        self._read_timeout_s = read_timeout_s
        self._idle: asyncio.Event | None = None  # set when none is left, while `drain` waits for that
        self._requests: set[asyncio.Task[object]] = set()  # each answers one request
        self._http: web.Server | None = None
        self._sockets: list[asyncio.AbstractServer] = []
        self._paths: list[Path] = []  # of Unix sockets that are bound
        self._closing = False
        self.port: int | None = None
        """The TCP port; None before `start`, or without TCP."""

    @property
    def url(self) -> str:
        """The URL of the address over TCP."""
        host = next(address.host for address in self._addresses if address.host)
        return url_of(host, self.port or 0)

    @property
    def in_flight(self) -> int:
        """Requests that are being answered."""
        return len(self._requests)

    async def start(self) -> None:
        """Raises ConfigError when an address cannot be bound."""
        self._http = web.Server(self._serve, request_factory=make_request, handler_cancellation=True)  # (6)
        loop = asyncio.get_running_loop()
        for address in self._addresses:
            new_connection = partial(_Connection, self._http, address, self._read_timeout_s)
            if address.socket:
                path = Path(address.socket)
                bound = bind_unix_socket(path, address.key)
                self._sockets.append(await loop.create_unix_server(new_connection, sock=bound, backlog=_BACKLOG))
                self._paths.append(path)
            else:
                listening = await bind_tcp(new_connection, address.host, address.port, address.key)
                self._sockets.append(listening)
                self.port = listening.sockets[0].getsockname()[1]

    def stop_accepting(self) -> None:
        """Accept no new connection; close idle ones now, busy ones after their answer."""
        for listening in self._sockets:
            listening.close()
        if self._http is not None:
            self._http.pre_shutdown()

    async def drain(self, timeout_s: float) -> bool:
        """Wait for the requests in progress. Returns False if some are left."""
        with anyio.move_on_after(timeout_s):
            if self._requests:
                self._idle = self._idle or asyncio.Event()
                self._idle.clear()
                await self._idle.wait()
        return not self._requests

    async def close(self) -> None:
        """Cancel the requests in progress and wait until they have told their clients."""
        self._closing = True
        self.stop_accepting()
        for request in self._requests:
            request.cancel()  # (7)
        await self.drain(_CANCEL_S)
        if self._http is not None:
            await self._http.shutdown(timeout=_FLUSH_S)
        for path in self._paths:
            path.unlink(missing_ok=True)

    async def _serve(self, http: web.BaseRequest) -> web.StreamResponse:
        task = asyncio.current_task()
        assert task is not None
        connection: _Connection = http.protocol  # type: ignore[assignment]
        self._requests.add(task)
        connection.table.begin_request(connection)
        try:
            cors = connection.origins.admit(http.method, http.headers)  # (5)
            if cors:
                http[CORS] = cors
                preflight = connection.origins.preflight(http.method, http.headers)
                if preflight is not None:
                    return web.Response(status=204, headers=preflight)
            return await self._handle(http)
        except CausewayError as error:  # of `admit`: the handler raises none
            return error_response(error, {"x-request-id": read_request_id(http.headers)})
        except asyncio.CancelledError:
            if not self._closing or has_response_begun(http):
                raise
            task.uncancel()
            return error_response(Draining(STOPPED), {"x-request-id": read_request_id(http.headers)})  # (7)
        finally:
            connection.table.end_request(connection)
            self._requests.discard(task)
            if self._idle is not None and not self._requests:
                self._idle.set()


class _Connection(RequestHandler):
    """One client's connection."""

    def __init__(self, server: web.Server, address: Address, read_timeout_s: float) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # off: `self.access_log` is Optional
            auto_decompress=False,
            keepalive_timeout=read_timeout_s,  # (2)
            lingering_time=_LINGER_S,
            max_headers=_HEADERS,
        )
        self.table = address.connections
        self.origins = address.origins
        self.peer = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        address = transport.get_extra_info("peername")
        self.peer = network_of(address[0]) if address else ""  # none over the Unix socket
        if not self.table.admit(self):  # (3)
            refused = cast("asyncio.Transport", transport)
            refused.write(_REFUSAL)
            refused.close()
            return
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.table.remove(self)
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """(1) Shape aiohttp's own errors like OpenAI's; of its message, which quotes the bytes, use the first line."""
        if has_response_begun(request):
            raise ConnectionError("the response has begun: all that is left is to close the connection")
        if status >= 500:
            log.error("a request failed in the HTTP server: %s", "" if exc is None else redacted(exc))
            error = CausewayError("The server failed.")
        else:
            reason = (message or "").strip().partition("\n")[0][:200]
            error = InvalidRequest(f"This is not valid HTTP: {reason}")
        response = error_response(error)
        response.force_close()
        return response


def _refusal() -> bytes:
    error = QueueFull("every connection to this server has a request in progress")
    body = encode_error(error)
    head = (
        f"HTTP/1.1 {error.status} Too Many Requests\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


_REFUSAL = _refusal()


# --- addresses -------------------------------------------------------------------------------------------------------


async def bind_tcp(
    new_connection: Callable[[], asyncio.BaseProtocol], host: str, port: int, key: str
) -> asyncio.Server:
    """Listen on TCP. Raises ConfigError, which names `key`, if the address cannot be bound."""
    loop = asyncio.get_running_loop()
    try:
        return await loop.create_server(new_connection, host, port, backlog=_BACKLOG, reuse_address=True)
    except OSError as error:
        raise bind_failure(address_of(host, port), error, where=key) from error


def raise_file_limit() -> None:
    """Raise the limit of open files, which connections count against, to the most that the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def url_of(host: str, port: int) -> str:
    """Return the URL of an address; one of IPv6 has brackets in it."""
    return f"http://{address_of(host, port)}"


def address_of(host: str, port: int) -> str:
    """Return host:port; a host of IPv6 gets brackets, where it has none."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def bind_unix_socket(path: Path, key: str) -> socket.socket:
    """Bind `path`, replacing a socket that a dead process left there. Raises ConfigError, which names `key`."""
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode) and not _accepts_connections(path):
            path.unlink()
        if not path.parent.exists():
            path.parent.mkdir(parents=True)
            path.parent.chmod(0o755)  # whatever the umask: the socket's own rights say who may connect
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.bind(str(path))
            path.chmod(0o660)
        except BaseException:
            listening.close()
            raise
    except OSError as error:
        raise bind_failure(str(path), error, where=key) from error
    return listening


def bind_failure(address: str, error: OSError, *, where: str) -> ConfigError:
    """The error for an address that cannot be bound. `where`: the configuration key."""
    reason = error.strerror or str(error)
    if error.errno == errno.EADDRINUSE:
        reason = "another program listens there: stop it, or choose another address"
    return ConfigError(f"cannot listen on {address}: {reason}", where=where)


def _accepts_connections(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) == 0


# --- aiohttp beyond its documented interface; tests/router/serving/test_aiohttp_internals.py names each part ----------


def is_between_requests(connection: RequestHandler) -> bool:
    """Whether the connection waits for the head of a request, the first one or the next.

    `RequestHandler._waiter`: the only place that tells an idle connection from one whose request has just arrived or
    whose response is still being written; closing either of these would lose an answer.
    """
    waiter = connection._waiter  # noqa: SLF001
    return waiter is not None and not waiter.done()


class HttpRequest(web.BaseRequest):
    """A request whose response names no versions of software in its header `Server`, and has the headers of CORS.

    `BaseRequest._prepare_hook`: the one place that sees the head of every response, also of a WebSocket and of
    aiohttp's own errors; aiohttp's web application overrides it for its signal `on_response_prepare`.
    """

    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        response.headers[hdrs.SERVER] = SERVER
        response.headers.update(self.get(CORS, {}))


def make_request(message: Any, payload: Any, protocol: Any, writer: Any, task: asyncio.Task[None]) -> HttpRequest:
    """Build a request with a plain path: what `web.Server` takes as `request_factory`."""
    target = message.path
    if "//" in target or "?" in target or target[-1:] == "/":  # of few requests
        message = with_plain_path(message)
    return HttpRequest(message, payload, protocol, writer, task, asyncio.get_running_loop())


def with_plain_path(message: Any) -> Any:
    """Return a request's message, a named tuple whose `url` is where `BaseRequest.path` comes from, with a plain path.

    `raw_path` stays as it was sent.
    """
    url = message.url
    if (path := plain_path(url.raw_path)) == url.raw_path:
        return message
    return message._replace(url=url.with_path(path, encoded=True, keep_query=True))


def has_response_begun(request: web.BaseRequest) -> bool:
    """Return whether bytes of the response were written. `output_size`: undocumented attribute of the stream writer,
    which aiohttp's own `handle_error` reads for the same purpose; the responses that are written here count in it."""
    return bool(request.writer.output_size)
