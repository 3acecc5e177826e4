"""Reading of requests by all listeners: path, method, headers, and the body, bounded in bytes and time. A path with
repeated slashes, which clients get by joining URLs, is served by the handler of the plain path. A redirect would not
help, because many clients turn a redirected POST into a GET.

Edge, gateway and control plane read HTTP headers, gRPC metadata and the user properties of MQTT by these rules.
A list that comes on several lines is one list (RFC 9110, 5.3): a tag on the second line may be the one that protects
privacy. Any other header of ours, credentials, and an `Idempotency-Key` are refused if they come twice with different
values, because either may be meant.

Nearly every request is plain: a whole body of known length, no upgrade, a connection that stays open. `read_head` reads
its head by a grammar that is smaller than HTTP's. A head that it does not match is not refused: aiohttp reads it, and
decides. So whatever is read here must mean the same to aiohttp, and to every proxy in front:

1. one of the request lines that were asked for, byte by byte, of HTTP/1.1
2. header lines of a token, a colon and printable ASCII, each name once, `Host` among them; no more, longer ones than
   aiohttp takes
3. no header that changes where the body ends, or what the connection is: the body has a `Content-Length` of digits, or
   there is none after GET

A client sends nearly the same head with each request of a connection. `PlainHead.match` finds out by two comparisons.

A body that arrives together with its head, as nearly every body does, needs no wait and no timer. A multipart upload is
written to its file as it arrives, bounded in bytes, memory and time.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias, TypeVar

import anyio
import msgspec
from multidict import CIMultiDict

from ..errors import BodyTooLarge, ClientGone, InvalidRequest, RequestTimeout
from ..openai.audio import check_form
from ..openai.wire import MAX_TAGS, TAG
from ..parts.uploads import clean_filename
from ..session_tags import HEADER
from ..types import folded_tags
from .tls.peers import PeerCertificate

if TYPE_CHECKING:  # aiohttp is imported for the first request that it reads
    from aiohttp import BodyPartReader, web

AiohttpRequest: TypeAlias = "web.BaseRequest"
HttpExchange: TypeAlias = "AiohttpRequest | PlainRequest"
OURS: Final = "x-causeway-"
TAGS: Final = "x-causeway-tags"
DEADLINE: Final = "x-causeway-deadline-ms"
PRIORITY: Final = "x-causeway-priority"
LISTS: Final = frozenset({TAGS, "cache-control", "prefer", "sec-websocket-protocol"})
"""The list headers, in lower case."""
# The headers with a single value; two values may belong to different callers or requests.
_ONE_VALUE: Final = (OURS, "causeway", "authorization", "x-api-key", "idempotency-key", HEADER)
_SLASHES: Final = re.compile("/{2,}")
_TAG: Final = re.compile(TAG)
_DEADLINE_MS: Final = re.compile(r"[0-9]{1,9}", re.ASCII)
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
Choice = TypeVar("Choice", bound=str)
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


def plain_path(path: str) -> str:
    """Return a path, still percent-encoded, without empty segments: `//v1/models/` is `/v1/models`."""
    if "//" in path:
        path = _SLASHES.sub("/", path)
    return path[:-1] if len(path) > 1 and path.endswith("/") else path


def served_method(method: str, headers: Container[str]) -> str:
    """Return the method of the handler: HEAD is served by the handler of GET, and the HTTP server leaves the body out.
    Only GET opens a WebSocket (RFC 6455, 4.1).
    """
    return "GET" if method == "HEAD" and "Upgrade" not in headers else method


def allowed_methods(methods: str) -> str:
    """Return the value of `Allow` for methods that have a handler; GET implies HEAD."""
    return methods.replace("GET", "GET, HEAD")


def combined(lines: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the headers by lower-case name: lists joined, of others the first value. Raises InvalidRequest if a header
    with a single value comes twice with different values.
    """
    headers: dict[str, str] = {}
    for written, value in lines:
        name = written.lower()
        if name not in headers:
            headers[name] = value
        elif name in LISTS:
            headers[name] += f",{value}"
        elif name.startswith(_ONE_VALUE):
            one_value(name, (headers[name], value))
    return headers


def one_value(name: str, values: Sequence[str]) -> str:
    """Return the value of a header with a single value; "" if it is missing. Raises InvalidRequest if values differ."""
    if len(set(values)) > 1:
        raise InvalidRequest(
            f"The header `{name[:64]}` came more than once, with different values. Send it once.", param=name[:64]
        )
    return values[0] if values else ""


