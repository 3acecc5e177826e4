"""Whether each tier can answer, by asking it. A crashed model calls itself ready, so nothing less counts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

import anyio

from router.errors import CausewayError

from .tiers import Tier
from .triton import Triton


class Readiness:
    """Keeps the last answer for `ttl_s`; concurrent checks share one."""

    def __init__(
        self,
        tiers: tuple[Tier, ...],
        tritons: Mapping[str, Triton],
        ttl_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tiers = tiers
        self._tritons = tritons
        self._ttl_s = ttl_s
        self._clock = clock
        self._lock = asyncio.Lock()
        self._checked_at: float | None = None
        self._found: dict[str, str] = {}

    async def check(self) -> Mapping[str, str]:
        """The error's code of each tier, "" where it answered."""
        async with self._lock:
            if self._checked_at is None or self._clock() - self._checked_at >= self._ttl_s:
                found: dict[str, str] = {}
                async with anyio.create_task_group() as tasks:
                    for tier in self._tiers:
                        tasks.start_soon(self._ask, tier, found)
                self._found = {tier.name: found[tier.name] for tier in self._tiers}
                self._checked_at = self._clock()
            return self._found

    async def _ask(self, tier: Tier, found: dict[str, str]) -> None:
        try:
            await self._tritons[tier.config.triton].probe(tier.model)
            found[tier.name] = ""
        except CausewayError as error:
            found[tier.name] = error.code
