"""How much work arrives, and how much more of it would fit. Pure; `now` is monotonic, s."""

from __future__ import annotations

import math

MEMORY_S = 1.5
"""Short: work that no longer arrives must be forgotten soon."""
ROOM = 0.9
"""Share of a tier's permits that may be in use after work has come back: arrivals are never even."""


class ArrivalRate:
    """Requests a second: a count that decays exponentially."""

    def __init__(self) -> None:
        self._count = 0.0
        self._at = -math.inf

    def add(self, now: float) -> None:
        self._count, self._at = self._decayed(now) + 1.0, now

    def per_s(self, now: float) -> float:
        return self._decayed(now) / MEMORY_S

    def _decayed(self, now: float) -> float:
        return self._count * math.exp(-max(0.0, now - self._at) / MEMORY_S)


def fitting_share(rate: float, held_s: float | None, running: int, limit: int) -> float:
    """Return the share of the arriving work that would find a permit besides what runs (Little's law).

    Args:
        rate: Arrivals a second.
        held_s: How long each request holds its permit; None: unknown.
        running: Permits in use.
        limit: Permits there are.

    Returns:
        0 and more, above 1 where there is room to spare; infinity where nothing is known.
    """
    wanted = rate * (held_s or 0.0)
    return max(0.0, ROOM * limit - running) / wanted if wanted else math.inf
