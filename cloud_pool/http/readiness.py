"""Whether each tier can answer, by asking each of its endpoints. A crashed model calls itself ready, so nothing less
counts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

import anyio
import msgspec

from router.errors import EngineUnavailable

from ..balancing.pool import Pool


class TierReadiness(msgspec.Struct, frozen=True):
    """Of a tier: each endpoint's error code, "" where it answered. One that answers is enough."""

    endpoints: Mapping[str, str]

    @property
    def ready(self) -> bool:
        return "" in self.endpoints.values()

    @property
    def error(self) -> str:
        """Of the first endpoint, where none answers."""
        return "" if self.ready else next(iter(self.endpoints.values()), EngineUnavailable.code)


class Readiness:
    """Keeps the last answer for `ttl_s`; concurrent checks share one. `pools` is by the tier's name."""

    def __init__(
        self,
        pools: Mapping[str, Pool],
        ttl_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pools = pools
        self._ttl_s = ttl_s
        self._clock = clock
        self._lock = asyncio.Lock()
        self._checked_at: float | None = None
        self._found: dict[str, TierReadiness] = {}

    async def check(self) -> Mapping[str, TierReadiness]:
        async with self._lock:
            if self._checked_at is None or self._clock() - self._checked_at >= self._ttl_s:
                found: dict[str, TierReadiness] = {}
                async with anyio.create_task_group() as tasks:
                    for tier, pool in self._pools.items():
                        tasks.start_soon(_ask, tier, pool, found)
                self._found = {tier: found[tier] for tier in self._pools}
                self._checked_at = self._clock()
            return self._found


async def _ask(tier: str, pool: Pool, found: dict[str, TierReadiness]) -> None:
    found[tier] = TierReadiness(await pool.check())
