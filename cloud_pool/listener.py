"""The gateway's socket: HTTP/1.1 by aiohttp's low-level server, bounded in connections, headers and time.

1. no HTTP at all, or a head beyond the limits: OpenAI's error object with 400, and the connection is closed
2. a connection that stays silent, or whose head does not arrive, for `read_timeout_s`: closed
3. one connection more than CONNECTIONS: closed at once
4. a client that leaves: its handler is cancelled, and so its work in Triton
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import anyio
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from router.errors import CausewayError, ConfigError, InvalidRequest

from .config import ServerConfig
from .replies import refusal

CONNECTIONS = 4096
_HEADERS = 64
_BACKLOG = 1024
_LINGER_S = 2.0  # for the rest of a body whose request was refused
_LEAVE_S = 2.0  # for handlers that were cancelled
_log = logging.getLogger("causeway.cloud.listener")

Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class _Connection(RequestHandler):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(self._manager, _Http) and self._manager.full:  # (3)
            transport.close()
            return
        super().connection_made(transport)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """(1) aiohttp's own faults in OpenAI's shape; of its message, which quotes the bytes, the first line."""
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun: the connection is all that can be closed")
        if status >= 500:
            _log.error("a request broke the server: %r", exc)
            response = refusal(CausewayError("The gateway failed."))
        else:
            said = (message or "").strip().partition("\n")[0][:200]
            response = refusal(InvalidRequest(f"This is not HTTP as it should be: {said}"))
        response.force_close()
        return response


class _Http(web.Server):
    @property
    def full(self) -> bool:
        return len(self._connections) >= CONNECTIONS

    def __call__(self) -> RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class Listener:
    """Owns the socket and its connections."""

    def __init__(self, config: ServerConfig, handle: Handle) -> None:
        self._config = config
        self._handle = handle
        self._http: _Http | None = None
        self._listening: asyncio.AbstractServer | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._active = 0
        self.port = config.port

    async def start(self) -> None:
        """Raises ConfigError when the address cannot be had."""
        self._http = _Http(
            self._serve,
            handler_cancellation=True,  # (4)
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=self._config.read_timeout_s,  # (2)
            lingering_time=_LINGER_S,
            max_headers=_HEADERS,
        )
        host, port = self._config.host, self._config.port
        try:
            self._listening = await asyncio.get_running_loop().create_server(
                self._http, host, port, backlog=_BACKLOG, reuse_address=True
            )
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}", where="server.port") from error
        self.port = self._listening.sockets[0].getsockname()[1]

    async def drain(self, timeout_s: float) -> None:
        """Returns when nothing is being answered any more, or when the time is over."""
        with anyio.move_on_after(timeout_s):
            await self._idle.wait()

    async def close(self) -> None:
        """What is still being answered is cancelled, and has let go when this returns."""
        if self._listening is not None:
            self._listening.close()
        if self._http is not None:
            await self._http.shutdown(timeout=0.25)
        await self.drain(_LEAVE_S)

    async def _serve(self, http: web.BaseRequest) -> web.StreamResponse:
        self._active += 1
        self._idle.clear()
        try:
            return await self._handle(http)
        finally:
            self._active -= 1
            if not self._active:
                self._idle.set()
