"""Keep tiers warm: a tier that was idle, or whose model was just loaded, answers a tiny request.

The first answer after a pause pays for cold caches, connections and pages. Callers should not pay for that, and its
time must not make a tier look slow: until a warm-up succeeds, times to first token do not count against the tier.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

import anyio
from anyio.abc import TaskGroup

from .fallback import TierFallback

_TICK_S = 0.25
_PAUSE_S = 1.0  # after a warm-up that failed


class EndpointCheck(Protocol):
    """A tier's endpoints: `dispatch.pool.Pool`."""

    async def check(self) -> Mapping[str, str]:
        """Send each endpoint a tiny request; return its error code by address, "" where it answered."""
        ...


class TierWarmer:
    """Warms up tiers while `watch` runs."""

    def __init__(
        self,
        fallback: TierFallback,
        pools: Mapping[str, EndpointCheck],
        models: Mapping[str, str],
        idle_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the warmer.

        Args:
            pools: By tier.
            models: The model's name in Triton, by tier.
            idle_s: A tier that was idle for so long is warmed up; 0: never.
        """
        self._fallback = fallback
        self._pools = pools
        self._models = models
        self._idle_s = idle_s
        self._clock = clock
        self._not_before = dict.fromkeys(pools, 0.0)
        self._busy: set[str] = set()
        if idle_s:
            for tier in pools:
                fallback.mark_cold(tier)

    def loaded(self, model: str) -> None:
        """Note that Triton has loaded the model again."""
        for tier, name in self._models.items():
            if name == model and self._idle_s:
                self._fallback.mark_cold(tier)
                self._not_before[tier] = 0.0

    async def watch(self) -> None:
        """Warm up tiers that are due, until cancelled."""
        if not self._idle_s:
            return
        async with anyio.create_task_group() as tasks:
            while True:
                self.start_due(tasks)
                await anyio.sleep(_TICK_S)

    def start_due(self, tasks: TaskGroup) -> None:
        """Start the warm-ups that are due."""
        now = self._clock()
        for tier in self._pools:
            is_idle = self._fallback.idle_s(tier) >= self._idle_s
            is_due = (is_idle or not self._fallback.is_warm(tier)) and now >= self._not_before[tier]
            if is_due and tier not in self._busy:
                self._busy.add(tier)
                tasks.start_soon(self._warm_up, tier)

    async def _warm_up(self, tier: str) -> None:
        try:
            if "" in (await self._pools[tier].check()).values():
                self._fallback.mark_warm(tier)
        finally:
            self._not_before[tier] = self._clock() + _PAUSE_S
            self._busy.discard(tier)
