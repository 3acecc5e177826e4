"""Interfaces to what answers a job, and the gateway's own service as its implementation."""

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
from ..store.replies import ExpiredJob


class JobRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a claimed job."""

    id: str
    owner: str  # tenant/device
    body_bytes: int
    request: Request
    tier: str
    priority: Priority
    deadline: float  # monotonic, s
    attempt: int = 1
    traceparent: str = ""  # of the span that submitted the job
    trace: Trace | None = None  # of this run


class JobRunner(Protocol):
    """What a worker needs."""

    def run(self, job_run: JobRun) -> AsyncGenerator[Piece, None]:
        """Yield the answer, after an AnswerHead if the backend knows one. Closing it stops the work.

        Raises CausewayError.
        """

    async def ready(self, tier: str) -> bool:
        """Whether the tier answers a real request."""

    def record_expired(self, job: ExpiredJob) -> None:
        """Write the audit record of a job that expired while it was not running."""


class JobBackend(Protocol):
    """What MeteredRunner needs: it also reports where an answer came from and whether it is billable."""

    def reply(self, job_run: JobRun) -> tuple[Reply, AsyncGenerator[Piece, None]]:
        """Raises CausewayError, and so may the generator."""

    async def ready(self, tier: str) -> bool: ...


class ServiceBackend:
    """Runs jobs on the same cache and service as interactive requests. `tiers` and `pools` are by the tier's name."""

    def __init__(self, caching_service: CachingService, tiers: Mapping[str, Tier], pools: Mapping[str, Pool]) -> None:
        self._caching_service = caching_service
        self._tiers = tiers
        self._pools = pools

    def reply(self, job_run: JobRun) -> tuple[Reply, AsyncGenerator[Piece, None]]:
        """Raises ModelNotFound."""
        tier = self._tiers.get(job_run.tier)
        if tier is None:
            raise ModelNotFound(f"The tier {job_run.tier!r} does not exist any more.", param="model")
        context = RequestContext(
            id=job_run.id,
            # Always streamed, so that progress can be reported.
            request=msgspec.structs.replace(job_run.request, stream=True),
            tier=tier,
            deadline=job_run.deadline,
            priority=job_run.priority,
            traceparent=job_run.traceparent,
            trace=job_run.trace,
            tenant=job_run.owner.partition("/")[0],
            tokens=job_run.body_bytes / BYTES_PER_TOKEN + (job_run.request.max_tokens or tier.max_tokens),
            critical=True,  # A job has time to wait for a whole answer of its own tier.
        )
        return self._caching_service.reply(context)

    async def ready(self, tier: str) -> bool:
        """Whether an endpoint of the tier answers."""
        return "" in (await self._pools[self._tiers[tier].name].check()).values()
