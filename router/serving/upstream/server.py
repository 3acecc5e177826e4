"""An OpenAI-compatible server: connections to one base URL, its bearer key, requests and streamed answers.

Proxies and netrc of the environment are ignored and redirects are not followed: data goes only to the configured URL.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import math
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
from yarl import URL

from ...errors import CausewayError, CloudUnprocessable, CloudUnreadable, InvalidRequest, Phase
from ...openai.upstream.decode import EventTemplate, SSEParser, StreamDecoder, decode_answer
from ...openai.upstream.wire import encode_request, exchange_model
from ...types import Chunk, Kind, Request
from ..http_client import HttpClient, HttpClientError, HttpResponse, field_lines
from ..tls.contexts import TlsContext, TlsFiles, client_tls
from .responses import MAX_ANSWER_BYTES, TextRelay, UpstreamCall, client_error, read_error, too_large, too_slow

log = logging.getLogger(__name__)

PATHS: dict[Kind, str] = {"chat": "/chat/completions", "completion": "/completions", "embedding": "/embeddings"}
_IDLE_S = 15.0  # shorter than common servers' idle timeout, so that pooled connections are seldom closed already
_END_S = 0.05  # time for the end of a body whose answer is complete
_USAGE_S = 1.0  # time after the end of every choice, for the usage and the end of the body
_BLANK = b"\xef\xbb\xbf \t\r\n"
_STREAM_OPTIONS = "stream_options"


class Credentials(Protocol):
    """A bearer token, which may change, such as a fleet's."""

    @property
    def token(self) -> str:
        """Return the present token; "" if there is none."""
        ...

    @property
    def certificate_file(self) -> str:
        """Return the PEM file of the certificate that belongs to the token, with its key; "" for none."""
        ...

    async def renew(self, refused: str) -> bool:
        """Get another token than the one that was refused; return whether there is one now."""
        ...


class FixedToken(msgspec.Struct, frozen=True):
    """A bearer token that never changes (`Credentials`). `token`: "" for none."""

    token: str = ""
    certificate_file: str = ""

    async def renew(self, refused: str) -> bool:
        return False


class KeyFile:
    """A bearer token in a file of one line, read again when that changes; it stays if it is unreadable."""

    certificate_file = ""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises OSError, or ValueError if there is no token in it."""
        self._path = path
        self._stamp = self._stat()
        self._token = self._read()

    @property
    def token(self) -> str:
        try:
            stamp = self._stat()
            if stamp != self._stamp:
                self._stamp = stamp
                self._token = self._read()
        except (OSError, ValueError) as error:
            log.warning(
                "%s cannot be read (%s), so the token that was read before stays in use.",
                self._path,
                type(error).__name__,
            )
        return self._token

    async def renew(self, refused: str) -> bool:
        """Return whether the file now has another token."""
        return self.token != refused

    def _stat(self) -> tuple[int, int, int]:
        stat = self._path.stat()
        return stat.st_mtime_ns, stat.st_size, stat.st_ino

    def _read(self) -> str:
        token = self._path.read_text(encoding="ascii").strip()
        if not token or len(token.split()) != 1:
            raise ValueError("The file must contain exactly one token.")
        return token


class ServerObserver(Protocol):
    """A receiver of each response and each lost connection of a server."""

    def answered(self, response: HttpResponse) -> None:
        """Record a response, whatever its status."""
        ...

    def lost(self, error: Exception) -> None:
        """Record a failed connection attempt."""
        ...


class LinesOf(Protocol):
    """Returns the header lines of a request that is about to be sent with this body."""

    def __call__(self, body: bytes, /) -> str: ...


HeaderLines = str | LinesOf
"""Header lines of a request (`field_lines`), or what returns them each time it is sent."""


class ServerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Base URL of a server, such as `https://HOST/v1`, and settings of the connections to it."""

    url: str
    tls: TlsFiles  # for `https`
    max_connections: int
    connect_timeout_s: float
    user_agent: str


