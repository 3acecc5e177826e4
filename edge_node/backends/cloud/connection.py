"""The connection to the cloud: HTTP connections to one URL, the bearer token, the health probe, and the answer's
stream.

Proxies and netrc of the environment are ignored and redirects are not followed: data leaves this device only for the
configured URL.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import ssl
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from yarl import URL

from causeway_server.router.errors import CausewayError, CloudUnreadable, Phase
from causeway_server.router.openai.upstream.decode import SSEParser, StreamDecoder, decode_answer
from causeway_server.router.serving.http_client import ConnectError, HttpClient, HttpClientError, HttpResponse
from causeway_server.router.trackers import Breaker, Ewma
from causeway_server.router.types import Chunk, Kind, Request

from ...config.schema import CloudConfig
from ...observability.logs import Fault
from ..backend import BackendRequest
from .responses import MAX_ANSWER_BYTES, MAX_ERROR_BYTES, client_error, read_body, too_large, too_slow

log = logging.getLogger(__name__)

PATHS: dict[Kind, str] = {"chat": "/chat/completions", "completion": "/completions", "embedding": "/embeddings"}
_IDLE_S = 15.0  # shorter than common servers' idle timeout, so that pooled connections are seldom closed already
_RTT_HALF_LIFE_S = 60.0
_PROBE_S = 5.0
_PROBE_BACKOFF = 4.0  # maximum pause between probes, in intervals
_END_S = 0.05  # time for the end of a body whose answer is complete
_USAGE_S = 1.0  # time after the end of every choice, for the usage and the end of the body
_BLANK = b"\xef\xbb\xbf \t\r\n"
_HEADERS = {"Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": "causeway-edge"}


class CloudHealth:
    """The cloud's health as observed by requests and probes: reachable, token accepted, circuit breaker (owned here).

    Each change is logged once, by whichever request or probe observes it first; `problems` lists the present faults.

    Args:
        url: The server's URL; only its host and port are logged.
        breaker: The circuit breaker.
        now: The clock, monotonic seconds.
        advice: The advice in the message about a refused token.
    """

    def __init__(self, url: str, breaker: Breaker, now: Callable[[], float], advice: str) -> None:
        self._name = f"The cloud at {URL(url).host}:{URL(url).port}"
        self._now = now
        self._advice = advice
        self._gone = Fault(log, logging.WARNING, now)
        self._token_refused = Fault(log, logging.ERROR, now)
        self._breaker_open = Fault(log, logging.WARNING, now)
        self._models_unavailable: dict[str, Fault] = {}
        self._refused_by_probe = False
        self.breaker = breaker
        self.reachable: bool | None = None  # None: neither a response nor a failure yet

    @property
    def token_refused(self) -> bool:
        return bool(self._token_refused.problem)

    @property
    def problems(self) -> tuple[str, ...]:
        faults = (self._gone, self._token_refused, self._breaker_open, *self._models_unavailable.values())
        return tuple(fault.problem for fault in faults if fault.problem)

    def answered(self, status: int, *, probe: bool = False) -> None:
        """Record a response, whatever its HTTP status."""
        if self.reachable is not True:
            if self.reachable is None:
                log.info("%s is reachable.", self._name)
            self.reachable = True
            self._gone.end(f"{self._name} is reachable again")
        if status == 401:
            self._refused_by_probe = probe and (self._refused_by_probe or not self.token_refused)
            self._token_refused.begin(f"{self._name} refuses the token (HTTP 401): {self._advice}")
        # A server may list its models without a token: a probe that succeeds does not test the token.
        elif self._token_refused.problem and status < 400 and (not probe or self._refused_by_probe):
            self._token_refused.end(f"{self._name} accepts the token again")

    def lost(self, error: Exception) -> None:
        """Record a failed connection attempt or a failed probe."""
        self.reachable = False
        self._gone.begin(f"{self._name} cannot be reached: {_reason(error)}")

    def model_unavailable(self, model: str, reason: str) -> None:
        """Record that the server answers, but has no backend for this model."""
        fault = self._models_unavailable.setdefault(model, Fault(log, logging.WARNING, self._now))
        fault.begin(f"{self._name} has no server for {model} ({reason}): requests go to other targets.")

    def model_answered(self, model: str) -> None:
        """Record that a request to the model succeeded."""
        if fault := self._models_unavailable.pop(model, None):
            fault.end(f"{self._name} answers for {model} again")

    def succeeded(self) -> None:
        """Record a request that the server answered."""
        self.breaker.success(self._now())
        if self._breaker_open.problem and self.breaker.state(self._now()) == "closed":
            self._breaker_open.end("The cloud's circuit breaker is closed again")

    def failed(self) -> None:
        """Record a failure that counts against the server."""
        now = self._now()
        self.breaker.failure(now)
        if self.breaker.state(now) == "open":
            self._breaker_open.begin(
                f"{self._name} failed repeatedly, and its circuit breaker is open: "
                f"requests go to other targets, the next attempt is in {self.breaker.retry_after_s(now):.0f} s."
            )


def _reason(error: Exception) -> str:
    """Return the operating system's message if there is one; the message of an exception may quote request content."""
    cause = error.cause if isinstance(error, ConnectError) and error.cause is not None else error
    if isinstance(cause, ssl.SSLError):
        return cause.reason or type(cause).__name__
    if isinstance(cause, OSError) and cause.errno is not None and cause.errno > 0:
        return os.strerror(cause.errno)
    return type(cause).__name__


