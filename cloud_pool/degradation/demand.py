"""How much work comes, and how much more of it would fit. Pure, `now` is given (monotonic, s)."""

from __future__ import annotations

import math

MEMORY_S = 1.5
"""Short: what does not come any more must be forgotten soon after."""
ROOM = 0.9
"""Of a tier's places that may be taken after some work has come back: what comes is never even."""


class ArrivalRate:
    """Requests a second: a count that forgets."""

    def __init__(self) -> None:
        self._count = 0.0
        self._at = -math.inf

    def add(self, now: float) -> None:
        self._count, self._at = self._left(now) + 1.0, now

    def per_s(self, now: float) -> float:
        return self._left(now) / MEMORY_S

    def _left(self, now: float) -> float:
        return self._count * math.exp(-max(0.0, now - self._at) / MEMORY_S)


def fits(rate: float, held_s: float | None, running: int, limit: int) -> float:
    """Which share of the work that comes so often, each piece with a place for so long, would find one besides what
    runs (Little's law). May be more than 1; inf: nothing is known of it."""
    wanted = rate * (held_s or 0.0)
    return max(0.0, ROOM * limit - running) / wanted if wanted else math.inf
