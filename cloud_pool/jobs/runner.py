"""The seam to what answers: the gateway's own service, or a scripted one in tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Protocol

import msgspec

from router.errors import ModelNotFound
from router.types import Chunk, Request

from ..admission import Priority
from ..pool.pool import Pool
from ..service import Call, Service
from ..tiers import Tier


class Errand(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    owner: str
    body_bytes: int
    request: Request
    tier: str
    priority: Priority
    deadline: float  # monotonic, s


class Runner(Protocol):
    def run(self, errand: Errand) -> AsyncGenerator[Chunk, None]:
        """The answer. Raises CausewayError; closing it stops the work."""

    async def ready(self, tier: str) -> bool:
        """Whether the tier answers, by a real request."""


class ServiceRunner:
    """Jobs on the same service as interactive requests. `tiers` and `pools` by the tier's name."""

    def __init__(self, service: Service, tiers: Mapping[str, Tier], pools: Mapping[str, Pool]) -> None:
        self._service = service
        self._tiers = tiers
        self._pools = pools

    def run(self, errand: Errand) -> AsyncGenerator[Chunk, None]:
        tier = self._tiers.get(errand.tier)
        if tier is None:
            raise ModelNotFound(f"The tier {errand.tier!r} is not there any more.", param="model")
        return self._service.answer(
            Call(
                id=errand.id,
                request=errand.request,
                tier=tier,
                deadline=errand.deadline,
                priority=errand.priority,
            )
        )

    async def ready(self, tier: str) -> bool:
        return "" in (await self._pools[self._tiers[tier].name].check()).values()
