"""How fast places come free, measured while somebody waits: for waiters' times and an honest Retry-After. Pure.

Time in which nobody waits does not count: an idle tier frees nothing, and is not slow for it. A tier that is stuck
with all its places taken frees nothing either, and the rate says so. Where a queue begins after a while without one,
Little's law gives the rate to begin with: places over the time for which one was held.
"""

from __future__ import annotations

import math
from collections import deque

from .ticket import RANK, Priority

MEMORY_S = 5.0  # of time in which somebody waits; what is older counts less and less
_FREED = 8.0  # places that come free within that memory, where they do so slowly
_KNOWN_S = 0.05
_SMOOTHING = 0.1  # of the time for which a place is held
_RECENT = 50  # places, whose times are known each
_SHORT = 0.2  # share of answers that are done in less than `short_s`


class ReleaseRate:
    """Owns decayed sums: of places freed, of places given to each priority, and of the time in which that happened."""

    def __init__(self, now: float) -> None:
        self._at = now
        self._full_at = -math.inf
        self._memory_s = MEMORY_S
        self._full = False
        self._span_s = 0.0
        self._freed = 0.0
        self._given = dict.fromkeys(RANK, 0.0)
        self._held_s: float | None = None
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._places = 1

    def tick(self, now: float, *, full: bool) -> None:
        """The time since the last tick; `full`: somebody waited in it. Told before each change."""
        past_s, self._at = max(0.0, now - self._at), now
        self._full = full
        if not full:
            return
        if self._at - past_s - self._full_at > self._memory_s and self._held_s is not None:
            self._begin(self._held_s)
        self._full_at = now
        kept = math.exp(-past_s / self._memory_s)
        self._span_s = self._span_s * kept + self._memory_s * (1.0 - kept)
        self._freed *= kept
        for priority in self._given:
            self._given[priority] *= kept

    def freed(self, held_s: float, places: int) -> None:
        """A place of `places`, held for so long."""
        self._freed += self._full
        self._held_s = held_s if self._held_s is None else self._held_s + _SMOOTHING * (held_s - self._held_s)
        self._recent.append(held_s)
        self._places = places
        self._memory_s = max(MEMORY_S, _FREED * self._held_s / places)

    def given(self, priority: Priority) -> None:
        self._given[priority] += 1.0

    @property
    def held_s(self) -> float | None:
        """How long a place is held, of late; None where nothing is known yet."""
        return self._held_s

    @property
    def short_s(self) -> float:
        """With less time than this an answer would hardly come to its end; 0 where nothing is known yet."""
        return sorted(self._recent)[int(_SHORT * len(self._recent))] if self._recent else 0.0

    @property
    def rate(self) -> float | None:
        """Places a second; None where nothing is known yet."""
        if (self._freed >= 1.0 and self._span_s >= _KNOWN_S) or self._span_s > 0.98 * self._memory_s:
            return self._freed / self._span_s
        return self._places / self._held_s if self._held_s else None

    def rate_for(self, priority: Priority, share: float) -> float | None:
        """What is left of it for this priority: all but what goes to those above, and at least its own share."""
        rate = self.rate
        if rate is None:
            return None
        above = sum(given for each, given in self._given.items() if RANK[each] < RANK[priority])
        return max(rate - above / self._span_s, share * rate) if self._span_s else rate

    def _begin(self, held_s: float) -> None:
        self._span_s = min(held_s, self._memory_s)
        self._freed = self._places * self._span_s / held_s if held_s else 0.0
        self._given = dict.fromkeys(RANK, 0.0)
