"""How much time this process itself lost: its event loop was late, because the machine or the process was busy.

A first token that came in such a time may have been there long before it was seen. It says nothing about the tier, and
a limit that was cut for it would make a busy machine's gateway refuse what its tiers could do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable

import anyio

EVERY_S = 0.02


class EventLoopLag:
    """Owns the sum of lost seconds. It stays 0 while nobody watches."""

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
        """Since it began, that which is being lost included."""
        return self._lost_s + max(0.0, self._clock() - self._due)

    async def watch(self) -> None:
        """For as long as somebody asks."""
        try:
            while True:
                self._due = self._clock() + EVERY_S
                await self._sleep(EVERY_S)
                self._lost_s = self.lost_s()
        finally:
            self._due = math.inf
