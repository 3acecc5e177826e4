"""Whether each tier can answer, found out by an inference on each of its endpoints.

Nothing less is reliable: Triton reports a model as ready whose process has crashed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

import anyio
import msgspec

from router.errors import EngineUnavailable

from ..dispatch.pool import Pool


class TierReadiness(msgspec.Struct, frozen=True):
    """One tier: the error code of each endpoint, "" where it answered. One endpoint that answers is enough."""

    endpoints: Mapping[str, str]

    @property
    def ready(self) -> bool:
        return "" in self.endpoints.values()

    @property
    def error(self) -> str:
        """The first endpoint's error code if none answers."""
        return "" if self.ready else next(iter(self.endpoints.values()), EngineUnavailable.code)


class Readiness:
    """Caches the last result for `cache_s`; concurrent checks share one.

    Args:
        pools: by the tier's name.
        blocked: why the gateway cannot answer whatever its tiers can; "" if it can. It is asked each time.
        problems: what an operator has to mend, though the gateway may answer.
        clock: monotonic time, s.
    """

    def __init__(
        self,
        pools: Mapping[str, Pool],
        cache_s: float,
        *,
        blocked: Callable[[], str] = lambda: "",
        problems: Callable[[], tuple[str, ...]] = lambda: (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pools = pools
        self._blocked = blocked
        self._problems = problems
        self._cache_s = cache_s
        self._clock = clock
        self._lock = asyncio.Lock()
        self._checked_at: float | None = None
        self._tiers: dict[str, TierReadiness] = {}

    @property
    def problems(self) -> tuple[str, ...]:
        return self._problems()

    async def ready(self) -> bool:
        """Return whether an inference succeeds on at least one endpoint, and nothing else blocks the gateway."""
        return not self._blocked() and any(tier.ready for tier in (await self.check()).values())

    async def check(self) -> Mapping[str, TierReadiness]:
        async with self._lock:
            if self._checked_at is None or self._clock() - self._checked_at >= self._cache_s:
                checked: dict[str, TierReadiness] = {}
                async with anyio.create_task_group() as tasks:
                    for tier, pool in self._pools.items():
                        tasks.start_soon(_check_tier, tier, pool, checked)
                self._tiers = {tier: checked[tier] for tier in self._pools}
                self._checked_at = self._clock()
            return self._tiers


async def _check_tier(tier: str, pool: Pool, checked: dict[str, TierReadiness]) -> None:
    checked[tier] = TierReadiness(await pool.check())
