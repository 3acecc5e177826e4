"""The seam to what answers: the gateway's own service behind the shared cache, or a scripted one in tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Protocol

import msgspec

from router.errors import ModelNotFound
from router.types import Request

from ..admission import Priority
from ..cache.front import Front
from ..cache.reply import Reply
from ..call import Call, Piece
from ..pool.pool import Pool
from ..tenants.accounts import BYTES_PER_TOKEN
from ..tiers import Tier
from ..traced import Trace


class Errand(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    owner: str
    body_bytes: int
    request: Request
    tier: str
    priority: Priority
    deadline: float  # monotonic, s
    attempt: int = 1
    traceparent: str = ""  # of the span that sent the job
    trace: Trace | None = None  # of this run


class Runner(Protocol):
    def run(self, errand: Errand) -> AsyncGenerator[Piece, None]:
        """A Head, where anything is known of the answer, and the answer. Raises CausewayError; closing it stops the
        work."""

    async def ready(self, tier: str) -> bool:
        """Whether the tier answers, by a real request."""


class Answers(Protocol):
    """A runner that also says where an answer came from, and who pays for it."""

    def reply(self, errand: Errand) -> tuple[Reply, AsyncGenerator[Piece, None]]:
        """They raise CausewayError, and so may this."""

    async def ready(self, tier: str) -> bool: ...


class ServiceRunner:
    """Jobs on the same cache and service as interactive requests. `tiers` and `pools` by the tier's name."""

    def __init__(self, front: Front, tiers: Mapping[str, Tier], pools: Mapping[str, Pool]) -> None:
        self._front = front
        self._tiers = tiers
        self._pools = pools

    def reply(self, errand: Errand) -> tuple[Reply, AsyncGenerator[Piece, None]]:
        """Raises ModelNotFound."""
        tier = self._tiers.get(errand.tier)
        if tier is None:
            raise ModelNotFound(f"The tier {errand.tier!r} is not there any more.", param="model")
        call = Call(
            id=errand.id,
            # As it is made, whatever the caller said: its progress is told.
            request=msgspec.structs.replace(errand.request, stream=True),
            tier=tier,
            deadline=errand.deadline,
            priority=errand.priority,
            traceparent=errand.traceparent,
            trace=errand.trace,
            tenant=errand.owner.partition("/")[0],
            tokens=errand.body_bytes / BYTES_PER_TOKEN + (errand.request.max_tokens or tier.max_tokens),
            stays=True,  # It has time: its tier's whole answer is worth the wait.
        )
        return self._front.reply(call)

    async def ready(self, tier: str) -> bool:
        return "" in (await self._pools[self._tiers[tier].name].check()).values()
