"""A plain request: its head, bytes → method, path, headers and the length of the body; and its form for handlers.

Nearly every request is plain: a whole body of known length, no upgrade, a connection that stays open. It has those
attributes of `aiohttp.web.BaseRequest` that handlers of plain requests read, so that both have one handler.

Heads are read by a grammar that is smaller than HTTP's. A head that it does not match is not refused: aiohttp reads it,
and decides. So whatever is read here must mean the same to aiohttp, and to every proxy in front:

1. one of the request lines that were asked for, byte by byte, of HTTP/1.1
2. header lines of a token, a colon and printable ASCII, each name once, `Host` among them; no more, longer ones than
   aiohttp takes
3. no header that changes where the body ends, or what the connection is: the body has a `Content-Length` of digits, or
   there is none after GET

A client sends nearly the same head with each request of a connection. `PlainHead.match` finds out by two comparisons.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Final, Protocol

from aiohttp import HttpVersion, HttpVersion11, web
from multidict import CIMultiDict

PLAIN: Final = (
    *(("POST", f"/v1/{path}") for path in ("chat/completions", "completions", "embeddings", "responses")),
    *(("GET", path) for path in ("/healthz", "/health", "/readyz")),
)
"""Method and path of the requests that edge and gateway can answer without aiohttp."""
NO_HEADERS: Final[Mapping[str, str]] = {}


class PlainTransport(Protocol):
    """The connection of a plain request."""

    transport: asyncio.Transport | None
    """The transport; None after closing."""
    writing_paused: bool
    """Whether the client reads more slowly than the server writes."""

    async def drain(self) -> None:
        """Wait until the client has caught up. Raises ConnectionError if it has disconnected."""
        ...


class PlainRequest:
    """A plain request over HTTP/1.1, whose body has arrived and whose connection is kept open.

    Attributes:
        headers: The headers without `Content-Length`, each name once.
        body: The whole body.
        remote: The address of the client; None over a Unix socket.
        cors: The CORS headers of the answer.
        output_size: The number of written bytes of the answer.
    """

    __slots__ = ("body", "cors", "headers", "method", "output_size", "path", "protocol", "remote")
    version: Final[HttpVersion] = HttpVersion11
    keep_alive: Final = True

    def __init__(
        self,
        protocol: PlainTransport,
        method: str,
        path: str,
        headers: CIMultiDict[str],
        body: bytes,
        remote: str | None,
    ) -> None:
        self.protocol = protocol
        self.method = method
        self.path = path
        self.headers = headers
        self.body = body
        self.remote = remote
        self.cors = NO_HEADERS
        self.output_size = 0

    @property
    def raw_path(self) -> str:
        return self.path

    @property
    def content_length(self) -> int:
        return len(self.body)

    @property
    def transport(self) -> asyncio.Transport | None:
        return self.protocol.transport

    @property
    def writer(self) -> PlainRequest:
        """The request itself, which has a writer's `output_size` and `drain`."""
        return self

    async def drain(self) -> None:
        """Wait until the client has caught up. Raises ConnectionError if it has disconnected."""
        await self.protocol.drain()


HttpExchange = web.BaseRequest | PlainRequest


# --- heads ---------------------------------------------------------------------------------------------------------

MAX_HEADERS: Final = 64
_MAX_BYTES: Final = 8190  # maximum of the whole head; aiohttp has the same limit for each line
_MAX_DIGITS: Final = 9  # maximum digits of Content-Length
_LINE: Final = re.compile(r"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):([\t -~]*)")
_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,%d})\r\n" % _MAX_DIGITS, re.IGNORECASE)
_OTHER: Final = frozenset(
    {
        *("transfer-encoding", "expect", "upgrade", "proxy-connection", "http2-settings", "sec-websocket-key1"),
        "prefer",  # the request may become a job
    }
)
"""The headers that only other requests have (3)."""


class PlainHead:
    """A parsed head: method and path of the request line, and `headers` without `Content-Length`."""

    __slots__ = ("_after", "_before", "headers", "method", "path")

    def __init__(self, method: str, path: str, headers: CIMultiDict[str], before: bytes, after: bytes) -> None:
        self.method = method
        self.path = path
        self.headers = headers
        self._before = before  # the digits of Content-Length
        self._after = after

    def match(self, data: bytes) -> tuple[int, int] | None:
        """Return start and end of the body if `data` begins with this head, except for the length of the body."""
        before, after = self._before, self._after
        if not data.startswith(before):
            return None
        begin = len(before)
        if not after:  # there is no body
            return begin, begin
        end = data.find(b"\r\n", begin, begin + _MAX_DIGITS + 2)
        if end <= begin or not data.startswith(after, end):
            return None
        digits = data[begin:end]
        if not digits.isdigit():  # bytes.isdigit accepts only ASCII digits
            return None
        body = end + len(after)
        return body, body + int(digits)


def read_head(data: bytes, lines: Mapping[bytes, tuple[str, str]]) -> PlainHead | None:
    """Return the head at the beginning of `data`; None if it is incomplete, or must be read by aiohttp.

    Args:
        data: Bytes of a connection.
        lines: The method and the path of each request line, with its CRLF. (1).
    """
    end, start = data.find(b"\r\n\r\n", 0, _MAX_BYTES), data.find(b"\r\n") + 2
    known = lines.get(data[:start])
    if known is None or end < start:
        return None
    method, path = known
    found = [_LINE.fullmatch(line) for line in data[start:end].decode("latin-1").split("\r\n")]
    fields = [(line[1], line[2].strip(" \t")) for line in found if line is not None]
    names = {name.lower() for name, _ in fields}
    if not len(found) == len(fields) == len(names) <= MAX_HEADERS:
        return None
    if "host" not in names or not names.isdisjoint(_OTHER):
        return None
    headers = CIMultiDict(fields)
    if headers.get("Connection", "keep-alive").lower() != "keep-alive":
        return None
    if method == "GET":
        return None if "content-length" in names else PlainHead(method, path, headers, data[: end + 4], b"")
    length = _LENGTH.search(data, start - 2, end + 2)
    if length is None:
        return None
    del headers["Content-Length"]
    return PlainHead(method, path, headers, data[: length.start(1)], data[length.end(1) : end + 4])
