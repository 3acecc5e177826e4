"""The UTC day of usage and budgets, by Redis's clock: that of this process may be wrong."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime

_DAY_S = 86_400


class BudgetDay:
    """Today. `wall_clock`: unix time, s, until `follow` has told how wrong it is."""

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        self._wall_clock = wall_clock
        self._behind_s = 0.0

    def follow(self, redis_s: float) -> None:
        """Follow Redis's clock, which shows `redis_s` (unix) now."""
        self._behind_s = redis_s - self._wall_clock()

    def unix_time(self) -> float:
        """Return the time, unix, s."""
        return self._wall_clock() + self._behind_s

    @property
    def name(self) -> str:
        """As 2026-11-21."""
        return datetime.fromtimestamp(self.unix_time(), UTC).strftime("%Y-%m-%d")

    @property
    def number(self) -> int:
        """Days since 1970-01-01."""
        return int(self.unix_time() // _DAY_S)

    @property
    def left_s(self) -> float:
        """Time until midnight, s."""
        return _DAY_S - self.unix_time() % _DAY_S
