"""Event-loop lag: the time that this process lost because the machine or the process itself was busy.

A first token that arrives during a lag may have been there long before the gateway read it, so it says nothing about
the tier. If the concurrency limit were cut for it, a gateway on a busy machine would refuse what its tiers can do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable

import anyio

INTERVAL_S = 0.02


class EventLoopLag:
    """Owns the sum of lost seconds, which stays 0 unless `watch` runs."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._lost_s = 0.0
        self._due = math.inf

    def lost_s(self) -> float:
        """Return the seconds lost since the start, including a lag in progress."""
        return self._lost_s + max(0.0, self._clock() - self._due)

    async def watch(self) -> None:
        """Measure until cancelled."""
        try:
            while True:
                self._due = self._clock() + INTERVAL_S
                await self._sleep(INTERVAL_S)
                self._lost_s = self.lost_s()
        finally:
            self._due = math.inf
