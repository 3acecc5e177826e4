"""Keep tiers warm: a tier that was idle, or whose model was just loaded, answers a tiny request.

The first answer after a pause pays for cold caches, connections and pages. Callers should not pay for that, and its
time must not make a tier look slow: until a warm-up succeeds, times to first token do not count against the tier.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

import anyio
import msgspec
from anyio.abc import TaskGroup

from .fallback import TierFallback

_TICK_S = 0.25
_PAUSE_S = 1.0  # after a warm-up that failed


class EndpointCheck(Protocol):
    """A tier's endpoints: `dispatch.pool.Pool`."""

    async def check(self) -> Mapping[str, str]:
        """Send each endpoint a tiny request; return its error code by address, "" where it answered."""
        ...


class TierWarmer(msgspec.Struct, frozen=True):
    """Warms up tiers while `watch` runs."""

    fallback: TierFallback
    pools: Mapping[str, EndpointCheck]  # by tier
    models: Mapping[str, str]  # the model's name in Triton, by tier
    idle_s: float  # a tier that was idle for so long is warmed up; 0: never
    clock: Callable[[], float] = time.monotonic  # s
    not_before: dict[str, float] = {}  # by tier, after an attempt
    busy: set[str] = set()  # tiers whose warm-up runs

    def __post_init__(self) -> None:
        if self.idle_s:
            for tier in self.pools:
                self.fallback.mark_cold(tier)

    def loaded(self, model: str) -> None:
        """Note that Triton has loaded the model again."""
        for tier, name in self.models.items():
            if name == model and self.idle_s:
                self.fallback.mark_cold(tier)
                self.not_before.pop(tier, None)

    async def watch(self) -> None:
        """Warm up tiers that are due, until cancelled."""
        if not self.idle_s:
            return
        async with anyio.create_task_group() as tasks:
            while True:
                self.start_due(tasks)
                await anyio.sleep(_TICK_S)

    def start_due(self, tasks: TaskGroup) -> None:
        """Start the warm-ups that are due."""
        now = self.clock()
        for tier in self.pools:
            is_idle = self.fallback.idle_s(tier) >= self.idle_s
            is_due = (is_idle or not self.fallback.is_warm(tier)) and now >= self.not_before.get(tier, 0.0)
            if is_due and tier not in self.busy:
                self.busy.add(tier)
                tasks.start_soon(self._warm_up, tier)

    async def _warm_up(self, tier: str) -> None:
        try:
            if "" in (await self.pools[tier].check()).values():
                self.fallback.mark_warm(tier)
        finally:
            self.not_before[tier] = self.clock() + _PAUSE_S
            self.busy.discard(tier)
