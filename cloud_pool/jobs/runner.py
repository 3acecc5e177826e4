"""The seam to what answers: the gateway's own service, or a scripted one in tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Protocol

import msgspec

from router.errors import ModelNotFound
from router.types import Chunk, Request

from ..admission import Priority
from ..call import Call
from ..pool.pool import Pool
from ..service import Service
from ..tenants.accounts import BYTES_PER_TOKEN
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

    async def run(self, errand: Errand) -> AsyncGenerator[Chunk, None]:
        """Raises CausewayError."""
        tier = self._tiers.get(errand.tier)
        if tier is None:
            raise ModelNotFound(f"The tier {errand.tier!r} is not there any more.", param="model")
        call = Call(
            id=errand.id,
            request=errand.request,
            tier=tier,
            deadline=errand.deadline,
            priority=errand.priority,
            tenant=errand.owner.partition("/")[0],
            tokens=errand.body_bytes / BYTES_PER_TOKEN + (errand.request.max_tokens or tier.max_tokens),
            stays=True,  # It has time: its tier's whole answer is worth the wait.
        )
        async with aclosing(self._service.answer(call)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Chunk):
                    yield piece

    async def ready(self, tier: str) -> bool:
        return "" in (await self._pools[self._tiers[tier].name].check()).values()
