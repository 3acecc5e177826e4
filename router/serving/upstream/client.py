"""An HTTP/1.1 client of one server: a pool of connections.

1. A request uses the most recently idle connection, else a new one; at the limit it waits for its turn.
2. It is sent again only if a pooled connection ended before any byte of an answer: the server closed it for idleness
   just as it was reused. A new connection that ends without an answer may have delivered the request.
3. Redirects are not followed, and proxies of the environment are not used.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import aiohappyeyeballs

from .connection import ConnectError, DisconnectedError, HttpConnection, HttpResponse

_ADDRESSES_S: Final = 10.0  # time for which the addresses of a name are cached
_OTHER_ADDRESS_S: Final = 0.25  # delay until the next address of a name is also tried
_TIMER_STEP_S: Final = 0.002  # timers may fire this much early


class HttpClient:
    """A pool of connections to one server. Call `close` when done.

    Args:
        url: URL of the server, `http://HOST[:PORT]` or `https://…`, with an encoded host; path and query are ignored.
        tls: TLS settings for `https`.
        limit: Maximum number of connections.
        connect_timeout_s: Maximum time for DNS, connection and TLS together.
        idle_s: Time after which an unused connection is closed.
    """

    def __init__(
        self, url: str, *, tls: ssl.SSLContext | None, limit: int, connect_timeout_s: float, idle_s: float
    ) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        usual = 443 if parts.scheme == "https" else 80
        self._port = parts.port or usual
        name = f"[{self._host}]" if ":" in self._host else self._host
        self._host_field = name if self._port == usual else f"{name}:{self._port}"
        self._tls = tls if parts.scheme == "https" else None
        self._limit = limit
        self._connect_timeout_s = connect_timeout_s
        self._idle_s = idle_s
        self._is_closed = False
        self._used = 0  # open connections and those that are being opened
        self._open: set[HttpConnection] = set()
        self._idle: list[HttpConnection] = []  # the most recently used one last
        self._waiters: deque[asyncio.Future[HttpConnection | None]] = deque()
        self._sweep: asyncio.TimerHandle | None = None
        self._addresses: tuple[list[Any], float] = ([], 0.0)  # addresses and their expiry

    async def request(
        self, method: str, target: str, fields: Mapping[str, str], until: float, body: bytes | None = None
    ) -> HttpResponse:
        """Send a request. Returns the response when its head has arrived; the caller must release it.

        Args:
            target: Path and query, encoded.
            fields: The headers, without Host and Content-Length.
            until: The time by which the answer must be complete, unless its `bound` is moved (the loop's clock, s).

        Raises:
            HttpClientError: There is no answer.
            TimeoutError: There was no answer in time.
            ValueError: A header cannot be sent.
        """
        length = "" if body is None else f"Content-Length: {len(body)}\r\n"
        start = f"{method} {target} HTTP/1.1\r\nHost: {self._host_field}\r\n"
        data = f"{start}{_lines(fields)}{length}\r\n".encode() + (body or b"")
        while True:
            connection = self._idle_connection() or await self._acquire(until)
            try:
                return await connection.exchange(data, until)
            except DisconnectedError as error:
                if not connection.served or error.begun:  # (2)
                    raise

    def close(self) -> None:
        """Close all connections. Waiting requests and all further ones fail."""
        self._is_closed = True
        for connection in [*self._open]:
            connection.close()
        if self._sweep is not None:
            self._sweep.cancel()

    # --- for the connections -----------------------------------------------------------------------------------------

    def released(self, connection: HttpConnection) -> None:
        """Take back a connection whose answer is complete."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(connection)
                return
        connection.idle_since = connection.loop.time()
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep = connection.loop.call_later(self._idle_s, self._close_idle)

    def closed(self, connection: HttpConnection) -> None:
        """Remove a closed connection."""
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        self._free()

    # --- the pool ----------------------------------------------------------------------------------------------------

    def _idle_connection(self) -> HttpConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.loop.time() - connection.idle_since < self._idle_s:
                return connection
            connection.close()
        return None

    async def _acquire(self, until: float) -> HttpConnection:
        """Return a new connection, or an idle one if the limit is reached. Raises ConnectError, TimeoutError."""
        if self._used < self._limit:
            self._used += 1
            return await self._connect(until)
        while True:
            waiter: asyncio.Future[HttpConnection | None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                async with asyncio.timeout_at(until):
                    connection = await waiter
            except BaseException:
                if waiter.done() and not waiter.cancelled():
                    self._give_back(waiter.result())
                raise
            if connection is None:
                return await self._connect(until)
            if connection.is_open:
                return connection

    def _give_back(self, connection: HttpConnection | None) -> None:
        if connection is None:
            self._free()
        elif connection.is_open:
            self.released(connection)

    def _free(self) -> None:
        """Let the longest waiting request open a connection."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self._used -= 1

    def _close_idle(self) -> None:
        self._sweep = None
        if not self._idle:
            return
        loop = self._idle[0].loop
        for connection in [one for one in self._idle if loop.time() - one.idle_since >= self._idle_s - _TIMER_STEP_S]:
            connection.close()
        if self._idle:
            self._sweep = loop.call_at(self._idle[0].idle_since + self._idle_s, self._close_idle)

    async def _connect(self, until: float) -> HttpConnection:
        """Open a connection, which `_used` already counts."""
        loop = asyncio.get_running_loop()
        by = min(until, loop.time() + self._connect_timeout_s)
        try:
            async with asyncio.timeout_at(by):
                connection = await self._connection(loop)
                if self._is_closed:
                    raise ConnectError(None)
        except BaseException as error:
            self._free()
            self._addresses = ([], 0.0)
            if isinstance(error, OSError) and not (isinstance(error, TimeoutError) and error.errno is None):
                raise ConnectError(error) from error
            if isinstance(error, TimeoutError) and by < until:
                raise ConnectError(None) from error
            raise
        self._open.add(connection)
        return connection

    async def _connection(self, loop: asyncio.AbstractEventLoop) -> HttpConnection:
        if self._is_closed:
            raise ConnectError(None)
        addresses, good_until = self._addresses
        if loop.time() >= good_until:
            addresses = await loop.getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
            )
            self._addresses = (addresses, loop.time() + _ADDRESSES_S)
        raw = await aiohappyeyeballs.start_connection(addresses, happy_eyeballs_delay=_OTHER_ADDRESS_S)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        name = self._host.rstrip(".") if self._tls is not None else None
        _, connection = await loop.create_connection(
            lambda: HttpConnection(self), sock=raw, ssl=self._tls, server_hostname=name
        )
        return connection


def _lines(fields: Mapping[str, str]) -> str:
    """Return the lines of a head, each with its CRLF. Raises ValueError for the end of a line in a value."""
    lines = "".join([f"{name}: {value}\r\n" for name, value in fields.items()])
    if lines.count("\n") != len(fields) or lines.count("\r") != len(fields):
        raise ValueError("A header's value contains a line break.")
    return lines
