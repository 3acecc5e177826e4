"""Whether a request that failed before its first delta may be sent again: rules and budget. Pure.

`RetryState` tells what an error allows, `RetryBudget` how many extra attempts the tier may make: without a bound,
retries make an outage worse, because with every replica slow each request becomes three.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Literal

from router.errors import (
    BreakerOpen,
    CausewayError,
    CloudDisconnected,
    CloudFailed,
    CloudSaturated,
    CloudUnreachable,
    Draining,
    EngineCrashed,
    EngineOutOfMemory,
    EngineUnavailable,
    QueueFull,
    StreamBroken,
)

RetryRule = Literal["again", "once", "never"]

_RULES: Mapping[type[CausewayError], RetryRule] = {
    # The endpoint's own state, which the next endpoint does not share. StubProcessDied is an EngineUnavailable.
    EngineUnavailable: "again",
    EngineOutOfMemory: "again",
    QueueFull: "again",
    CloudSaturated: "again",
    Draining: "again",
    BreakerOpen: "again",
    CloudUnreachable: "again",
    # The endpoint broke while it worked on this very request. The request may be the cause, and must not go round the
    # whole pool.
    EngineCrashed: "once",
    StreamBroken: "once",
    CloudFailed: "once",
    CloudDisconnected: "once",
    # All others are never retried, above all InvalidRequest and CloudRejected (wrong everywhere), DeadlineExceeded,
    # EngineTimeout and CloudTimeout (no time is left), RateLimited and other errors about the caller.
}
_BUCKETS = 10
_ROUNDING = 1e-9  # five times 0.2 may be a little less than 1


def retry_rule(error: CausewayError) -> RetryRule:
    """Return the rule of the nearest listed ancestor; an unlisted class is never retried."""
    if isinstance(error, CloudUnreachable) and error.phase != "connect":
        return "once"  # Not refused, but lost: this request may have killed the server.
    for ancestor in type(error).__mro__:
        if ancestor in _RULES:
            return _RULES[ancestor]
    return "never"


class RetryState:
    """The attempts of one request so far. Decides whether another one may follow, and which endpoints to avoid."""

    def __init__(self, max_attempts: int) -> None:
        self.attempts = 0
        self.tried: set[str] = set()
        self._max_attempts = max_attempts
        self._suspicions = 0  # errors that the request itself may have caused

    def begin_attempt(self, endpoint: str) -> None:
        self.attempts += 1
        self.tried.add(endpoint)

    def may_retry(self, error: CausewayError) -> bool:
        """Tell whether another attempt may follow one that ended with this error."""
        rule = retry_rule(error)
        self._suspicions += rule == "once"
        return rule != "never" and self._suspicions <= 1 and self.attempts < self._max_attempts


class RetryBudget:
    """Allow `share` of the requests of the last `window_s`, or `min_retries_per_s` where that is more.

    As in Finagle's RetryBudget and Envoy's retry_budget; the minimum lets a quiet gateway retry at all. It is not added
    to the share, so it never lifts a busy tier above it. Time is monotonic, memory bounded.
    """

    def __init__(self, share: float = 0.2, min_retries_per_s: float = 0.5, window_s: float = 10.0) -> None:
        self._share = share
        self._min_retries = min_retries_per_s * window_s
        self._bucket_s = window_s / _BUCKETS
        self._requests: Counter[int] = Counter()  # by the number of their bucket
        self._extras: Counter[int] = Counter()

    def count_request(self, now: float) -> None:
        """Count a request, whatever its outcome."""
        self._requests[self._bucket(now)] += 1

    def try_spend(self, now: float) -> bool:
        """Tell whether one more attempt may be made, and count it if so."""
        if self.left(now) < 1.0 - _ROUNDING:
            return False
        self._extras[self._bucket(now)] += 1
        return True

    def left(self, now: float) -> float:
        """Return how many extra attempts may be made now; negative after the requests that paid for some expired."""
        self._bucket(now)
        return max(self._share * self._requests.total(), self._min_retries) - self._extras.total()

    def _bucket(self, now: float) -> int:
        """Return the number of the bucket, and forget those that have left the window."""
        newest = int(now // self._bucket_s)
        for counts in (self._requests, self._extras):
            for number in [each for each in counts if each <= newest - _BUCKETS]:
                del counts[number]
        return newest