def read_authorization(http: HttpExchange) -> str:
    """Return the header `Authorization`; "" if it is missing. Raises InvalidRequest if there are two that differ."""
    values = http.headers.getall("Authorization", ())
    return one_value("authorization", values) if values else ""


def read_credential(http: HttpExchange) -> str:
    """Return `Authorization`, or `x-api-key` in its form; "": neither. Raises InvalidRequest if they differ."""
    authorization = read_authorization(http)
    keys = http.headers.getall("x-api-key", ())
    if not keys or not (key := one_value("x-api-key", keys).strip()):
        return authorization
    if authorization and authorization.partition(" ")[2].strip() != key:
        raise InvalidRequest(
            "`Authorization` and `x-api-key` have different keys. Send one of them.", param="x-api-key"
        )
    return authorization or f"Bearer {key}"


def members(lines: Iterable[str]) -> list[str]:
    """Return the members of a list header, from all its lines. Empty members are left out, as RFC 9110 requires."""
    return [text for line in lines for member in line.split(",") if (text := member.strip(" \t"))]


def read_tags(text: str, name: str = TAGS) -> tuple[str, ...]:
    """Return the tags of list `name`, as `folded_tags`. Raise InvalidRequest: a malformed tag may protect privacy."""
    tags = members([text])
    if len(tags) > MAX_TAGS or not all(_TAG.fullmatch(tag) for tag in tags):
        rule = f"at most {MAX_TAGS} tags of at most 64 characters, without spaces and control characters"
        raise InvalidRequest(f"`{name}` must hold {rule}, separated by commas.", param=name)
    return folded_tags(tags)


def read_deadline_ms(text: str | None) -> int | None:
    """Return the value of `x-causeway-deadline-ms`. Raises InvalidRequest."""
    if text is None:
        return None
    if not _DEADLINE_MS.fullmatch(text) or int(text) == 0:
        raise InvalidRequest(
            f"`{DEADLINE}` must be the time left in milliseconds, from 1 to 999999999, not {text[:32]!r}.",
            param=DEADLINE,
        )
    return int(text)


def read_choice(headers: Mapping[str, str], name: str, choices: Collection[Choice]) -> Choice | None:
    """Return the choice that a header names; None without the header. Raises InvalidRequest."""
    text = headers.get(name)
    if text is None:
        return None
    for choice in choices:
        if text == choice:
            return choice
    raise InvalidRequest(f"`{name}` must be one of {', '.join(choices)}, not {text[:64]!r}.", param=name)


def read_traceparent(headers: Mapping[str, str]) -> str:
    """Return the W3C trace context, version 00; "" if it is missing or malformed, as the specification requires."""
    traceparent = headers.get("traceparent")
    return traceparent if traceparent and _TRACEPARENT.fullmatch(traceparent) else ""


def read_request_id(headers: Mapping[str, str]) -> str:
    """Return the client's `x-request-id`; a random id if it is missing or invalid."""
    request_id = headers.get("x-request-id", "")
    return request_id if _REQUEST_ID.fullmatch(request_id) else os.urandom(8).hex()


# --- the body --------------------------------------------------------------------------------------------------------


def send_continue(http: AiohttpRequest) -> None:
    """Send `100 Continue` to a client that expects it, which aiohttp's low-level server leaves to the handler."""
    if http.headers.get("Expect", "").lower() == "100-continue" and http.transport is not None:
        http.transport.write(_CONTINUE)


def arrived_body(http: HttpExchange, max_bytes: int) -> bytes | None:
    """Return the body if it has arrived completely, else None. Raises InvalidRequest, BodyTooLarge or ClientGone."""
    if isinstance(http, PlainRequest):
        if len(http.body) > max_bytes:
            raise _too_large(max_bytes)
        return http.body
    if not http.content.is_eof():
        if (http.content_length or 0) > max_bytes:
            raise _too_large(max_bytes)
        return None
    from aiohttp.web import RequestPayloadError

    try:
        body = http.content.read_nowait()
    except RequestPayloadError:
        raise _malformed() from None
    except ConnectionResetError:
        raise _gone() from None
    if len(body) > max_bytes:
        raise _too_large(max_bytes)
    return body


