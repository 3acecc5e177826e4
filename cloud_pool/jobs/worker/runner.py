"""The seam to what answers: the gateway's own service behind the shared cache, or a scripted one in tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Protocol

import msgspec

from router.errors import ModelNotFound
from router.types import Request

from ...accounts.tenants.accounting import BYTES_PER_TOKEN
from ...admission import Priority
from ...balancing.pool import Pool
from ...cache.caching_service import CachingService
from ...cache.single_flight.reply import Reply
from ...config.tiers import Tier
from ...observability.tracing import Trace
from ...serving.request_context import Piece, RequestContext


class JobRun(msgspec.Struct, frozen=True, kw_only=True):
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


class JobRunner(Protocol):
    def run(self, job_run: JobRun) -> AsyncGenerator[Piece, None]:
        """A Head, where anything is known of the answer, and the answer. Raises CausewayError; closing it stops the
        work."""

    async def ready(self, tier: str) -> bool:
        """Whether the tier answers, by a real request."""


class JobBackend(Protocol):
    """A runner that also says where an answer came from, and who pays for it."""

    def reply(self, job_run: JobRun) -> tuple[Reply, AsyncGenerator[Piece, None]]:
        """They raise CausewayError, and so may this."""

    async def ready(self, tier: str) -> bool: ...


class ServiceBackend:
    """Jobs on the same cache and service as interactive requests. `tiers` and `pools` by the tier's name."""

    def __init__(self, caching_service: CachingService, tiers: Mapping[str, Tier], pools: Mapping[str, Pool]) -> None:
        self._front = caching_service
        self._tiers = tiers
        self._pools = pools

    def reply(self, job_run: JobRun) -> tuple[Reply, AsyncGenerator[Piece, None]]:
        """Raises ModelNotFound."""
        tier = self._tiers.get(job_run.tier)
        if tier is None:
            raise ModelNotFound(f"The tier {job_run.tier!r} is not there any more.", param="model")
        call = RequestContext(
            id=job_run.id,
            # As it is made, whatever the caller said: its progress is told.
            request=msgspec.structs.replace(job_run.request, stream=True),
            tier=tier,
            deadline=job_run.deadline,
            priority=job_run.priority,
            traceparent=job_run.traceparent,
            trace=job_run.trace,
            tenant=job_run.owner.partition("/")[0],
            tokens=job_run.body_bytes / BYTES_PER_TOKEN + (job_run.request.max_tokens or tier.max_tokens),
            critical=True,  # It has time: its tier's whole answer is worth the wait.
        )
        return self._front.reply(call)

    async def ready(self, tier: str) -> bool:
        return "" in (await self._pools[self._tiers[tier].name].check()).values()
