"""The cloud's side of the seam: any OpenAI-compatible server behind one URL.

An answer is streamed from it when the client streams, or when its first tokens may have to be held back; else it is
fetched whole. Time is bounded by phase: connect, first token, all of it. A breaker keeps a server that fails out of the
way, and a probe finds out when it is back. A server that answers, and says that nothing behind it can for so long, is
well as far as the breaker goes: for that model it is not asked again before the time that it named. Nothing is taken
from the environment (proxies, netrc), redirects are not followed: what leaves this box goes where the configuration
says.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import aiohttp
import anyio
import msgspec
from yarl import URL

from router.decision.breaker import Breaker
from router.decision.continue_token import join_token, split_token
from router.decision.latency import Ewma
from router.errors import (
    BreakerOpen,
    CausewayError,
    CloudRejected,
    CloudSaturated,
    CloudTimeout,
    CloudUnavailable,
    InvalidRequest,
)
from router.openai import decode_answer, decode_embeddings, encode_request
from router.types import Chunk, CloudSignals, Embeddings, Kind, Request

from ...config.schema import CloudConfig
from ..backend import BackendRequest
from .error_mapping import client_error
from .response_reader import MAX_ERROR_BYTES, read_body, read_refusal, read_stream, read_whole, too_slow

log = logging.getLogger(__name__)

_PATHS: dict[Kind, str] = {"chat": "/chat/completions", "completion": "/completions", "embedding": "/embeddings"}
_IDLE_S = 15.0  # shorter than common servers keep a silent connection: the pool has few that are closed already
_RTT_HALF_LIFE_S = 60.0
_PROBE_S = 5.0
_PROBE_BACKOFF = 4.0  # the longest pause between probes, in intervals
_TIMER_STEP_S = 0.005  # timers may fire this much early
_LONGEST_AWAY_S = 60.0  # whatever a server says
# Neither of these says that the server is ill.
_ANSWERED = (InvalidRequest, CloudRejected)


class CloudBackend:
    """One server, its connections, its breaker, and what is known of the way to it."""

    def __init__(self, config: CloudConfig, *, breaker: Breaker | None = None) -> None:
        self._config = config
        self._breaker = breaker or Breaker()
        self._rtt_ms = Ewma(_RTT_HALF_LIFE_S)
        self._reachable: bool | None = None
        self._tier: str | None = None
        self._back: dict[str, float] = {}  # by model, when it may be asked for again
        self._heard = float("-inf")  # when the server last answered anything
        self._session: aiohttp.ClientSession | None = None
        self._urls = {kind: URL(config.url + path) for kind, path in _PATHS.items()}

    async def start(self) -> None:
        """Opens no connection yet. Raises OSError or ssl.SSLError for an unusable `cloud.ca_file`."""
        verify: ssl.SSLContext | bool = True
        if self._config.ca_file:
            verify = ssl.create_default_context(cafile=self._config.ca_file)
        connector = aiohttp.TCPConnector(limit=self._config.max_connections, keepalive_timeout=_IDLE_S, ssl=verify)
        headers = {"Accept-Encoding": "identity", "User-Agent": "causeway-edge"}
        if self._config.api_key:
            headers["Authorization"] = f"Bearer {self._config.api_key}"
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._config.connect_timeout_s),
            auto_decompress=False,
            trust_env=False,
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def signals(self) -> CloudSignals:
        now = _now()
        return CloudSignals(
            reachable=self._reachable,
            rtt_ms=self._rtt_ms.value(now),
            breaker=self._breaker.state(now),
            tier=self._tier,
            unavailable_models=tuple(model for model, back in self._back.items() if now < back),
        )

    # --- Backend -----------------------------------------------------------------------------------------------------

    async def generate(self, call: BackendRequest) -> AsyncIterator[Chunk]:
        streams = call.request.stream or call.confidence_tokens > 0
        body = encode_request(
            call.request, call.target.model, stream=streams, resume=split_token(call.request.resume)[1]
        )
        with self._judged(call, streams=streams):
            if not streams:
                for chunk in decode_answer(await self._fetch(call, body)):
                    yield _with_target(chunk, call)
                return
            until = min(call.deadline, call.first_token_by)
            response = await self._ask(call, body, until)
            try:
                async for chunk in read_stream(response, call, until):
                    yield _with_target(chunk, call)
            finally:
                response.release()  # read to its end, the connection is used again; else it is closed: the work stops

    async def embed(self, call: BackendRequest) -> Embeddings:
        body = encode_request(call.request, call.target.model, stream=False)
        with self._judged(call, streams=False):
            return decode_embeddings(await self._fetch(call, body))

    async def _fetch(self, call: BackendRequest, body: bytes) -> bytes:
        """A whole answer's body."""
        response = await self._ask(call, body, call.deadline)
        try:
            return await read_whole(response, call)
        finally:
            response.release()

    @contextmanager
    def _judged(self, call: BackendRequest, *, streams: bool) -> Iterator[None]:
        """The breaker hears exactly one verdict per call, also when the call is given up half way."""
        started = _now()
        self._refuse_away(call, started)
        if not self._breaker.allow(_now()):
            wait_s = self._breaker.retry_after_s(_now())
            raise BreakerOpen("the cloud failed repeatedly and is left alone", phase="connect", retry_after_s=wait_s)
        try:
            yield
        except _ANSWERED:
            self._breaker.success(_now())
            raise
        except CausewayError as error:
            ill = _is_ill(error, _now() - started, self._granted_s(call, error, streams=streams))
            (self._breaker.failure if ill else self._breaker.cancelled)(_now())
            if isinstance(error, CloudUnavailable) and error.retry_after_s is not None:
                self._back[call.target.model] = _now() + min(error.retry_after_s, _LONGEST_AWAY_S)
            raise
        except BaseException:
            self._breaker.cancelled(_now())
            raise
        else:
            self._breaker.success(_now())

    def _refuse_away(self, call: BackendRequest, now: float) -> None:
        """Raises CloudUnavailable before the time that the server named."""
        left_s = self._back.get(call.target.model, now) - now
        if left_s > 0.0:
            told = f"{call.target.name}: the cloud said that it cannot answer yet"
            raise CloudUnavailable(told, phase="connect", retry_after_s=left_s)
        self._back.pop(call.target.model, None)

    def _granted_s(self, call: BackendRequest, error: CausewayError, *, streams: bool) -> float:
        """The time that policy and configuration give a target; a caller's own deadline may be shorter."""
        if streams and isinstance(error, CloudTimeout) and error.phase == "first_token":
            return call.target.first_token_timeout_s or self._config.first_token_timeout_s
        return call.target.timeout_s or self._config.timeout_s

    async def _ask(
        self, call: BackendRequest, body: bytes, until: float, *, again: bool = True
    ) -> aiohttp.ClientResponse:
        """The server's answer with status 200, its body still to be read. Whoever has it has to release it."""
        assert self._session is not None, "start() comes first"
        try:
            async with asyncio.timeout_at(until):
                response = await self._session.post(
                    self._urls[call.request.kind], data=body, headers=_headers(call), allow_redirects=False
                )
        except aiohttp.ServerDisconnectedError as error:
            if again:  # it closed a kept connection just as it was used: a fresh one tells whether it is there
                return await self._ask(call, body, until, again=False)
            raise client_error(error, call.target.name, "send") from error
        except aiohttp.ClientError as error:
            failure = client_error(error, call.target.name, "send")
            if failure.phase == "connect":
                self._reachable = False
            raise failure from error
        except TimeoutError as error:
            raise too_slow(call, "first_token") from error
        except OSError as error:
            raise client_error(error, call.target.name, "send") from error
        self._hear(response)
        if response.status != 200:
            raise await read_refusal(response, call, until)
        call.heard.take(response.headers)
        return response

    def _hear(self, response: aiohttp.ClientResponse) -> None:
        self._reachable = True
        self._heard = _now()
        self._tier = response.headers.get("x-causeway-tier", self._tier)

    # --- the probe ---------------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """For ever: ask whether the server is there, unless its answers have just said so."""
        interval_s = pause_s = self._config.probe_interval_s
        while True:
            quiet = _now() - self._heard >= interval_s
            if quiet or self._rtt_ms.value(_now()) is None:
                await self.probe()
            pause_s = interval_s if self._reachable else min(interval_s * _PROBE_BACKOFF, pause_s * 2.0)
            await asyncio.sleep(pause_s)

    async def probe(self) -> bool:
        """Whether the server answers at all; any HTTP status will do. Updates `reachable` and `rtt_ms`."""
        assert self._session is not None, "start() comes first"
        started = _now()
        try:
            with anyio.fail_after(_PROBE_S):
                async with self._session.get(self._config.url + "/models", allow_redirects=False) as response:
                    self._hear(response)
                    self._rtt_ms.add((_now() - started) * 1000.0, _now())
                    await read_body(response, MAX_ERROR_BYTES)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if self._reachable is not False:
                log.warning("the cloud cannot be reached: %s", type(error).__name__)
            self._reachable = False
        return self._reachable is True