class OpenAIServer:
    """Sends requests to one server: its base URL and the settings of the connections. Call `start` first, and `close`
    when done. `credentials`: read for each request, and renewed once after a 401.
    """

    def __init__(self, address: ServerAddress, credentials: Credentials, observer: ServerObserver) -> None:
        self._address = address
        self._credentials = credentials
        self._observer = observer
        self._url = URL(address.url)
        self._paths = {kind: URL(address.url + path).raw_path_qs for kind, path in PATHS.items()}
        self._sent_token: str | None = None
        self._lines = ""  # header lines of every request, with that token
        self._asks_usage = True  # until the server refuses `stream_options`
        self._client: HttpClient | None = None
        self._tls: TlsContext | None = None

    def start(self) -> None:
        """Prepare a new client without connecting. Raise ConfigError if a file of `tls` cannot be used."""
        if self._tls is None and (self._url.scheme == "https" or self._address.tls.paths):
            self._tls = client_tls(self._address.tls)
        self._client = HttpClient(
            str(self._url.origin()),
            tls=self._tls,
            limit=self._address.max_connections,
            connect_timeout_s=self._address.connect_timeout_s,
            idle_s=_IDLE_S,
        )

    async def close(self) -> None:
        if self._client is not None:
            self._client.close()

    @property
    def is_ready(self) -> bool:
        """Whether a connection is idle."""
        return self._client is not None and self._client.is_ready

    def begin(self, kind: Kind, body: bytes, until: float, lines: HeaderLines) -> HttpResponse | None:
        """Send a request of this kind on an idle connection. Returns its response, whose head is yet to arrive, for
        `post` or for callbacks; None if there is no such connection.
        """
        assert self._client is not None, "start() comes first"
        lines = lines if isinstance(lines, str) else lines(body)
        response = self._client.begin("POST", self._paths[kind], self._token_lines() + lines, until, body)
        if response is not None:
            response.lines = lines
        return response

    def begin_request(
        self, request: Request, model: str, until: float, lines: HeaderLines, encoded: bytes = b""
    ) -> HttpResponse | None:
        """Send a request as `begin` does, for `post`, `post_stream` or callbacks. `encoded`: the `TextChat`'s body."""
        if encoded:
            body = exchange_model(encoded, request, model, ask_usage=self._asks_usage)
        else:
            body = encode_request(request, model, ask_usage=self._asks_usage)
        return self.begin(request.kind, body, until, lines)

    async def request(
        self, method: str, target: str, until: float, *, body: bytes | None = None, lines: str = ""
    ) -> HttpResponse:
        """Send a request. Return a response of any status but 401 of a stale token; the caller must release it.
        `target`: path and query, encoded; `until`: its deadline, the loop's clock, while `bound` is not moved; `lines`:
        further headers (`field_lines`). Raises HttpClientError or TimeoutError.
        """
        response = await self._sent(method, target, until, body, lines)
        if response.status == 401 and await self._renewed(self._sent_token, until):
            response.release()
            return await self._sent(method, target, until, body, lines)
        return response

    def _sent(
        self,
        method: str,
        target: str,
        until: float,
        body: bytes | None,
        lines: HeaderLines,
        begun: HttpResponse | None = None,
    ) -> Coroutine[None, None, HttpResponse]:
        assert self._client is not None, "start() comes first"
        if not isinstance(lines, str):
            lines = lines(body or b"") if begun is None else begun.lines
        return self._client.request(method, target, self._token_lines() + lines, until, body, begun)

    def _token_lines(self) -> str:
        token = self._credentials.token
        if token != self._sent_token:
            self._lines = self._common_lines(token)
            self._sent_token = token
        return self._lines

    async def send(
        self,
        call: UpstreamCall,
        method: str,
        target: str,
        until: float,
        *,
        body: bytes | None = None,
        lines: HeaderLines = "",
        begun: HttpResponse | None = None,
    ) -> HttpResponse:
        """Send like `request`, and tell the observer. Raises BackendError. `begun`: the response of `begin`."""
        try:
            response = await self._sent(method, target, until, body, lines, begun)
            if response.status == 401 and await self._renewed(self._sent_token, until):
                response.release()
                response = await self._sent(method, target, until, body, lines)
        except HttpClientError as error:
            failure = client_error(error, call.name, "send")
            if failure.phase == "connect":
                self._observer.lost(error)
            raise failure from error
        except TimeoutError as error:
            raise too_slow(call, "first_token") from error
        self._observer.answered(response)
        return response

    async def post(
        self,
        call: UpstreamCall,
        kind: Kind,
        body: bytes,
        until: float,
        lines: HeaderLines = "",
        begun: HttpResponse | None = None,
    ) -> HttpResponse:
        """Send a request of this kind, unless `begin` has `begun` it. Return a response with status 200, its body
        unread; the caller must release it. Raises BackendError or InvalidRequest (`responses`).
        """
        response = await self.send(call, "POST", self._paths[kind], until, body=body, lines=lines, begun=begun)
        if response.status != 200:
            raise await read_error(response, call, until)
        return response

    async def post_stream(
        self,
        call: UpstreamCall,
        request: Request,
        model: str,
        until: float,
        lines: HeaderLines = "",
        begun: HttpResponse | None = None,
    ) -> HttpResponse:
        """Send the request for a stream; after a refusal of `stream_options` it is sent without them. See `post`."""
        if self._asks_usage or begun is not None:
            try:
                body = encode_request(request, model, stream=True, ask_usage=self._asks_usage)
                return await self.post(call, request.kind, body, until, lines, begun)
            except (InvalidRequest, CloudUnprocessable) as error:
                if _STREAM_OPTIONS not in f"{error.param} {error.message}":
                    raise
                log.info(
                    "%s does not support stream_options, so this server counts the tokens of its streams.", call.name
                )
                self._asks_usage = False
        body = encode_request(request, model, stream=True, ask_usage=False)
        return await self.post(call, request.kind, body, until, lines)

    def _common_lines(self, token: str) -> str:
        """Return the header lines of every request, with the token, else with the user in the URL, if there is one."""
        fields = {"Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": self._address.user_agent}
        if token:
            fields["Authorization"] = f"Bearer {token}"
        elif self._url.user is not None:
            pair = f"{self._url.user}:{self._url.password or ''}".encode("latin-1")
            fields["Authorization"] = f"Basic {base64.b64encode(pair).decode()}"
        return field_lines(fields)

    async def _renewed(self, refused: str | None, until: float) -> bool:
        """Return whether there is another token than the refused one, no later than `until` (the loop's clock, s)."""
        try:
            async with asyncio.timeout_at(until):
                return await self._credentials.renew(refused or "")
        except TimeoutError:
            return False


