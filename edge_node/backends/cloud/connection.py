"""The way to the cloud: HTTP connections to one URL, the bearer token, and the probe that tells whether it answers; and
back: the stream of an answer.

A request is sent again only where a pooled connection ended before anything of an answer came: the server closed it
for idleness just as it was reused. A new connection that is closed without an answer may have delivered the request.

Proxies and netrc of the environment are ignored and redirects are not followed: data leaves this device only for the
configured URL.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

import aiohttp
import anyio
from yarl import URL

from causeway_server.router.errors import CausewayError, CloudUnreadable, Phase
from causeway_server.router.openai.upstream.decode import SSEParser, StreamDecoder, decode_answer
from causeway_server.router.trackers import Breaker, Ewma
from causeway_server.router.types import Chunk, Kind, Request

from ...config.schema import CloudConfig
from ...observability.logs import Fault
from ..backend import BackendRequest
from .responses import MAX_ANSWER_BYTES, MAX_ERROR_BYTES, client_error, read_body, too_large, too_slow

if TYPE_CHECKING:
    from aiohttp.client_proto import ResponseHandler
    from aiohttp.tracing import Trace

log = logging.getLogger(__name__)

PATHS: dict[Kind, str] = {"chat": "/chat/completions", "completion": "/completions", "embedding": "/embeddings"}
_IDLE_S = 15.0  # shorter than common servers' idle timeout, so that few pooled connections are closed already
_RTT_HALF_LIFE_S = 60.0
_PROBE_S = 5.0
_PROBE_BACKOFF = 4.0  # the longest pause between probes, in intervals
_END_S = 0.05  # for the end of a body whose answer is complete
_USAGE_S = 1.0  # after the end of every choice, for the usage and the end of the body
_BLANK = b"\xef\xbb\xbf \t\r\n"
_SENDING: ContextVar[_Sending] = ContextVar("sending")


class CloudHealth:
    """The cloud's health as requests and probes notice it: reachable, token accepted, circuit breaker, which it owns.

    Each change is logged once, whichever request or probe notices it first; `problems` lists what is wrong now.

    Args:
        url: of the server; only its host and port are logged.
        breaker: the circuit breaker.
        now: the clock, monotonic seconds.
        advice: the advice in the message about a refused token.
    """

    def __init__(self, url: str, breaker: Breaker, now: Callable[[], float], advice: str) -> None:
        self._name = f"the cloud at {URL(url).host}:{URL(url).port}"
        self._now = now
        self._advice = advice
        self._gone = Fault(log, logging.WARNING, now)
        self._token_refused = Fault(log, logging.ERROR, now)
        self._breaker_open = Fault(log, logging.WARNING, now)
        self._models_unavailable: dict[str, Fault] = {}
        self._refused_by_probe = False
        self.breaker = breaker
        self.reachable: bool | None = None  # None: neither answered nor failed yet

    @property
    def token_refused(self) -> bool:
        return bool(self._token_refused.problem)

    @property
    def problems(self) -> tuple[str, ...]:
        faults = (self._gone, self._token_refused, self._breaker_open, *self._models_unavailable.values())
        return tuple(fault.problem for fault in faults if fault.problem)

    def answered(self, status: int, *, probe: bool = False) -> None:
        """Note a response, whatever its HTTP status."""
        if self.reachable is not True:
            if self.reachable is None:
                log.info("%s is reachable", self._name)
            self.reachable = True
            self._gone.end(f"{self._name} is reachable again")
        if status == 401:
            self._refused_by_probe = probe and (self._refused_by_probe or not self.token_refused)
            self._token_refused.begin(f"{self._name} refuses the token (HTTP 401): {self._advice}")
        # A server may list its models without a token: a probe that succeeds proves nothing about requests.
        elif self._token_refused.problem and status < 400 and (not probe or self._refused_by_probe):
            self._token_refused.end(f"{self._name} accepts the token again")

    def lost(self, error: Exception) -> None:
        """Note that no connection could be made, or that the probe failed."""
        self.reachable = False
        self._gone.begin(f"{self._name} cannot be reached: {_reason(error)}")

    def model_unavailable(self, model: str, reason: str) -> None:
        """Note that the server answers, and that nothing behind it can for this model."""
        fault = self._models_unavailable.setdefault(model, Fault(log, logging.WARNING, self._now))
        fault.begin(f"{self._name} has no server for {model} ({reason}): requests go to other targets")

    def model_answered(self, model: str) -> None:
        """Note that a call of the model succeeded."""
        if fault := self._models_unavailable.pop(model, None):
            fault.end(f"{self._name} answers for {model} again")

    def succeeded(self) -> None:
        """Report a call that the server answered."""
        self.breaker.success(self._now())
        if self._breaker_open.problem and self.breaker.state(self._now()) == "closed":
            self._breaker_open.end("the cloud's circuit breaker is closed again")

    def failed(self) -> None:
        """Report a call that counts against the server."""
        now = self._now()
        self.breaker.failure(now)
        if self.breaker.state(now) == "open":
            self._breaker_open.begin(
                f"{self._name} failed repeatedly, its circuit breaker is open: "
                f"requests go to other targets, the next try is in {self.breaker.retry_after_s(now):.0f} s"
            )


def _reason(error: Exception) -> str:
    """The system's words for it if there are any; the message of an exception may quote anything."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, OSError) and cause.errno is not None and cause.errno > 0:
        return os.strerror(cause.errno)
    return type(error).__name__