def _with_target(chunk: Chunk, call: BackendRequest) -> Chunk:
    """What asks for the rest of a cut answer names this target."""
    return msgspec.structs.replace(chunk, resume=join_token(call.target.name, chunk.resume)) if chunk.resume else chunk


def _is_ill(error: CausewayError, took_s: float, granted_s: float) -> bool:
    """Whether the server is to blame. One that is full, or has nobody behind it, and says for how long is well; a
    caller's short deadline is nobody's fault."""
    if isinstance(error, CloudSaturated | CloudUnavailable):
        return error.retry_after_s is None
    return not isinstance(error, CloudTimeout) or took_s >= granted_s - _TIMER_STEP_S


def _headers(call: BackendRequest) -> dict[str, str]:
    left_ms = max(1, int((call.deadline - _now()) * 1000.0))
    headers = {
        "Content-Type": "application/json",
        "x-request-id": call.id,
        "x-causeway-deadline-ms": str(left_ms),
        "x-causeway-priority": _priority(call.request),
    }
    if call.traceparent:
        headers["traceparent"] = call.traceparent
    if not call.keep:
        headers["Cache-Control"] = "no-store"
    if call.policy:
        headers["x-causeway-policy"] = call.policy
    return headers


def _priority(request: Request) -> str:
    """Somebody watches a stream as it comes; who can wait says so with the tag `bulk`."""
    if "bulk" in request.hints.tags:
        return "bulk"
    return "interactive" if request.stream else "standard"


def _now() -> float:
    return asyncio.get_running_loop().time()