class StreamReader:
    """Reads a streamed answer: server-sent events → chunks. `until`: deadline of the first chunk, monotonic seconds;
    that of the rest is the request's; `pause_s`: maximum time between two pieces of the rest.
    """

    def __init__(self, response: HttpResponse, call: UpstreamCall, until: float, *, pause_s: float = math.inf) -> None:
        response.bound(until)
        response.listener = None if call.relay is None else self
        self._response = response
        self._pause_s = pause_s
        self._relay = call.relay
        self._call = call
        self._parser = SSEParser()
        self._decoder = StreamDecoder(call.id, call.sequences)
        self._template: EventTemplate | None = None  # of the events that the relay may take while the task waits
        self._document: list[bytes] | None = None  # pieces of an answer that is JSON although a stream was requested
        self.left_bytes = MAX_ANSWER_BYTES
        """The number of bytes that the answer may still have."""
        self._has_events = False
        self._phase: Phase = "first_token"
        self._error: Exception | None = None

    async def next(self) -> Sequence[Chunk]:
        """Return the next chunks; none after the last. Raises CloudTimeout; StreamBroken if the answer stops before its
        end; CloudUnreadable, CloudFailed if the bytes are not an answer, or report an error.
        """
        if self._error is not None:
            raise self._error
        while not self._decoder.done:
            data = await self._read()
            if data:
                if chunks := self._take(data):
                    return chunks
            elif self._document is None:
                if self.left_bytes < MAX_ANSWER_BYTES and not self._has_events:
                    raise CloudUnreadable(f"{self._call.name}'s stream has no events.")
                return self._decoder.finish()
            else:
                self._decoder.done = True
                return decode_answer(b"".join(self._document), self._call.id)
        return ()

    @property
    def done(self) -> bool:
        """Whether the answer has its end."""
        return self._decoder.done

    @property
    def text_template(self) -> EventTemplate | None:
        """The template of the events that need not be decoded now; None if all must be."""
        return self._template

    @property
    def is_usual(self) -> bool:
        """Whether `feed` may be called again: the answer is a stream, and has shown no error."""
        return self._error is None and self._document is None

    def fail(self, error: Exception) -> None:
        """Let `next` raise an error."""
        self._error = error

    def feed(self) -> Sequence[Chunk]:
        """Return the chunks of the bytes that have arrived, without waiting. `next` goes on, and raises the error that
        the bytes have shown, if any.
        """
        chunks: Sequence[Chunk] = ()
        try:
            if data := self._counted(self._response.take()):
                chunks = self._take(data)
        except CausewayError as error:
            self._error = error
        self._expect()
        return chunks

    def arrived(self) -> bool:
        """Offer events of text alone to the relay (`BodyListener`); return whether it took them."""
        template, relay = self._template, self._relay
        if template is None or relay is None:
            return False
        texts = self._texts(template)
        if not texts or not relay.take(texts, template.index):
            return False
        self.left_bytes -= len(self._response.take())
        return True

    def take_texts(self) -> list[bytes]:
        """Take the bytes that have arrived, if they are events of text alone, and return the texts as JSON strings."""
        texts = [] if self._template is None or self._response.complete else self._texts(self._template)
        if texts:
            self.left_bytes -= len(self._response.take())
        return texts

    def _texts(self, template: EventTemplate) -> list[bytes]:
        data = self._response.peek()
        return template.texts(data) if len(data) <= self.left_bytes else []

    def relay_to(self, relay: TextRelay) -> None:
        """Let a task go on, with this relay."""
        self._relay, self._response.listener = relay, self

    async def _read(self) -> bytes:
        """Return the next bytes; none at the end, or if only the end of the body is missing."""
        self._expect()
        try:
            data = await self._response.read()
        except (TimeoutError, HttpClientError) as error:
            if self._decoder.whole:
                return b""
            if isinstance(error, TimeoutError):
                raise too_slow(self._call, self._phase) from error
            raise client_error(error, self._call.name, "stream") from error
        return self._counted(data)

    def _expect(self) -> None:
        """Bound the wait for what arrives next, and let text be taken without its being decoded, where it may."""
        if self._pause_s < math.inf and self._phase == "stream" and not self._decoder.whole:
            self._response.bound(min(self._call.deadline, asyncio.get_running_loop().time() + self._pause_s))
        relays = self._phase == "stream" and self._document is None and self._parser.idle
        self._template = self._decoder.text_template if relays else None

    def _counted(self, data: bytes) -> bytes:
        """Return bytes of the answer. Raises CloudUnreadable for too many of them."""
        if self.left_bytes == MAX_ANSWER_BYTES and data.lstrip(_BLANK)[:1] == b"{":  # no event begins like this
            self._document = []
        self.left_bytes -= len(data)
        if self.left_bytes < 0:
            raise too_large(self._call)
        return data

    def _take(self, data: bytes) -> Sequence[Chunk]:
        if self._document is not None:
            self._document.append(data)
            return ()
        if self._parser.idle and (text := self._decoder.feed_text(data)) is not None:
            return (text,)
        chunks = self._decode(data)
        if self._decoder.whole:
            self._response.bound(min(self._call.deadline, asyncio.get_running_loop().time() + _USAGE_S))
        elif chunks and self._phase == "first_token":
            self._phase = "stream"
            self._response.bound(self._call.deadline)
        return chunks

    def _decode(self, data: bytes) -> list[Chunk]:
        """Return the chunks of all events that `data` completes. An error after chunks is raised by the next call."""
        chunks: list[Chunk] = []
        try:
            for event in self._parser.feed(data):
                self._has_events = True
                chunks += self._decoder.feed(event.data)
        except CausewayError as error:
            if not chunks:
                raise
            self._error = error
        return chunks

    def close(self) -> None:
        """Release the response: the connection can be reused if only the end of the body is missing, and not after a
        body without the answer's end.
        """
        self._response.listener = None
        if self._decoder.done:
            self._response.release(_END_S)
        else:
            self._response.discard()
