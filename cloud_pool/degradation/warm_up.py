"""Keeps tiers warm: one that was idle for a while, or whose model was just loaded, answers something tiny.

The first answer after a pause pays for caches, connections and pages that went cold. A caller should not, and its time
should not make a tier look slow: until a warm-up has succeeded, times to first token are not held against the tier.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import anyio
from anyio.abc import TaskGroup

from .fallback import TierFallback

_TICK_S = 0.25
_PAUSE_S = 1.0  # after a warm-up that failed


class EndpointCheck(Protocol):
    """pool.Pool."""

    async def check(self) -> Mapping[str, str]:
        """Each endpoint answers a real, tiny request: the code of its error, "" where it did."""
        ...


class TierWarmer:
    """`pools` and `models` (the names in Triton) by tier. `idle_s` 0: nothing is ever warmed up."""

    def __init__(
        self,
        ladder: TierFallback,
        pools: Mapping[str, EndpointCheck],
        models: Mapping[str, str],
        idle_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        self._ladder = ladder
        self._pools = pools
        self._models = models
        self._idle_s = idle_s
        self._clock = clock
        self._sleep = sleep
        self._not_before = dict.fromkeys(pools, 0.0)
        self._busy: set[str] = set()
        if idle_s:
            for tier in pools:
                ladder.cool(tier)

    def loaded(self, model: str) -> None:
        """Triton has loaded it anew."""
        for tier, name in self._models.items():
            if name == model and self._idle_s:
                self._ladder.cool(tier)
                self._not_before[tier] = 0.0

    async def watch(self) -> None:
        """For as long as the tiers are used."""
        if not self._idle_s:
            return
        async with anyio.create_task_group() as tasks:
            while True:
                self.look(tasks)
                await self._sleep(_TICK_S)

    def look(self, tasks: TaskGroup) -> None:
        """Starts what is due."""
        now = self._clock()
        for tier in self._pools:
            idle = self._ladder.idle_s(tier) >= self._idle_s
            if (idle or not self._ladder.is_warm(tier)) and tier not in self._busy and now >= self._not_before[tier]:
                self._busy.add(tier)
                tasks.start_soon(self._warm, tier)

    async def _warm(self, tier: str) -> None:
        try:
            if "" in (await self._pools[tier].check()).values():
                self._ladder.warmed(tier)
        finally:
            self._not_before[tier] = self._clock() + _PAUSE_S
            self._busy.discard(tier)
