"""Dispatcher of a tier: yields the deltas of exactly one endpoint for an inference request.

1. No time is left, or no endpoint plausibly has a first token within it: DeadlineExceeded, nothing starts.
2. An attempt on one endpoint.
3. A first delta: that endpoint answers, and everything after it is final.
4. An error that another endpoint may not have, with attempts and budget left: a short pause, then (2) elsewhere.
5. Otherwise the error of the last attempt is raised.

Without a bound, retries make an outage worse: with every replica slow, each request becomes three. So `RetryState`
decides by the errors so far, `RetryBudget` bounds the tier's extra attempts, and `FirstTokenLatency` estimates whether
an attempt can still be in time; all three are pure.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sized
from typing import Literal, Protocol

import anyio
import msgspec

from causeway_server.router import errors
from causeway_server.router.trackers import Window

from ..upstreams.inference import Delta, InferenceRequest
from ..upstreams.openai_http import HttpCall, OpenAIUpstream
from .endpoint_selection import NO_PROMPT, Prompt
from .prefix_index import prompt_blocks

RetryRule = Literal["again", "once", "never"]

_AGAIN = (
    errors.EngineUnavailable,
    errors.EngineOutOfMemory,
    errors.QueueFull,
    errors.CloudSaturated,
    errors.Draining,
    errors.BreakerOpen,
    errors.CloudUnreachable,
)
"""Errors caused by the endpoint's own state, which another endpoint does not share. Includes StubProcessDied."""
_ONCE = (errors.EngineCrashed, errors.StreamBroken, errors.CloudFailed, errors.CloudDisconnected)
"""Errors of an endpoint that broke on this very request: the request may be the cause, so it is retried only once."""
_BUCKETS = 10
_WINDOW_S = 5.0  # short: an estimate from a rush must not reject requests once it is over
_MIN_SAMPLES = 8
_QUANTILE = 0.05
_CACHED_S = 0.25  # a quantile sorts its window
_ROUNDING = 1e-9  # five times 0.2 may be a little less than 1
PAUSE_S = 0.02
MAX_PAUSE_S = 0.2
log = logging.getLogger(__name__)


def retry_rule(error: errors.CausewayError) -> RetryRule:
    """Return the rule of an error.

    Other errors are never retried: above all InvalidRequest and CloudRejected (wrong everywhere), DeadlineExceeded,
    EngineTimeout and CloudTimeout (no time is left), RateLimited and others about the caller.
    """
    if isinstance(error, _ONCE) or (isinstance(error, errors.CloudUnreachable) and error.phase != "connect"):
        return "once"  # Also where it is not refused, but lost: this request may have killed the server.
    return "again" if isinstance(error, _AGAIN) else "never"


class RetryState:
    """Attempts of one request so far; decides whether another may follow, and which endpoints to avoid."""

    def __init__(self, max_attempts: int) -> None:
        self.attempts = 0
        self.tried: set[str] = set()
        self._max_attempts = max_attempts
        self._suspicions = 0  # errors that the request itself may have caused

    def begin_attempt(self, endpoint: str) -> None:
        self.attempts += 1
        self.tried.add(endpoint)

    def may_retry(self, error: errors.CausewayError) -> bool:
        """Return whether another attempt may follow one that ended with this error."""
        rule = retry_rule(error)
        self._suspicions += rule == "once"
        return rule != "never" and self._suspicions <= 1 and self.attempts < self._max_attempts


