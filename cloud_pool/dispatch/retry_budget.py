"""How many extra attempts there may be. Pure state, explicit monotonic time, bounded memory.

Without a bound, retries make an outage worse: with every replica slow, each request becomes three. As in Finagle's
RetryBudget and Envoy's retry_budget, the bound is a share of the recent requests, with a minimum so that a quiet
gateway can retry at all. The minimum is not added to the share, so it never lifts a busy tier above it.
"""

from __future__ import annotations

from collections import deque

_BUCKETS = 10
_ROUNDING = 1e-9  # five times 0.2 may be a little less than 1


class RetryBudget:
    """Allow `share` of the requests of the last `window_s`, or `min_retries_per_s` where that is more."""

    def __init__(self, share: float = 0.2, min_retries_per_s: float = 0.5, window_s: float = 10.0) -> None:
        self._share = share
        self._min_retries = min_retries_per_s * window_s
        self._bucket_s = window_s / _BUCKETS
        self._buckets: deque[_Bucket] = deque()  # oldest first; only those in which something happened
        self._requests = 0
        self._extras = 0

    def count_request(self, now: float) -> None:
        """Count a request, whatever its outcome."""
        self._bucket(now).requests += 1
        self._requests += 1

    def try_spend(self, now: float) -> bool:
        """Tell whether one more attempt may be made, and count it if so."""
        if self.left(now) < 1.0 - _ROUNDING:
            return False
        self._bucket(now).extras += 1
        self._extras += 1
        return True

    def left(self, now: float) -> float:
        """Return how many extra attempts may be made now; negative after the requests that paid for some expired."""
        self._expire(now)
        return max(self._share * self._requests, self._min_retries) - self._extras

    def _bucket(self, now: float) -> _Bucket:
        number = int(now // self._bucket_s)
        if not self._buckets or self._buckets[-1].number < number:
            self._expire(now)
            self._buckets.append(_Bucket(number))
        return self._buckets[-1]

    def _expire(self, now: float) -> None:
        oldest = int(now // self._bucket_s) - _BUCKETS + 1
        while self._buckets and self._buckets[0].number < oldest:
            bucket = self._buckets.popleft()
            self._requests -= bucket.requests
            self._extras -= bucket.extras


class _Bucket:
    __slots__ = ("extras", "number", "requests")

    def __init__(self, number: int) -> None:
        self.number = number
        self.requests = 0
        self.extras = 0
