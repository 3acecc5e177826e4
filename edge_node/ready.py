"""A response whose bytes are there already: one string for the head, one write for all of it.

aiohttp's own response builds a multidict of headers and serialises it again; for a hit that costs as much as everything
else together. What is left out is what such a response never needs: chunks, cookies, compression.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from email.utils import formatdate

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.client_exceptions import ClientConnectionResetError

SERVER = "causeway"


class ReadyResponse(web.StreamResponse):
    """Status 200 with this head and body. `fields` are names and values that may stand in a head as they are."""

    def __init__(self, fields: Mapping[str, str], body: bytes) -> None:
        super().__init__()
        self._fields = fields
        self._bytes = body
        self._http: web.BaseRequest | None = None

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        self._http = request
        self._keep_alive = request.keep_alive
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """Raises ConnectionError when the client is gone."""
        assert self._http is not None
        transport = self._http.transport
        if transport is None or transport.is_closing():
            raise ClientConnectionResetError("the client closed the connection")
        transport.write(self._head(self._http).encode("latin-1") + self._bytes)
        await self._http.writer.drain()

    def _head(self, http: web.BaseRequest) -> str:
        lines = [f"HTTP/{http.version.major}.{http.version.minor} 200 OK"]
        lines += [f"{name}: {value}" for name, value in self._fields.items()]
        lines.append(f"Content-Length: {len(self._bytes)}\r\nDate: {_date.now()}\r\nServer: {SERVER}")
        if http.version.minor == 0 and self._keep_alive:
            lines.append("Connection: keep-alive")
        elif not self._keep_alive:
            lines.append("Connection: close")
        lines.append("\r\n")
        return "\r\n".join(lines)


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