class Credentials(Protocol):
    """A bearer token that changes, such as a fleet's."""

    @property
    def token(self) -> str:
        """Return the present token; "" if there is none."""
        ...

    async def renew(self, refused: str) -> bool:
        """Get another token than the one that was refused; return whether there is one now."""
        ...


class CloudConnection:
    """Sends requests to one server, and records each response in its health.

    Args:
        health: The server's health, which is updated by every response and every lost connection.
        credentials: Token source that replaces `cloud.api_key`: read for each request, and renewed once after a 401.
        now: The clock, monotonic seconds.
    """

    def __init__(
        self, config: CloudConfig, health: CloudHealth, credentials: Credentials | None, now: Callable[[], float]
    ) -> None:
        self._config = config
        self._health = health
        self._credentials = credentials
        self._url = URL(config.url)
        self._models = URL(config.url + "/models").raw_path_qs
        self._sent_token: str | None = None
        self._fields: dict[str, str] = {}  # header fields of every request, with that token
        self._now = now
        self._rtt_ms = Ewma(_RTT_HALF_LIFE_S)
        self._last_response = float("-inf")
        self._client: HttpClient | None = None
        self.tier: str | None = None  # the address that answered last

    async def start(self) -> None:
        """Prepare the client, without connecting. Raises OSError or ssl.SSLError for an unusable `cloud.ca_file`."""
        tls: ssl.SSLContext | None = None
        if self._url.scheme == "https" or self._config.ca_file:
            tls = ssl.create_default_context(cafile=self._config.ca_file or None)
            tls.set_alpn_protocols(["http/1.1"])
        self._client = HttpClient(
            str(self._url.origin()),
            tls=tls,
            limit=self._config.max_connections,
            connect_timeout_s=self._config.connect_timeout_s,
            idle_s=_IDLE_S,
        )

    async def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def rtt_ms(self, now: float) -> float | None:
        """Return the recent round-trip time of probes; None: not measured."""
        return self._rtt_ms.value(now)

    async def send(
        self,
        call: BackendRequest,
        method: str,
        target: str,
        until: float,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] = {},
        renew: bool = True,
    ) -> HttpResponse:
        """Send a request. Return a response of any status but 401 of a stale token; the caller must release it.

        Args:
            target: Path and query, encoded.
            until: Deadline of the response, monotonic seconds; its `bound` may be moved.
        """
        assert self._client is not None, "start() comes first"
        token = self._token()
        fields = {**self._fields, **_headers(call, self._now()), **headers}
        try:
            response = await self._client.request(method, target, fields, until, body)
        except HttpClientError as error:
            failure = client_error(error, call.target.name, "send")
            if failure.phase == "connect":
                self._health.lost(error)
            raise failure from error
        except TimeoutError as error:
            raise too_slow(call, "first_token") from error
        if response.status == 401 and renew and await self._renewed(token, until):
            response.release()
            return await self.send(call, method, target, until, body=body, headers=headers, renew=False)
        self._note_response(response, probe=False)
        return response

    async def command(self, method: str, target: str, headers: Mapping[str, str], *, renew: bool = True) -> int | None:
        """Send a request without a body, outside of any generation. Return its status; None if there is no response."""
        assert self._client is not None, "start() comes first"
        token, until = self._token(), asyncio.get_running_loop().time() + _PROBE_S
        try:
            response = await self._client.request(method, target, {**self._fields, **headers}, until)
        except (HttpClientError, TimeoutError):
            return None
        response.release()
        if response.status == 401 and renew and await self._renewed(token, until):
            return await self.command(method, target, headers, renew=False)
        return response.status

    def _token(self) -> str:
        """Return the present token, which `_fields` sends. A request costs one comparison."""
        token = self._config.api_key if self._credentials is None else self._credentials.token
        if token != self._sent_token:
            self._fields = _HEADERS | _authorization(token, self._url)
            self._sent_token = token
        return token

    async def _renewed(self, refused: str, until: float) -> bool:
        """Return whether there is another token than the refused one, no later than `until` (the loop's clock, s)."""
        if self._credentials is None:
            return False
        try:
            async with asyncio.timeout_at(until):
                return await self._credentials.renew(refused)
        except TimeoutError:
            return False

    def _note_response(self, response: HttpResponse, *, probe: bool) -> None:
        self._health.answered(response.status, probe=probe)
        self._last_response = self._now()
        self.tier = response.header(b"x-causeway-tier") or self.tier

    # --- the probe ---------------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Probe the server forever, except while its responses show that it is reachable."""
        interval_s = pause_s = self._config.probe_interval_s
        while True:
            quiet = self._now() - self._last_response >= interval_s
            if quiet or self._rtt_ms.value(self._now()) is None:
                await self.probe()
            pause_s = interval_s if self._health.reachable else min(interval_s * _PROBE_BACKOFF, pause_s * 2.0)
            await asyncio.sleep(pause_s)

    async def probe(self) -> bool:
        """Return whether the server answers, with any HTTP status. Updates `reachable` and `rtt_ms`."""
        assert self._client is not None, "start() comes first"
        started, token, until = self._now(), self._token(), asyncio.get_running_loop().time() + _PROBE_S
        try:
            response = await self._client.request("GET", self._models, self._fields, until)
            try:
                if response.status == 401 and await self._renewed(token, until):
                    return await self.probe()
                self._note_response(response, probe=True)
                self._rtt_ms.add((self._now() - started) * 1000.0, self._now())
                await read_body(response, MAX_ERROR_BYTES)
            finally:
                response.release()
        except (HttpClientError, TimeoutError) as error:
            self._health.lost(error)
        return self._health.reachable is True


