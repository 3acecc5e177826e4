"""How fast permits are released, measured while requests wait: for their waits and an accurate Retry-After. Pure.

Time without waiters does not count: an idle tier releases nothing, and is not slow for it. A tier that is stuck with
all its permits held releases nothing either, and the rate shows it. When a queue begins after a while without one,
Little's law gives the initial rate: permits over the time for which one is held.
"""

from __future__ import annotations

import math
from collections import deque

from .ticket import RANK, Priority

MEMORY_S = 5.0  # of time with waiters; older releases count less and less
_MIN_RELEASES = 8.0  # the memory is extended to this many releases where they are slow
_MIN_SPAN_S = 0.05
_SMOOTHING = 0.1  # of the times for which a permit is held, and held without a first token
_RECENT = 50  # permits whose single times are kept
_SHORT_QUANTILE = 0.2  # share of the answers that take less than `short_s`


class ReleaseRate:
    """Owns decayed sums: of permits released, of permits granted to each priority, and of the time with waiters."""

    def __init__(self, now: float) -> None:
        self._at = now
        self._full_at = -math.inf
        self._memory_s = MEMORY_S
        self._full = False
        self._span_s = 0.0
        self._released = 0.0
        self._granted = dict.fromkeys(RANK, 0.0)
        self._held_s: float | None = None
        self._pending_s: float | None = None
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._permits = 1

    def tick(self, now: float, *, full: bool) -> None:
        """Account for the time since the last tick. Call it before each change; `full`: requests were waiting."""
        past_s, self._at = max(0.0, now - self._at), now
        self._full = full
        if not full:
            return
        if self._at - past_s - self._full_at > self._memory_s and self._held_s is not None:
            self._begin(self._held_s)
        self._full_at = now
        decay = math.exp(-past_s / self._memory_s)
        self._span_s = self._span_s * decay + self._memory_s * (1.0 - decay)
        self._released *= decay
        for priority in self._granted:
            self._granted[priority] *= decay

    def record_release(self, held_s: float, permits: int) -> None:
        """Record the release of one of `permits`, which was held for `held_s`."""
        self._released += self._full
        self._held_s = _smoothed(self._held_s, held_s)
        self._recent.append(held_s)
        self._permits = max(1, permits)
        self._memory_s = max(MEMORY_S, _MIN_RELEASES * self._held_s / self._permits)

    def record_first_token(self, pending_s: float) -> None:
        """Record a first token, which came so long after its sequence got its permit."""
        self._pending_s = _smoothed(self._pending_s, pending_s)

    def record_grant(self, priority: Priority) -> None:
        self._granted[priority] += 1.0

    @property
    def held_s(self) -> float | None:
        """Recent mean time for which a permit is held; None before the first sample."""
        return self._held_s

    @property
    def pending_share(self) -> float | None:
        """Share of the held permits whose sequence has no first token, if they began evenly; None: not known yet."""
        return self._pending_s / self._held_s if self._pending_s is not None and self._held_s else None

    @property
    def short_s(self) -> float:
        """An answer would hardly be complete in less time than this; 0 before the first sample."""
        return sorted(self._recent)[int(_SHORT_QUANTILE * len(self._recent))] if self._recent else 0.0

    @property
    def rate(self) -> float | None:
        """Permits released a second; None where nothing is known yet."""
        if (self._released >= 1.0 and self._span_s >= _MIN_SPAN_S) or self._span_s > 0.98 * self._memory_s:
            return self._released / self._span_s
        return self._permits / self._held_s if self._held_s else None

    def rate_for(self, priority: Priority, share: float) -> float | None:
        """Return what is left of the rate for this priority: all but the grants above it, and at least `share`."""
        rate = self.rate
        if rate is None:
            return None
        above = sum(granted for each, granted in self._granted.items() if RANK[each] < RANK[priority])
        return max(rate - above / self._span_s, share * rate) if self._span_s else rate

    def _begin(self, held_s: float) -> None:
        self._span_s = min(held_s, self._memory_s)
        self._released = self._permits * self._span_s / held_s if held_s else 0.0
        self._granted = dict.fromkeys(RANK, 0.0)


def _smoothed(mean_s: float | None, newest_s: float) -> float:
    return newest_s if mean_s is None else mean_s + _SMOOTHING * (newest_s - mean_s)
