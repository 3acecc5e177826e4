"""The gateway's socket: HTTP/1.1 by aiohttp's low-level server, bounded in connections, headers and time.

1. no HTTP at all, or a head beyond the limits: OpenAI's error object with 400, and the connection is closed
2. a connection that stays silent, or whose head does not arrive, for `read_timeout_s`: closed
3. one connection more than there is room for: the one that has been silent longest makes room, before those that wait
   between two requests; where all are being answered, the new one is closed
4. a client that leaves: its handler is cancelled, and so its work in Triton
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from router.errors import CausewayError, ConfigError, InvalidRequest

from ..config.schema import ServerConfig
from .responses import refusal

CONNECTIONS = 4096
"""At most; where the kernel gives a process few files, half of those."""
_HEADERS = 64
_BACKLOG = 1024
_LINGER_S = 2.0  # for the rest of a body whose request was refused
_LEAVE_S = 2.0  # for handlers that were cancelled
_log = logging.getLogger("causeway.cloud.listener")

Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class _Connection(RequestHandler):
    @property
    def is_idle(self) -> bool:
        """It waits for the head of a request, the first one or the next."""
        return self._waiter is not None and not self._waiter.done()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(self._manager, _Http) and not self._manager.enter(self):  # (3)
            transport.close()
            return
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        if isinstance(self._manager, _Http):
            self._manager.leave(self)
        super().connection_lost(exc)

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
    """Owns who is connected: whoever floods with connections that say nothing only pushes out its own."""

    def __init__(self, handler: Handle, *, room: int, **settings: Any) -> None:
        super().__init__(handler, **settings)
        self._room = room
        self._inside: set[_Connection] = set()
        # The oldest first. Who has sent a request was no flood; its client expects to find the connection again.
        self._silent: dict[_Connection, None] = {}
        self._resting: dict[_Connection, None] = {}

    def __call__(self) -> RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)

    def enter(self, connection: _Connection) -> bool:
        if len(self._inside) >= self._room and not self._make_room():
            return False
        self._inside.add(connection)
        self._silent[connection] = None
        return True

    def leave(self, connection: _Connection) -> None:
        self._inside.discard(connection)
        self._silent.pop(connection, None)
        self._resting.pop(connection, None)

    def begin(self, connection: object) -> None:
        """A whole head has come."""
        if isinstance(connection, _Connection):
            self._silent.pop(connection, None)
            self._resting.pop(connection, None)

    def end(self, connection: object) -> None:
        if isinstance(connection, _Connection) and connection in self._inside:
            self._resting[connection] = None

    def _make_room(self) -> bool:
        for connections in (self._silent, self._resting):
            # Some are not idle: new ones whose task has not begun, and those whose answer is still on its way out.
            found = next((one for one in connections if one.is_idle), None)
            if found is not None:
                self.leave(found)
                found.force_close()
                return True
        return False


def room() -> int:
    """For connections. Takes as many files as the kernel gives: the rest is for Triton, Redis and logs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * CONNECTIONS:
        _log.warning("this process may open %d files only: %d connections", hard, hard // 2)
    wanted = 2 * CONNECTIONS if hard == resource.RLIM_INFINITY else min(2 * CONNECTIONS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return min(CONNECTIONS, wanted // 2)


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
            room=room(),
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
        assert self._http is not None
        self._active += 1
        self._idle.clear()
        self._http.begin(http.protocol)
        try:
            return await self._handle(http)
        finally:
            self._http.end(http.protocol)
            self._active -= 1
            if not self._active:
                self._idle.set()