class Credentials(Protocol):
    """A bearer token that changes, such as a fleet's."""

    @property
    def token(self) -> str:
        """The token now; "" while there is none."""
        ...

    async def renew(self, refused: str) -> bool:
        """Get another token than the one that was refused; return whether there is one now."""
        ...


class CloudConnection:
    """Sends requests to one server, and notes what each response tells about it.

    Args:
        health: Told of every response and of every lost connection.
        credentials: Take the place of `cloud.api_key`: read at each request, and renewed once for a 401.
        now: The clock, monotonic seconds.
    """

    def __init__(
        self, config: CloudConfig, health: CloudHealth, credentials: Credentials | None, now: Callable[[], float]
    ) -> None:
        self._config = config
        self._health = health
        self._credentials = credentials
        self._sent_token = ""
        self._now = now
        self._rtt_ms = Ewma(_RTT_HALF_LIFE_S)
        self._last_response = float("-inf")
        self._session: aiohttp.ClientSession | None = None
        self.tier: str | None = None  # that answered last

    async def start(self) -> None:
        """Prepare the session, without connecting. Raises OSError or ssl.SSLError for an unusable `cloud.ca_file`."""
        verify: ssl.SSLContext | bool = True
        if self._config.ca_file:
            verify = ssl.create_default_context(cafile=self._config.ca_file)
        connector = _NotingConnector(limit=self._config.max_connections, keepalive_timeout=_IDLE_S, ssl=verify)
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers={"Accept-Encoding": "identity", "User-Agent": "causeway-edge"},
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._config.connect_timeout_s),
            trust_env=False,
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def rtt_ms(self, now: float) -> float | None:
        """Return the recent round-trip time of probes; None: not measured."""
        return self._rtt_ms.value(now)

    async def send(
        self,
        call: BackendRequest,
        method: str,
        url: URL,
        until: float,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] = {},
        renew: bool = True,
    ) -> aiohttp.ClientResponse:
        """Send a request. Returns a response of any status but 401 of a stale token; the caller must release it."""
        again = functools.partial(self.send, call, method, url, until, body=body, headers=headers)
        assert self._session is not None, "start() comes first"
        token, sending = self._put_token(self._session), _Sending()
        _SENDING.set(sending)
        try:
            async with asyncio.timeout_at(until):
                response = await self._session.request(
                    method, url, data=body, headers={**_headers(call, self._now()), **headers}, allow_redirects=False
                )
        except aiohttp.ClientError as error:
            if not sending.is_new and _was_idle(error):
                return await again(renew=renew)  # ends with a new connection: each try takes one from the pool
            failure = client_error(error, call.target.name, "send")
            if failure.phase == "connect":
                self._health.lost(error)
            raise failure from error
        except TimeoutError as error:
            raise too_slow(call, "first_token") from error
        except OSError as error:
            raise client_error(error, call.target.name, "send") from error
        if response.status == 401 and renew and await self._renewed(token, until):
            response.release()
            return await again(renew=False)
        self._note_response(response, probe=False)
        return response

    async def command(self, method: str, url: URL, headers: Mapping[str, str], *, renew: bool = True) -> int | None:
        """Send a request without a body, outside of any generation. Return its status; None: there is no answer."""
        assert self._session is not None, "start() comes first"
        token, until = self._put_token(self._session), asyncio.get_running_loop().time() + _PROBE_S
        try:
            async with (
                asyncio.timeout_at(until),
                self._session.request(method, url, headers=headers, allow_redirects=False) as response,
            ):
                status = response.status
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None
        if status == 401 and renew and await self._renewed(token, until):
            return await self.command(method, url, headers, renew=False)
        return status

    def _put_token(self, session: aiohttp.ClientSession) -> str:
        """Make the session send the token of this moment, and return it. A request costs one comparison."""
        token = self._config.api_key if self._credentials is None else self._credentials.token
        if token != self._sent_token:
            session.headers.pop("Authorization", None)
            if token:
                session.headers["Authorization"] = f"Bearer {token}"
            self._sent_token = token
        return token

    async def _renewed(self, refused: str, until: float) -> bool:
        """Return whether there is another token than the refused one, `until` (the loop's clock, s) at the latest."""
        if self._credentials is None:
            return False
        try:
            async with asyncio.timeout_at(until):
                return await self._credentials.renew(refused)
        except TimeoutError:
            return False

    def _note_response(self, response: aiohttp.ClientResponse, *, probe: bool) -> None:
        self._health.answered(response.status, probe=probe)
        self._last_response = self._now()
        self.tier = response.headers.get("x-causeway-tier", self.tier)

    # --- the probe ---------------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Probe the server forever, except while its answers show that it is reachable."""
        interval_s = pause_s = self._config.probe_interval_s
        while True:
            quiet = self._now() - self._last_response >= interval_s
            if quiet or self._rtt_ms.value(self._now()) is None:
                await self.probe()
            pause_s = interval_s if self._health.reachable else min(interval_s * _PROBE_BACKOFF, pause_s * 2.0)
            await asyncio.sleep(pause_s)

    async def probe(self) -> bool:
        """Whether the server answers, with any HTTP status. Updates `reachable` and `rtt_ms`."""
        assert self._session is not None, "start() comes first"
        started, token = self._now(), self._put_token(self._session)
        try:
            with anyio.fail_after(_PROBE_S):
                async with self._session.get(self._config.url + "/models", allow_redirects=False) as response:
                    if response.status == 401 and await self._renewed(token, started + _PROBE_S):
                        return await self.probe()
                    self._note_response(response, probe=True)
                    self._rtt_ms.add((self._now() - started) * 1000.0, self._now())
                    await read_body(response, MAX_ERROR_BYTES)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self._health.lost(error)
        return self._health.reachable is True