async def receive_body(http: AiohttpRequest, max_bytes: int, timeout_s: float, hold: Callable[[int], None]) -> bytes:
    """Receive a body that is still arriving; stop as soon as it is too long. `hold` sets the number of bytes that are
    reserved in memory, or raises a CausewayError. Raises BodyTooLarge, RequestTimeout, ClientGone; InvalidRequest if
    the transfer encoding is malformed.
    """
    from aiohttp.web import RequestPayloadError

    body, held = bytearray(), http.content_length or 0
    hold(held)
    send_continue(http)
    try:
        with anyio.fail_after(timeout_s):
            while data := await http.content.readany():
                body += data
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
                if len(body) > held:  # the body's size was unknown
                    hold(len(body))
    except TimeoutError:
        raise RequestTimeout(f"The body did not arrive within {timeout_s:g} s.") from None
    except RequestPayloadError:
        raise _malformed() from None
    except ConnectionResetError:
        raise _gone() from None
    return bytes(body)


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than {max_bytes} bytes (`max_body_bytes`). Send a smaller one.")


def _gone() -> ClientGone:
    return ClientGone("The client has left.")


def _malformed() -> InvalidRequest:
    return InvalidRequest("The body's transfer encoding is malformed.")


_WHOLE_S = 900.0
_PIECE_BYTES = 64 * 1024
_MAX_FIELD_BYTES = 1024
_MAX_FIELDS = 16
_OVERHEAD_BYTES = 16 * 1024
"""Maximum size of an upload's body besides the file."""

WriteFile = Callable[[bytes], Awaitable[None]]


class UploadForm(msgspec.Struct, frozen=True):
    """The fields of an upload. `filename`: cleaned for display; `is_empty`: the file has no bytes."""

    filename: str
    fields: dict[str, str]
    is_empty: bool


def check_upload(http: AiohttpRequest) -> int:
    """Return the minimum size of the file; 0 if it is unknown. Raises UnsupportedMediaType."""
    check_form(http.headers.get("Content-Type"), http.headers.get("Content-Encoding"))
    return max(0, (http.content_length or 0) - _OVERHEAD_BYTES)


async def read_upload(http: AiohttpRequest, write: WriteFile, piece_s: float) -> UploadForm:
    """Read an upload and pass the file's bytes to `write`, which bounds their number. Raises InvalidRequest,
    ClientGone; RequestTimeout if nothing arrives for `piece_s`.
    """
    from aiohttp.http import HttpProcessingError
    from aiohttp.web import RequestPayloadError

    try:
        with anyio.fail_after(_WHOLE_S):
            return await _read(http, write, piece_s)
    except TimeoutError:
        raise RequestTimeout(
            f"The file did not arrive within {_WHOLE_S:g} s, or nothing arrived for {piece_s:g} s."
        ) from None
    except (ValueError, AssertionError, HttpProcessingError, RequestPayloadError):
        raise InvalidRequest("The body is not valid multipart/form-data.") from None
    except ConnectionResetError:
        raise _gone() from None


async def _read(http: AiohttpRequest, write: WriteFile, piece_s: float) -> UploadForm:
    from aiohttp import BodyPartReader

    filename: str | None = None
    fields: dict[str, str] = {}
    count, is_empty = 0, True
    with anyio.fail_after(piece_s):
        reader = await http.multipart()
    while True:
        with anyio.fail_after(piece_s):
            part = await reader.next()
        if part is None:
            break
        count += 1
        if not isinstance(part, BodyPartReader) or count > _MAX_FIELDS:
            raise InvalidRequest("The form has too many fields, or another form in it. Send plain fields.")
        if part.name == "file":
            if filename is not None:
                raise InvalidRequest("The form has `file` twice. Send one file for each request.", param="file")
            filename = clean_filename(part.filename or "")
            async for piece in _pieces(part, piece_s):
                is_empty = False
                await write(piece)
        else:
            fields[part.name or ""] = await _field(part, piece_s)
    if filename is None:
        raise InvalidRequest("`file` is missing. Send the file as the form's field `file`.", param="file")
    return UploadForm(filename, fields, is_empty)


async def _field(part: BodyPartReader, piece_s: float) -> str:
    value = bytearray()
    async for piece in _pieces(part, piece_s):
        value += piece
        if len(value) > _MAX_FIELD_BYTES:
            raise BodyTooLarge(f"A field of the form has more than {_MAX_FIELD_BYTES} bytes.")
    return value.decode("utf-8", "replace")


async def _pieces(part: BodyPartReader, piece_s: float) -> AsyncIterator[bytes]:
    while True:
        with anyio.fail_after(piece_s):
            piece = await part.read_chunk(_PIECE_BYTES)
        if not piece:
            return
        yield bytes(piece)


