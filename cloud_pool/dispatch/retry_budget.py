"""How many extra tries there may be. Pure state, explicit monotonic time, bounded memory.

Without a bound retries make an outage worse: with every replica slow, each request becomes three. As in Finagle's
RetryBudget and Envoy's retry_budget the bound is a share of the requests lately seen, with a floor so that a quiet
gateway can retry at all. The floor is not added to the share, so it never lifts a busy tier above it.
"""

from __future__ import annotations

from collections import deque

_SLOTS = 10
_ROUNDING = 1e-9  # fifty times 0.02 is a little less than 1


class RetryBudget:
    """At most `share` of the requests of the last `window_s`, or `min_retries_per_s` where that is more."""

    def __init__(self, share: float = 0.2, min_retries_per_s: float = 0.5, window_s: float = 10.0) -> None:
        self._share = share
        self._floor = min_retries_per_s * window_s
        self._slot_s = window_s / _SLOTS
        self._slots: deque[_Slot] = deque()  # oldest first; only those in which something happened
        self._requests = 0
        self._extras = 0

    def asked(self, now: float) -> None:
        """A request came, whatever becomes of it."""
        self._slot(now).requests += 1
        self._requests += 1

    def take(self, now: float) -> bool:
        """Whether one more try may be made; if so it is counted."""
        if self.left(now) < 1.0 - _ROUNDING:
            return False
        self._slot(now).extras += 1
        self._extras += 1
        return True

    def left(self, now: float) -> float:
        """Extra tries that may be made now; below zero when the requests that paid for some are forgotten."""
        self._forget(now)
        return max(self._share * self._requests, self._floor) - self._extras

    def _slot(self, now: float) -> _Slot:
        number = int(now // self._slot_s)
        if not self._slots or self._slots[-1].number < number:
            self._forget(now)
            self._slots.append(_Slot(number))
        return self._slots[-1]

    def _forget(self, now: float) -> None:
        oldest = int(now // self._slot_s) - _SLOTS + 1
        while self._slots and self._slots[0].number < oldest:
            slot = self._slots.popleft()
            self._requests -= slot.requests
            self._extras -= slot.extras


class _Slot:
    __slots__ = ("extras", "number", "requests")

    def __init__(self, number: int) -> None:
        self.number = number
        self.requests = 0
        self.extras = 0


class HedgeBudget:
    """At most `share` of all requests ever seen. What was saved lasts for `burst` hedges in a row, so that a replica
    that stalls under many requests can be hedged for several of them.

    The first half of that is for those who are very late, or late at an endpoint that is known to be slow: more
    requests are a little late, by chance, than may be hedged, and they must not leave nothing to the one that hangs.
    """

    def __init__(self, share: float = 0.02, burst: float = 10.0) -> None:
        self._share = share
        self._burst = burst
        self._saved = 0.0

    def asked(self) -> None:
        self._saved = min(self._burst, self._saved + self._share)

    def take(self, is_very_late: bool) -> bool:
        """Whether one hedge may be made; if so it is counted."""
        kept = 0.0 if is_very_late else self._burst / 2.0
        if self._saved - kept < 1.0 - _ROUNDING:
            return False
        self._saved -= 1.0
        return True