class _Sending:
    """What the connector tells of one request. `is_new`: its connection was opened for it, or failed to be."""

    def __init__(self) -> None:
        self.is_new = False


class _NotingConnector(aiohttp.TCPConnector):
    """Notes whether a request opens a connection. aiohttp's own traces tell it for 20 µs a request."""

    async def _create_connection(
        self, req: aiohttp.ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> ResponseHandler:
        if (sending := _SENDING.get(None)) is not None:
            sending.is_new = True
        return await super()._create_connection(req, traces, timeout)


def _was_idle(error: aiohttp.ClientError) -> bool:
    """Whether a connection was closed or reset before anything was read from it."""
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return isinstance(error.message, str)  # else the part of a head that came
    return isinstance(error, aiohttp.ClientOSError | aiohttp.ClientConnectionResetError)


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
    """A streamed answer is read as it arrives; the tag `bulk` marks work that can wait."""
    if "bulk" in request.hints.tags:
        return "bulk"
    return "interactive" if request.stream else "standard"


# --- the stream of an answer ---------------------------------------------------------------------------------------


class StreamReader:
    """Reads a streamed answer: server-sent events → chunks.

    Args:
        until: deadline of the first chunk, monotonic seconds; the call's deadline is that of the rest.
    """

    def __init__(self, response: aiohttp.ClientResponse, call: BackendRequest, until: float) -> None:
        self._content = response.content
        self._call = call
        self._parser = SSEParser()
        self._decoder = StreamDecoder(call.id, call.request.sequences)
        self._document: list[bytes] | None = None  # pieces of an answer that is JSON in spite of the request
        self._timer = _StreamTimer(response.content, until)
        self._size_bytes = 0
        self._has_events = False
        self._phase: Phase = "first_token"
        self._error: CausewayError | None = None

    async def next(self) -> Sequence[Chunk]:
        """Return the chunks that arrive next, none after the last.

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
                    raise CloudUnreadable(f"{self._call.target.name}'s stream has no events")
                return self._decoder.finish()
            else:
                self._decoder.done = True
                return decode_answer(b"".join(self._document), self._call.id)
        return ()

    async def _read(self) -> bytes:
        """Return the bytes that arrive next; none at the end, and where nothing but the end is missing."""
        try:
            data = await self._content.readany()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            if self._decoder.whole:
                return b""
            if isinstance(error, TimeoutError):
                raise too_slow(self._call, self._phase) from error
            raise client_error(error, self._call.target.name, "stream") from error
        if not self._size_bytes and data.lstrip(_BLANK)[:1] == b"{":  # no event begins so
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
            self._timer.move(min(self._call.deadline, asyncio.get_running_loop().time() + _USAGE_S))
        elif chunks and self._phase == "first_token":
            self._phase = "stream"
            self._timer.move(self._call.deadline)
        return chunks

    def _decode(self, data: bytes) -> list[Chunk]:
        """The chunks of all events that `data` completes. The next call raises an error that comes after chunks."""
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

    async def read_end(self) -> None:
        """Read the end of the body, so that the connection can be reused."""
        self._timer.cancel()
        if self._content.at_eof():
            return
        with contextlib.suppress(TimeoutError, aiohttp.ClientError):
            async with asyncio.timeout(_END_S):
                await self._content.readany()

    def close(self) -> None:
        self._timer.cancel()


class _StreamTimer:
    """Fails the reads of a body from a moment on: one timer per stream, as one per read costs more than the read."""

    def __init__(self, content: aiohttp.StreamReader, until: float) -> None:
        self._content = content
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_at(until, self._expire)

    def move(self, until: float) -> None:
        self._timer.cancel()
        self._timer = self._loop.call_at(until, self._expire)

    def cancel(self) -> None:
        self._timer.cancel()

    def _expire(self) -> None:
        self._content.set_exception(TimeoutError())