PLAIN: Final = (
    *(("POST", f"/v1/{path}") for path in ("chat/completions", "completions", "embeddings", "responses", "messages")),
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
    certificate: PeerCertificate | None
    """The client's verified certificate."""

    async def drain(self) -> None:
        """Wait until the client has caught up. Raises ConnectionError if it has disconnected."""
        ...


class PlainRequest:
    """A plain request over HTTP/1.1, whose body has arrived and whose connection is kept open. Many requests share
    `head`; `headers` are without `Content-Length`, each name once. `remote`: the client's address; None over a Unix
    socket. `cors`: headers of the answer, of which `output_size` bytes are written. `begun`: the handler's work before
    a task was made.
    """

    __slots__ = ("begun", "body", "cors", "head", "headers", "method", "output_size", "path", "protocol", "remote")
    version: Final[tuple[int, int]] = (1, 1)
    query: Final = NO_HEADERS
    keep_alive: Final = True

    def __init__(self, protocol: PlainTransport, head: PlainHead, body: bytes, remote: str | None) -> None:
        self.protocol = protocol
        self.head = head
        self.method = head.method
        self.path = head.path
        self.headers = head.headers
        self.body = body
        self.remote = remote
        self.cors = NO_HEADERS
        self.output_size = 0
        self.begun: object = None

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


def has_response_begun(http: HttpExchange) -> bool:
    """Return whether bytes of the response were written. The undocumented attribute `output_size` of the stream writer,
    which aiohttp's own `handle_error` reads for the same purpose, counts all responses.
    """
    return bool(http.writer.output_size)


def client_certificate(http: HttpExchange) -> PeerCertificate | None:
    """Return the verified certificate of the client's connection; None if it has none."""
    protocol: object = http.protocol
    certificate: PeerCertificate | None = getattr(getattr(protocol, "plain", protocol), "certificate", None)
    return certificate


# --- heads ---------------------------------------------------------------------------------------------------------

MAX_HEADERS: Final = 64
_MAX_BYTES: Final = 8190  # maximum of the whole head; aiohttp has the same limit for each line
_MAX_DIGITS: Final = 9  # maximum digits of Content-Length
LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,%d})\r\n" % _MAX_DIGITS, re.IGNORECASE)
_LINE: Final = re.compile(r"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):([\t -~]*)")
_OTHER: Final = frozenset(
    {
        *("transfer-encoding", "expect", "upgrade", "proxy-connection", "http2-settings", "sec-websocket-key1"),
        "prefer",  # the request may become a job
    }
)
"""The headers that only other requests have (3)."""


class KnownHead:
    """A head that was read before and may come again with another length of the body. `before`: its bytes before the
    digits of Content-Length, or all of them if there is no body; `after`: its bytes after them.
    """

    __slots__ = ("_after", "_before")

    def __init__(self, before: bytes, after: bytes) -> None:
        self._before = before
        self._after = after

    def match(self, data: bytes) -> tuple[int, int] | None:
        """Return start and end of the body if `data` begins with this head, except for the length of the body."""
        before, after = self._before, self._after
        if not data.startswith(before):
            return None
        begin = len(before)
        if not after:
            return begin, begin
        end = data.find(b"\r\n", begin, begin + _MAX_DIGITS + 2)
        if end <= begin or not data.startswith(after, end):
            return None
        digits = data[begin:end]
        if not digits.isdigit():  # bytes.isdigit accepts only ASCII digits
            return None
        body = end + len(after)
        return body, body + int(digits)


class PlainHead(KnownHead):
    """A parsed head: method and path of the request line, and `headers` without `Content-Length`. `cors`: the CORS
    headers of answers, once the listener has admitted it; `facts`: the handler's reading, for the next request with it.
    """

    __slots__ = ("cors", "facts", "headers", "method", "path")

    def __init__(self, method: str, path: str, headers: CIMultiDict[str], before: bytes, after: bytes) -> None:
        super().__init__(before, after)
        self.method = method
        self.path = path
        self.headers = headers
        self.cors: Mapping[str, str] | None = None
        self.facts: object = None


def read_head(data: bytes, lines: Mapping[bytes, tuple[str, str]]) -> PlainHead | None:
    """Return the head at the beginning of `data`; None if it is incomplete, or must be read by aiohttp. `lines`: method
    and path by request line, with its CRLF (1).
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
    length = LENGTH.search(data, start - 2, end + 2)
    if length is None:
        return None
    del headers["Content-Length"]
    return PlainHead(method, path, headers, data[: length.start(1)], data[length.end(1) : end + 4])
