"""Sockets: TCP and a Unix socket, HTTP/1.1 by aiohttp's low-level server, bounded in connections, headers and time.

How misbehaving clients are treated:

1. malformed HTTP, or headers beyond the limits: 400 with OpenAI's error object, and the connection is closed
2. a head that does not arrive within `read_timeout_s`, or a connection idle for so long: closed
3. connections beyond `connections`: 503 at once, and closed
4. pipelined requests: answered in order; only a few are read ahead
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

import anyio
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from router.errors import CausewayError, ConfigError, Draining, InvalidRequest
from router.openai import encode_error

from ..config.schema import ServerConfig
from ..observability.logs import redacted
from .responses import error_response

log = logging.getLogger(__name__)

CONNECTIONS = 512
_HEADERS = 64  # fields of a head, each of at most 8190 bytes
_BACKLOG = 512
_LINGER_S = 2.0  # to read the rest of a refused request's body
_FLUSH_S = 0.25  # on close: for answers that are complete but not yet sent
_CANCEL_S = 2.0  # on close: for cancelled handlers to end

Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class HttpListener:
    """Listens as configured and counts the requests in progress.

    Args:
        handle: answers one request; may raise CancelledError only.
        connections: the limit (3).
    """

    def __init__(self, config: ServerConfig, handle: Handle, *, connections: int = CONNECTIONS) -> None:
        self._config = config
        self._max_connections = connections
        self._handle = handle
        self._idle = asyncio.Event()
        self._idle.set()
        self._in_flight = 0
        self._http: web.Server | None = None
        self._sockets: list[asyncio.AbstractServer] = []
        self._socket_path: Path | None = None
        self._port: int | None = None

    @property
    def port(self) -> int | None:
        """The TCP port; None before `start`, or without TCP."""
        return self._port

    @property
    def in_flight(self) -> int:
        """Requests that are being answered."""
        return self._in_flight

    @property
    def full(self) -> bool:
        """Whether the limit of connections is reached."""
        return self._http is not None and len(self._http.connections) >= self._max_connections

    async def start(self) -> None:
        """Raises ConfigError when an address cannot be bound."""
        # handler_cancellation: a client that disconnects cancels its request.
        self._http = web.Server(self._serve, handler_cancellation=True)
        loop = asyncio.get_running_loop()
        if self._config.host:
            address = f"{self._config.host}:{self._config.port}"
            try:
                listening = await loop.create_server(
                    self._new_connection, self._config.host, self._config.port, backlog=_BACKLOG, reuse_address=True
                )
            except OSError as error:
                raise ConfigError(f"cannot listen on {address}: {_reason(error)}", where="server.port") from error
            self._sockets.append(listening)
            self._port = listening.sockets[0].getsockname()[1]
        if self._config.socket:
            path = Path(self._config.socket)
            self._sockets.append(
                await loop.create_unix_server(self._new_connection, sock=_unix_socket(path), backlog=_BACKLOG)
            )
            self._socket_path = path

    def stop_accepting(self) -> None:
        """Accept no new connection; close idle ones now, busy ones after their answer."""
        for listening in self._sockets:
            listening.close()
        if self._http is not None:
            self._http.pre_shutdown()

    async def drain(self, timeout_s: float) -> bool:
        """Wait for the requests in progress. Returns False if some are left."""
        with anyio.move_on_after(timeout_s):
            await self._idle.wait()
        return self._in_flight == 0

    async def close(self) -> None:
        """Cancel the requests in progress and wait for their handlers."""
        self.stop_accepting()
        if self._http is not None:
            await self._http.shutdown(timeout=_FLUSH_S)
        await self.drain(_CANCEL_S)
        if self._socket_path is not None:
            self._socket_path.unlink(missing_ok=True)

    def _new_connection(self) -> _Connection:
        """The protocol of a new connection."""
        assert self._http is not None
        return _Connection(self._http, self, keepalive_timeout=self._config.read_timeout_s)  # (2)

    async def _serve(self, http: web.BaseRequest) -> web.StreamResponse:
        self._in_flight += 1
        self._idle.clear()
        try:
            return await self._handle(http)
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._idle.set()


class _Connection(RequestHandler):
    """One client's connection."""

    def __init__(self, server: web.Server, listener: HttpListener, *, keepalive_timeout: float) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # off: `self.access_log` is Optional
            auto_decompress=False,
            keepalive_timeout=keepalive_timeout,
            lingering_time=_LINGER_S,
            max_headers=_HEADERS,
        )
        self._listener = listener

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._listener.full:  # (3)
            refused = cast("asyncio.Transport", transport)
            refused.write(_REFUSAL)
            refused.close()
            return
        super().connection_made(transport)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """(1) aiohttp's own errors, in OpenAI's shape. Its message quotes the bad bytes: keep the first line only."""
        if status >= 500 and exc is not None:
            log.error("a request failed in the HTTP server: %s", redacted(exc))
            error = CausewayError("internal error")
        else:
            error = InvalidRequest("malformed HTTP: " + (message or "").strip().partition("\n")[0][:200])
        response = error_response(error)
        response.force_close()
        return response


def _unix_socket(path: Path) -> socket.socket:
    """Bind `path`, replacing a socket that a dead process left there. Raises ConfigError."""
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode) and not _accepts_connections(path):
            path.unlink()
        path.parent.mkdir(parents=True, exist_ok=True)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.bind(str(path))
            path.chmod(0o660)
        except BaseException:
            listening.close()
            raise
    except OSError as error:
        raise ConfigError(f"cannot listen on {path}: {_reason(error)}", where="server.socket") from error
    return listening


def _accepts_connections(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) == 0


def _reason(error: OSError) -> str:
    return "another program listens there" if error.errno == errno.EADDRINUSE else error.strerror or str(error)


def _refusal() -> bytes:
    body = encode_error(Draining("this server has reached its limit of connections"))
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
    )
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


_REFUSAL = _refusal()