def _authorization(token: str, url: URL) -> dict[str, str]:
    """Return the header with the token, else with the user in the URL, if there is one."""
    if token:
        return {"Authorization": f"Bearer {token}"}
    if url.user is None:
        return {}
    pair = f"{url.user}:{url.password or ''}".encode("latin-1")
    return {"Authorization": f"Basic {base64.b64encode(pair).decode()}"}


def _headers(call: BackendRequest, now: float) -> dict[str, str]:
    left_ms = max(1, int((call.deadline - now) * 1000.0))
    headers = {
        "Content-Type": "application/json",
        "x-request-id": call.id,
        "x-causeway-deadline-ms": str(left_ms),
        "x-causeway-priority": _priority(call.request),
    }
    if call.traceparent:
        headers["traceparent"] = call.traceparent
    if not call.cacheable:
        headers["Cache-Control"] = "no-store"
    if call.policy:
        headers["x-causeway-policy"] = call.policy
    return headers


def _priority(request: Request) -> str:
    """Return the `priority` header: incremental for a streamed answer, low urgency for the tag `bulk`."""
    if "bulk" in request.hints.tags:
        return "bulk"
    return "interactive" if request.stream else "standard"


# --- the stream of an answer ---------------------------------------------------------------------------------------


class StreamReader:
    """Reads a streamed answer: server-sent events → chunks.

    Args:
        until: Deadline of the first chunk, monotonic seconds; the request's deadline is that of the rest.
    """

    def __init__(self, response: HttpResponse, call: BackendRequest, until: float) -> None:
        response.bound(until)
        response.listener = None if call.relay is None else self
        self._response = response
        self._relay = call.relay
        self._call = call
        self._parser = SSEParser()
        self._decoder = StreamDecoder(call.id, call.request.sequences)
        self._document: list[bytes] | None = None  # pieces of an answer that is JSON although a stream was requested
        self._size_bytes = 0
        self._has_events = False
        self._phase: Phase = "first_token"
        self._error: CausewayError | None = None

    async def next(self) -> Sequence[Chunk]:
        """Return the next chunks; none after the last.

        Raises:
            CloudTimeout, StreamBroken: The answer is late, or stops before its end.
            CloudUnreadable, CloudFailed: The bytes are not an answer, or report an error.
        """
        if self._error is not None:
            raise self._error
        while not self._decoder.done:
            data = await self._read()
            if data:
                if chunks := self._take(data):
                    return chunks
            elif self._document is None:
                if self._size_bytes and not self._has_events:
                    raise CloudUnreadable(f"{self._call.target.name}'s stream has no events.")
                return self._decoder.finish()
            else:
                self._decoder.done = True
                return decode_answer(b"".join(self._document), self._call.id)
        return ()

    def arrived(self) -> bool:
        """Offer an event of text alone to the relay (`BodyListener`); return whether it took the event."""
        if self._relay is None or self._phase != "stream" or self._document is not None or not self._parser.idle:
            return False
        data = self._response.peek()
        if self._size_bytes + len(data) > MAX_ANSWER_BYTES:
            return False
        texts, index = self._decoder.feed_texts(data)
        if not texts or not self._relay.take(texts, index):
            return False
        self._size_bytes += len(data)
        self._response.take()
        return True

    async def _read(self) -> bytes:
        """Return the next bytes; none at the end, or if only the end of the body is missing."""
        try:
            data = await self._response.read()
        except (TimeoutError, HttpClientError) as error:
            if self._decoder.whole:
                return b""
            if isinstance(error, TimeoutError):
                raise too_slow(self._call, self._phase) from error
            raise client_error(error, self._call.target.name, "stream") from error
        if not self._size_bytes and data.lstrip(_BLANK)[:1] == b"{":  # no event begins like this
            self._document = []
        self._size_bytes += len(data)
        if self._size_bytes > MAX_ANSWER_BYTES:
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
        """Release the response: the connection can be reused if only the end of the body is missing."""
        self._response.listener = None
        self._response.release(_END_S if self._decoder.done else 0.0)
