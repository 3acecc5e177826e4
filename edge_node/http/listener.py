"""Sockets: TCP and a Unix socket, HTTP/1.1 by aiohttp's low-level server, bounded in connections, headers and time.

What a bad client gets:

1. no HTTP at all, or headers beyond the limits: OpenAI's error object with 400, and the connection is closed
2. a head that does not arrive in `read_timeout_s`, a connection that stays silent for so long: closed
3. one connection more than `connections`: 503 at once, and closed
4. requests sent ahead (pipelining) are answered in order; only a few are read ahead
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
from ..serving.attempts import where
from .responses import error_response

log = logging.getLogger(__name__)

CONNECTIONS = 512
_HEADERS = 64  # fields of a head, each of at most 8190 bytes
_BACKLOG = 512
_LINGER_S = 2.0  # for the rest of a body whose request was refused
_LAST_BYTES_S = 0.25  # for answers that are done, and on their way out
_LEAVE_S = 2.0  # for handlers that were cancelled

Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class _Connection(RequestHandler):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(self._manager, _Http) and self._manager.full:  # (3)
            sink = cast("asyncio.Transport", transport)
            sink.write(_REFUSED)
            sink.close()
            return
        super().connection_made(transport)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """(1) aiohttp's own errors, in OpenAI's shape. Its message quotes the bad bytes: the first line is enough."""
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun: the connection is all that can be closed")
        if status >= 500 and exc is not None:
            log.error("a request broke the server: %s", where(exc))
            error = CausewayError("internal error")
        else:
            error = InvalidRequest("malformed HTTP: " + (message or "").strip().partition("\n")[0][:200])
        response = error_response(error)
        response.force_close()
        return response


class _Http(web.Server):
    limit = CONNECTIONS

    @property
    def full(self) -> bool:
        return len(self._connections) >= self.limit

    def __call__(self) -> RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class HttpListener:
    """Listens as configured, and knows how many requests are being answered."""

    def __init__(self, config: ServerConfig, handle: Handle, *, connections: int = CONNECTIONS) -> None:
        self._config = config
        self._connections = connections
        self._handle = handle
        self._idle = asyncio.Event()
        self._idle.set()
        self.in_flight = 0
        self._http: _Http | None = None
        self._listeners: list[asyncio.AbstractServer] = []
        self._socket_path: Path | None = None
        self.port: int | None = None

    async def start(self) -> None:
        """Raises ConfigError when an address cannot be listened on."""
        self._http = _Http(
            self._serve,
            handler_cancellation=True,  # a client that leaves ends the work for it
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=self._config.read_timeout_s,  # (2)
            lingering_time=_LINGER_S,
            max_headers=_HEADERS,
        )
        self._http.limit = self._connections
        loop = asyncio.get_running_loop()
        if self._config.host:
            address = f"{self._config.host}:{self._config.port}"
            try:
                listener = await loop.create_server(
                    self._http, self._config.host, self._config.port, backlog=_BACKLOG, reuse_address=True
                )
            except OSError as error:
                raise ConfigError(f"cannot listen on {address}: {_reason(error)}", where="server.port") from error
            self._listeners.append(listener)
            self.port = listener.sockets[0].getsockname()[1]
        if self._config.socket:
            path = Path(self._config.socket)
            self._listeners.append(await loop.create_unix_server(self._http, sock=_unix_socket(path), backlog=_BACKLOG))
            self._socket_path = path

    def stop_accepting(self) -> None:
        """No new connection; idle ones are closed, busy ones after their answer."""
        for listener in self._listeners:
            listener.close()
        if self._http is not None:
            self._http.pre_shutdown()

    async def drain(self, timeout_s: float) -> bool:
        """Wait for what is being answered. False: something still is."""
        with anyio.move_on_after(timeout_s):
            await self._idle.wait()
        return self.in_flight == 0

    async def close(self) -> None:
        """Cancels what is still being answered, and waits until it has let go."""
        self.stop_accepting()
        if self._http is not None:
            await self._http.shutdown(timeout=_LAST_BYTES_S)
        await self.drain(_LEAVE_S)
        if self._socket_path is not None:
            self._socket_path.unlink(missing_ok=True)

    async def _serve(self, http: web.BaseRequest) -> web.StreamResponse:
        self.in_flight += 1
        self._idle.clear()
        try:
            return await self._handle(http)
        finally:
            self.in_flight -= 1
            if self.in_flight == 0:
                self._idle.set()


def _unix_socket(path: Path) -> socket.socket:
    """A listening place at `path`; a socket that a dead process left there is removed. Raises ConfigError."""
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode) and not _somebody_listens(path):
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


def _somebody_listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as knock:
        return knock.connect_ex(str(path)) == 0


def _reason(error: OSError) -> str:
    return "another program listens there" if error.errno == errno.EADDRINUSE else error.strerror or str(error)


def _refusal() -> bytes:
    body = encode_error(Draining("this server has as many connections as it can take"))
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
    )
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


_REFUSED = _refusal()
