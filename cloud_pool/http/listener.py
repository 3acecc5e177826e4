"""The gateway's socket: HTTP/1.1 by aiohttp's low-level server, bounded in connections, headers and time.

1. Bytes that are not HTTP, or a head beyond the limits: OpenAI's error object with 400, and the connection is closed.
2. A connection that stays silent, or whose head does not arrive, for `read_timeout_s`: closed.
3. One connection too many: of the peers that have the most connections, the one that has been silent longest makes
   room, before those that wait between two requests and, of another peer, those whose request was refused before its
   body had arrived. If every connection has a request in progress, the new one is closed; each tenant has its share of
   these (`body_memory`).
4. A client that disconnects: its handler is cancelled, and with it the work in Triton.
5. Requests that outlast the drain: they are cancelled while their clients are still there, and end with an error.
6. A request under a foreign `Host`, or of a foreign web page: refused, see `router.web_origins`.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
from collections.abc import Awaitable, Callable, Iterator
from itertools import chain
from typing import Any

import anyio
from aiohttp import web

from router.errors import CausewayError, ConfigError, Draining, InvalidRequest
from router.serving.logs import redacted
from router.serving.request import read_request_id
from router.serving.responses import error_response
from router.trackers.fair_share import FairShare, network_of
from router.web_origins import WebOrigins

from .aiohttp_internals import Request, has_response_begun, is_between_requests, make_request
from .config import ServerConfig
from .responses import STOPPED

_MAX_HEADERS = 64
_BACKLOG = 1024
_READ_BUFFER_BYTES = 64 * 1024  # of a body that is not read yet, and once more; then the client has to wait
_LINGER_S = 2.0  # for the rest of a body whose request was refused
_CANCEL_S = 2.0  # for handlers that were cancelled
_log = logging.getLogger("causeway.cloud.listener")

Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class _Connection(web.RequestHandler):
    def __init__(self, server: _HttpServer, **settings: Any) -> None:
        super().__init__(server, **settings)
        self._server = server
        self.peer = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        address = transport.get_extra_info("peername")
        self.peer = network_of(address[0]) if address else ""
        if not self._server.admit(self):  # (3)
            transport.close()
            return
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._server.forget(self)
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
            _log.error("a request failed in the HTTP server: %s", "" if exc is None else redacted(exc))
            response = error_response(CausewayError("The gateway failed."))
        else:
            reason = (message or "").strip().partition("\n")[0][:200]
            response = error_response(InvalidRequest(f"This is not valid HTTP: {reason}"))
        response.force_close()
        return response


class _HttpServer(web.Server):
    """Owns the connections. A peer that floods the gateway with silent connections only pushes out its own."""

    def __init__(self, handler: Handle, *, max_connections: int, **settings: Any) -> None:
        super().__init__(handler, request_factory=make_request, handler_cancellation=True)  # (4)
        self._settings = settings
        self._connected = FairShare(max_connections)  # by peer
        # Both have the oldest first. A connection that has sent a request is no flood, and its client expects to find
        # it open for the next one.
        self._silent: dict[_Connection, None] = {}
        self._between_requests: dict[_Connection, None] = {}

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=asyncio.get_running_loop(), **self._settings)

    def admit(self, connection: _Connection) -> bool:
        if self._connected.held >= self._connected.capacity and not self._make_room(connection.peer):
            return False
        self._connected.count(connection, connection.peer)
        self._silent[connection] = None
        return True

    def forget(self, connection: _Connection) -> None:
        self._connected.release(connection)
        self._silent.pop(connection, None)
        self._between_requests.pop(connection, None)

    def begin_request(self, connection: object) -> None:
        """A whole head has arrived."""
        if isinstance(connection, _Connection):
            self._silent.pop(connection, None)
            self._between_requests.pop(connection, None)

    def end_request(self, connection: object) -> None:
        if isinstance(connection, _Connection) and self._connected.holds(connection):
            self._between_requests[connection] = None

    def _make_room(self, peer: str) -> bool:
        crowding = (one for one in self._idle() if self._connected.crowds(one.peer))
        victim = next(crowding, None) or self._unfinished(peer)
        if victim is None:
            most = self._connected.held_by(peer)
            victim = next((one for one in self._idle() if self._connected.held_by(one.peer) >= most), None)
        if victim is None:
            return False
        self.forget(victim)
        victim.force_close()
        return True

    def _idle(self) -> Iterator[_Connection]:
        """Yield the idle connections, the oldest silent one first. Some are not idle: the task of a new one has not
        begun, or the response is still being written."""
        return (one for one in chain(self._silent, self._between_requests) if is_between_requests(one))

    def _unfinished(self, peer: str) -> _Connection | None:
        """Return one whose request has its answer, but still sends its body, of another peer that has many."""
        ended = (one for one in self._between_requests if one.peer != peer and self._connected.crowds(one.peer))
        return next(ended, None)


def allowed_connections(most: int) -> int:
    """Raise the process's file limit as far as needed and return how many connections, of `most`, may use it.

    The other half of the files is for Triton, Redis and logs.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * most:
        _log.warning("this process may open only %d files: %d connections", hard, hard // 2)
    wanted = 2 * most if hard == resource.RLIM_INFINITY else min(2 * most, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return min(most, wanted // 2)


class Listener:
    """Owns the socket and its connections.

    Args:
        config: its address and `read_timeout_s`.
        handle: handles each request.
        origins: which web pages may send requests.
        key: the configuration key of the address, for errors.
    """

    def __init__(self, config: ServerConfig, handle: Handle, origins: WebOrigins, *, key: str = "server.port") -> None:
        self._config = config
        self._key = key
        self._handle = handle
        self._origins = origins
        self._http: _HttpServer | None = None
        self._socket: asyncio.AbstractServer | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._active: set[asyncio.Task[object]] = set()
        self._closing = False
        self.port = config.port

    async def start(self) -> None:
        """Raises ConfigError if the address is not available."""
        self._http = _HttpServer(
            self._serve,
            max_connections=allowed_connections(self._config.max_connections),
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=self._config.read_timeout_s,  # (2)
            lingering_time=_LINGER_S,
            max_headers=_MAX_HEADERS,
            read_bufsize=_READ_BUFFER_BYTES,
        )
        host, port = self._config.host, self._config.port
        try:
            self._socket = await asyncio.get_running_loop().create_server(
                self._http, host, port, backlog=_BACKLOG, reuse_address=True
            )
        except OSError as error:
            reason = error.strerror
            if error.errno == errno.EADDRINUSE:
                reason = "another program listens there: stop it, or choose another address"
            raise ConfigError(f"cannot listen on {host}:{port}: {reason}", where=self._key) from error
        self.port = self._socket.sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        host = self._config.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    async def drain(self, timeout_s: float) -> None:
        """Return when no request is in progress any more, or after `timeout_s`."""
        with anyio.move_on_after(timeout_s):
            await self._idle.wait()

    async def close(self) -> None:
        """Cancel the requests in progress, and return when their handlers have ended."""
        self._closing = True
        if self._socket is not None:
            self._socket.close()
        for task in self._active:
            task.cancel()  # (5)
        await self.drain(_CANCEL_S)
        if self._http is not None:
            await self._http.shutdown(timeout=0.25)
        await self.drain(_CANCEL_S)

    async def _serve(self, http: web.BaseRequest) -> web.StreamResponse:
        task = asyncio.current_task()
        assert self._http is not None
        assert task is not None
        self._active.add(task)
        self._idle.clear()
        self._http.begin_request(http.protocol)
        try:
            return await self._answer(http)
        except asyncio.CancelledError:
            if not self._closing or has_response_begun(http):
                raise
            task.uncancel()
            return error_response(Draining(STOPPED))  # (5)
        finally:
            self._http.end_request(http.protocol)
            self._active.discard(task)
            if not self._active:
                self._idle.set()

    async def _answer(self, http: web.BaseRequest) -> web.StreamResponse:
        """Answer one request, unless its `Host` or its page is refused, or it is a preflight. (6)"""
        try:
            cors = self._origins.admit(http.method, http.headers)
        except CausewayError as error:
            return error_response(error, {"x-request-id": read_request_id(http.headers)})
        if not cors:
            return await self._handle(http)
        assert isinstance(http, Request)
        http.cors = cors
        preflight = self._origins.preflight(http.method, http.headers)
        return await self._handle(http) if preflight is None else web.Response(status=204, headers=preflight)