class RetryBudget:
    """A budget of retries: `share` of the requests of the last `window_s`, or `min_retries_per_s` if that is more.

    As in Finagle's RetryBudget and Envoy's retry_budget; the minimum lets a quiet gateway retry at all. It is not added
    to the share, so it never lifts a busy tier above it. Time is monotonic, memory bounded.
    """

    def __init__(self, share: float = 0.2, min_retries_per_s: float = 0.5, window_s: float = 10.0) -> None:
        self._share = share
        self._min_retries = min_retries_per_s * window_s
        self._bucket_s = window_s / _BUCKETS
        self._requests: Counter[int] = Counter()  # by the number of their bucket
        self._extras: Counter[int] = Counter()
        self._newest = 0

    def count_request(self, now: float) -> None:
        """Count a request, whatever its outcome."""
        self._requests[self._bucket(now)] += 1

    def try_spend(self, now: float) -> bool:
        """Spend one extra attempt if the budget allows it; return whether it did."""
        if self.left(now) < 1.0 - _ROUNDING:
            return False
        self._extras[self._bucket(now)] += 1
        return True

    def left(self, now: float) -> float:
        """Return the number of extra attempts allowed now; negative after the requests that paid for some expired."""
        self._bucket(now)
        return max(self._share * self._requests.total(), self._min_retries) - self._extras.total()

    def _bucket(self, now: float) -> int:
        """Return the number of the bucket, and forget those that have left the window."""
        newest = int(now // self._bucket_s)
        if newest != self._newest:
            self._newest = newest
            for counts in (self._requests, self._extras):
                for number in [each for each in counts if each <= newest - _BUCKETS]:
                    del counts[number]
        return newest


class InferenceBackend(Protocol):
    """The part of `upstreams.inference.Upstream` that an attempt needs."""

    def generate(self, request: InferenceRequest, /) -> AsyncGenerator[Delta, None]: ...


class EndpointLease(Protocol):
    """A call on one endpoint, outstanding until it is closed. Closed without a report, it counts as abandoned."""

    @property
    def endpoint(self) -> str: ...

    @property
    def upstream(self) -> InferenceBackend: ...

    def first_token(self, seconds: float) -> None: ...

    def succeeded(self) -> None: ...

    def failed(self, error: errors.CausewayError) -> None: ...

    def close(self) -> None: ...


class EndpointSource(Protocol):
    @property
    def endpoints(self) -> Sized: ...

    def lease(self, *, prompt: Prompt = NO_PROMPT, excluding: Collection[str] = ()) -> EndpointLease:
        """Select an endpoint for a prompt. Raises CausewayError if none can take it."""
        ...


class FirstTokenLatency:
    """Estimate, for each endpoint, of the time below which it gives no first token."""

    def __init__(self) -> None:
        self._endpoints: dict[str, _EndpointLatency] = {}

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(self._endpoints)

    def first_token(self, endpoint: str, seconds: float, now: float) -> None:
        """Record a first token, `seconds` after its attempt began; drop endpoints without a recent sample."""
        if endpoint not in self._endpoints:
            self._endpoints = {address: one for address, one in self._endpoints.items() if one.window.count(now)}
            self._endpoints[endpoint] = _EndpointLatency()
        self._endpoints[endpoint].window.add(seconds, now)

    def fastest_s(self, endpoint: str, now: float) -> float:
        """Return the time below which `endpoint` plausibly gives no first token; 0: too few samples."""
        known = self._endpoints.get(endpoint)
        return 0.0 if known is None else known.fastest_s(now)


class _EndpointLatency:
    def __init__(self) -> None:
        self.window = Window(_WINDOW_S)
        self._fastest_s = 0.0
        self._computed_at = float("-inf")

    def fastest_s(self, now: float) -> float:
        if now - self._computed_at >= _CACHED_S:
            self._computed_at = now
            is_enough = self.window.count(now) >= _MIN_SAMPLES
            self._fastest_s = (self.window.quantile(_QUANTILE, now) or 0.0) if is_enough else 0.0
        return self._fastest_s


class EndpointAttempt:
    """An attempt: owns a lease and a call. Read its deltas after `begin`, report how they end, and close it."""

    def __init__(
        self, lease: EndpointLease, request: InferenceRequest, latency: FirstTokenLatency, clock: Callable[[], float]
    ) -> None:
        self.endpoint = lease.endpoint
        self._lease = lease
        self._trace = None if request.trace is None else request.trace.call(request.model, lease.endpoint)
        if self._trace is not None:
            request = msgspec.structs.replace(request, traceparent=self._trace.traceparent)
        self.request = request
        self.deltas = lease.upstream.generate(request)
        self.began_at = clock()
        self.call: HttpCall | None = None
        self.has_first_token = False
        self._latency = latency
        self._clock = clock

    def send(self) -> tuple[OpenAIUpstream, HttpCall] | None:
        """Send the request without waiting, and return server and call, or None; `deltas` can go on from it."""
        upstream = self._lease.upstream
        if not isinstance(upstream, OpenAIUpstream) or (call := upstream.begin(self.request)) is None:
            return None
        self.call, self.deltas = call, upstream.generate(self.request, call)
        return upstream, call

    async def begin(self) -> Delta:
        """Return the first delta; an attempt without one is closed. Raises CausewayError."""
        first = None
        try:
            first = await anext(self.deltas, None)
            if first is None:
                raise errors.CloudFailed("The endpoint's answer ended before its first token.", phase="first_token")
        except errors.CausewayError as error:
            self.failed(error)
            raise
        finally:
            if first is None:
                await self.close()
        self.first_token(self._clock() - self.began_at)
        return first

    def first_token(self, seconds: float) -> None:
        """Report the first token, `seconds` after the attempt began."""
        self.has_first_token = True
        self._lease.first_token(seconds)
        self._latency.first_token(self.endpoint, seconds, self._clock())
        if self._trace is not None:
            self._trace.first_token()

    def succeeded(self) -> None:
        """Report that the whole answer arrived."""
        self._lease.succeeded()
        if self._trace is not None:
            self._trace.end()

    async def close(self) -> None:
        """Cancel the call if it is still running, and give the lease back."""
        try:
            await self.deltas.aclose()
        finally:
            self.end()
            if self._trace is not None:
                self._trace.end(errors.ClientGone.code)  # No effect on a trace that has already ended.

    def end(self) -> None:
        """Do what `close` does for an attempt whose deltas were never asked for."""
        upstream = self._lease.upstream
        if self.call is not None and isinstance(upstream, OpenAIUpstream):
            upstream.end(self.call)
        self._lease.close()

    def failed(self, error: errors.CausewayError) -> None:
        """Report how the answer broke."""
        self._lease.failed(error)
        if self._trace is not None:
            self._trace.end(error.code)


class Dispatcher(msgspec.Struct, frozen=True):
    """The dispatcher of one tier's requests to its endpoints."""

    pool: EndpointSource
    max_attempts: int = 3  # endpoints that one request may be sent to; 1: no retry
    retry_budget: RetryBudget = msgspec.field(default_factory=RetryBudget)
    retried: Callable[[str], None] = lambda code: None  # gets the code of each error that a retry follows
    clock: Callable[[], float] = time.monotonic  # s
    rng: Callable[[], float] = random.random  # draws from [0, 1)
    sleep: Callable[[float], Awaitable[None]] = anyio.sleep
    latency: FirstTokenLatency = msgspec.field(default_factory=FirstTokenLatency)
    by_prefix: bool = False  # whether endpoints are selected by the prefixes that they have

    @property
    def retries_left(self) -> float:
        """Extra attempts that the retry budget allows now."""
        return max(0.0, self.retry_budget.left(self.clock()))

    def begin(self, request: InferenceRequest, key: bytes = b"") -> EndpointAttempt | None:
        """Return a first attempt, whose request is yet to be sent; None, and nothing was done, if none is possible."""
        try:
            lease = self._lease(request, self._prompt(request, key), RetryState(self.max_attempts))
        except errors.CausewayError:
            return None
        self.retry_budget.count_request(self.clock())
        return EndpointAttempt(lease, request, self.latency, self.clock)

    async def generate(
        self, request: InferenceRequest, key: bytes = b"", begun: EndpointAttempt | None = None
    ) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of one endpoint's answer. Closing the generator cancels all work upstream.

        `key`: of the prompt's conversation, for the pool. `begun`: the attempt of `begin`, which goes on. Raises
        CausewayError: that of the last attempt, or the reason why none was possible.
        """
        if begun is None:
            self.retry_budget.count_request(self.clock())
        attempt, first = begun, None
        if attempt is None or not attempt.has_first_token:
            attempt, first = await self._first_delta(request, key, begun)
        try:
            if first is not None:
                yield first
            async for delta in attempt.deltas:
                yield delta
        except errors.CausewayError as error:
            attempt.failed(error)
            raise
        else:
            attempt.succeeded()
        finally:
            await attempt.close()

    def _prompt(self, request: InferenceRequest, key: bytes) -> Prompt:
        return Prompt(request.estimated_tokens, key, prompt_blocks(request) if self.by_prefix else ())

    async def _first_delta(
        self, request: InferenceRequest, key: bytes, begun: EndpointAttempt | None
    ) -> tuple[EndpointAttempt, Delta]:
        """Return an attempt and its first delta. Raises CausewayError."""
        retry_state, prompt = RetryState(self.max_attempts), self._prompt(request, key)
        attempt = begun
        if attempt is None:
            attempt = self._attempt(self._lease(request, prompt, retry_state), request)  # (1)
        while True:
            retry_state.begin_attempt(attempt.endpoint)
            try:
                return attempt, await attempt.begin()  # (2), (3)
            except errors.CausewayError as error:
                next_lease = await self._retry_lease(error, request, prompt, retry_state)
                if next_lease is None:
                    raise  # (5)
                log.debug(
                    "Request %s failed with %s and is retried on %s",
                    request.request_id,
                    error.code,
                    next_lease.endpoint,
                )
                self.retried(error.code)
                attempt = self._attempt(next_lease, request)

    def _attempt(self, lease: EndpointLease, request: InferenceRequest) -> EndpointAttempt:
        return EndpointAttempt(lease, request, self.latency, self.clock)

    async def _retry_lease(
        self, error: errors.CausewayError, request: InferenceRequest, prompt: Prompt, retry_state: RetryState
    ) -> EndpointLease | None:
        """Wait, then lease the endpoint of the retry (4); None: no retry.

        Raises DeadlineExceeded if another endpoint could take the request, but not in the time that is left. This does
        not count as a fault of the tier.
        """
        if not retry_state.may_retry(error) or len(self.pool.endpoints) <= len(retry_state.tried):
            return None
        # All of it is jitter: requests that failed together must not come back together.
        pause_s = self.rng() * min(MAX_PAUSE_S, PAUSE_S * 2.0 ** (retry_state.attempts - 1))
        now = self.clock()
        if now + pause_s >= request.deadline or not self.retry_budget.try_spend(now):
            return None
        await self.sleep(pause_s)
        try:
            return self._lease(request, prompt, retry_state)
        except errors.DeadlineExceeded as late:
            raise late from error
        except errors.CausewayError:
            return None

    def _lease(self, request: InferenceRequest, prompt: Prompt, retry_state: RetryState) -> EndpointLease:
        """Lease an untried endpoint that plausibly answers in time. Raises CausewayError."""
        now = self.clock()
        left_s = request.deadline - now
        if left_s <= 0.0:
            raise errors.DeadlineExceeded("The request's deadline has passed.")
        too_slow: set[str] = set()
        while True:
            try:
                lease = self.pool.lease(prompt=prompt, excluding=retry_state.tried | too_slow)
            except errors.CausewayError:
                if too_slow:
                    raise errors.DeadlineExceeded(
                        f"No endpoint is fast enough to give a first token within the {left_s:.3f} s left before the "
                        "deadline."
                    ) from None
                raise
            if left_s >= self.latency.fastest_s(lease.endpoint, now):
                return lease
            lease.close()
            too_slow.add(lease.endpoint)
