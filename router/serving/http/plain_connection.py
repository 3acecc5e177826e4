"""A client's connection: plain requests are answered here, without aiohttp, at a third of its cost.

At the first request that is not plain (another path, a WebSocket, a head that `plain_request` does not know, malformed
bytes) the connection moves to aiohttp, with all bytes that were not answered, and stays there. So there is one HTTP
server that refuses, and what is answered here is what that one would have answered:

1. A request begins when its body is here. If that takes more than a moment, or the body is large, aiohttp receives it,
   with its limits of time and memory.
2. Requests are answered in order. Few bytes are read ahead.
3. The next request is not begun before the client has read most of the answer to the last one.
4. The time limits, the connection's place in the `ConnectionTable` and the drain are those of the listener.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from typing import Generic, Protocol, TypeVar, cast

from aiohttp import web
from aiohttp.tcp_helpers import tcp_keepalive

from ...errors import CausewayError
from ...trackers import network_of
from ..logs import redacted
from ..responses import answer_plain, error_response
from .aiohttp_connection import AiohttpConnection, is_between_requests
from .plain_request import PlainHead, PlainRequest, read_head

log = logging.getLogger(__name__)

_MOMENT_S = 0.05
_MOMENT_BYTES = 64 * 1024  # maximum size of a request that arrives in pieces
_AHEAD_BYTES = 64 * 1024  # maximum size of requests that were sent ahead


Address = TypeVar("Address")


class Owner(Protocol[Address]):
    """The owner of the connections, which is the listener."""

    @property
    def plain(self) -> Mapping[bytes, tuple[str, str]]:
        """Method and path, by request line, of the requests that may be plain."""
        ...

    @property
    def read_timeout_s(self) -> float:
        """The maximum time for a head to arrive, and between two requests."""
        ...

    def admit(self, connection: PlainConnection[Address], /) -> bytes | None:
        """Add a new connection. Returns the refusal to send if there is no room."""
        ...

    def release(self, connection: PlainConnection[Address], /) -> None:
        """Remove a lost connection."""
        ...

    def serve(self, http: PlainRequest, connection: PlainConnection[Address], /) -> Awaitable[web.StreamResponse]:
        """Return the answer to a request, in the request's task. Raises only CancelledError."""
        ...

    def aiohttp_connection(self, connection: PlainConnection[Address], /) -> AiohttpConnection:
        """Return the aiohttp connection that reads the further requests of a connection."""
        ...


class PlainConnection(asyncio.Protocol, Generic[Address]):
    """A connection of a listener, from its beginning to its end, whichever server answers its requests.

    Attributes:
        address: The listener's address that accepted it.
        peer: The network of the client; "" over a Unix socket.
        reading_paused: Whether reading is paused because of requests that were sent ahead.
        task: The task that answers the request in progress.
    """

    def __init__(self, owner: Owner[Address], address: Address) -> None:
        self.address = address
        self.peer = ""
        self.transport: asyncio.Transport | None = None
        self.writing_paused = False
        self.task: asyncio.Task[None] | None = None
        self._owner = owner
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
            return is_between_requests(self._moved)
        return self.task is None and not self._received

    @property
    def is_open(self) -> bool:
        return (self if self._moved is None else self._moved).transport is not None

    def close(self) -> None:
        """Close the connection after the answer to the request in progress."""
        self._ends = True
        if self._moved is None and self.task is None:
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
        self._owner.release(self)

    # --- asyncio.Protocol --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)
        address = transport.get_extra_info("peername")
        if address:  # "" over the Unix socket
            self._remote = str(address[0])
            self.peer = network_of(self._remote)
            tcp_keepalive(transport)
        if (refusal := self._owner.admit(self)) is not None:
            transport.write(refusal)
            transport.close()
            return
        self.transport = transport
        self._expect_request()

    def data_received(self, data: bytes) -> None:
        if self.task is None:
            self._begin(self._received + data if self._received else data)
        elif not self._ends:
            self._received += data
            if len(self._received) > _AHEAD_BYTES and not self.reading_paused and self.transport is not None:
                self.reading_paused = True
                self.transport.pause_reading()

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
        if self.task is not None:
            self.task.cancel()

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
            head = read_head(data, self._owner.plain)
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
        http = PlainRequest(self, head.method, head.path, head.headers, data[begin:end], self._remote)
        self.task = self._loop.create_task(self._answer(http))

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

    async def _answer(self, http: PlainRequest) -> None:
        kept = False
        try:
            response = await self._owner.serve(http, self)
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
        self._close_at = self._loop.time() + self._owner.read_timeout_s
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
        """Let aiohttp read `data` and all later bytes."""
        transport, self.transport = self.transport, None
        if transport is None:
            return
        self._cancel_timers()
        self._received, self._head = b"", None
        self._moved = self._owner.aiohttp_connection(self)
        self._moved.take_over(transport, data, self._close_at)
        if self._ends:
            self._moved.close()
