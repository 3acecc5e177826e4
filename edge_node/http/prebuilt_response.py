"""A response whose bytes are there already: one string for the head, one write for all of it.

aiohttp's own response builds a multidict of headers and serialises it again; for a hit that costs as much as everything
else together. What is left out is what such a response never needs: chunks, cookies, compression.
"""

from __future__ import annotations

import asyncio
import time
from email.utils import formatdate

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.client_exceptions import ClientConnectionResetError

SERVER = "causeway"
STALLED_S = 30.0  # a client that takes nothing for so long is gone


class PrebuiltResponse(web.StreamResponse):
    """Status 200. `fields` are lines of a head, each with its CRLF, as they are to be sent."""

    def __init__(self, fields: str, body: bytes) -> None:
        super().__init__()
        self._fields = fields
        self._bytes = body
        self._http: web.BaseRequest | None = None

    def send(self, http: web.BaseRequest) -> None:
        """All of it, now: before anything is counted or recorded. Raises ConnectionError when the client is gone."""
        self._http = http
        self._keep_alive = http.keep_alive
        transport = http.transport
        if transport is None or transport.is_closing():
            raise ClientConnectionResetError("the client closed the connection")
        transport.write(self._head(http).encode("latin-1") + self._bytes)

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Nothing is left to prepare: the server calls this after `send`."""
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """Waits for a client that is slow to read."""
        http = self._http
        assert http is not None
        if not http.protocol.writing_paused:
            return
        try:
            async with asyncio.timeout(STALLED_S):
                await http.writer.drain()
        except TimeoutError:
            if http.transport is not None:
                http.transport.abort()
            raise ClientConnectionResetError("the client takes nothing") from None

    def _head(self, http: web.BaseRequest) -> str:
        connection = ""
        if not self._keep_alive:
            connection = "Connection: close\r\n"
        elif http.version.minor == 0:
            connection = "Connection: keep-alive\r\n"
        return (
            f"HTTP/1.{http.version.minor} 200 OK\r\n{self._fields}Content-Length: {len(self._bytes)}\r\n"
            f"Date: {_date.now()}\r\nServer: {SERVER}\r\n{connection}\r\n"
        )


class _Date:
    """The head's Date (RFC 9110), made once a second."""

    def __init__(self) -> None:
        self._second = 0
        self._text = ""

    def now(self) -> str:
        second = int(time.time())
        if second != self._second:
            self._second, self._text = second, formatdate(second, usegmt=True)
        return self._text


_date = _Date()
