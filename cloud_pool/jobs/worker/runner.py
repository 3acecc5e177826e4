"""The runners of jobs, over the gateway's service, with limits, usage, cost and audit of each run."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Protocol

import anyio
import msgspec

from causeway_server.router import errors
from causeway_server.router.types import Chunk, Embeddings, Request, Usage

from ...accounts.identity.revocation import RevocationList
from ...accounts.ledger import BYTES_PER_TOKEN, Ledger, LedgerEntry, RunEnd
from ...accounts.tenants.usage import Charge
from ...cache.caching_service import Billing, CachingService
from ...core.principal import Principal
from ...core.request_context import AnswerHead, Piece, RequestContext, TierTurn
from ...degradation.tier_sessions import TierSessions
from ...dispatch.pool import Pool
from ...storage.record import ExpiredJob, JobRecord, RunBill, tenant_of
from ...tiers.tier import Tier
from ...upstreams.inference import TokenMeter
from ...upstreams.triton.tensors import STOP_S

JobPiece = Piece | Embeddings
Embed = Callable[[RequestContext], Awaitable[tuple[AnswerHead, Embeddings]]]
"""The type of `Service.embed`. Raises CausewayError."""
_COUNT_S = 2 * STOP_S  # until the model has stopped


class TokenRevoked(errors.CausewayError, status=403, type="permission_error", code="token_revoked"):
    """The token that submitted the job, or its device, was revoked before the job ran."""


if TYPE_CHECKING:
    from ...observability.tracing import JobTrace, Trace


class RunReceipt:
    """A run's bill for its report, which also tells the accounts whether the report was accepted."""

    def __init__(self) -> None:
        self.bill: RunBill | None = None
        self._on_report: Callable[[RunEnd], None] | None = None

    def issue(self, bill: RunBill | None, on_report: Callable[[RunEnd], None]) -> None:
        """Set the bill at the end of the run. `on_report` is called with the result of its report."""
        self.bill, self._on_report = bill, on_report

    def close(self, *, accepted: bool) -> None:
        """Record whether the job store has accepted the report. Only the first call counts."""
        self._close("accepted" if accepted else "superseded")

    def cancel(self) -> None:
        """Bill the run of a cancelled job, which has no report, for what it has used."""
        self._close("cancelled")

    def _close(self, end: RunEnd) -> None:
        on_report, self._on_report = self._on_report, None
        if on_report is not None:
            on_report(end)


class JobRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run of a claimed job."""

    record: JobRecord
    request: Request  # request as its record has it, parsed
    body_bytes: int  # size of its text, bytes
    deadline: float  # deadline of this run, monotonic seconds
    trace: Trace | None = None  # trace of this run
    session: TierTurn | None = None  # None: sessions are off
    receipt: RunReceipt = msgspec.field(default_factory=RunReceipt)
    meter: TokenMeter = msgspec.field(default_factory=TokenMeter)  # meter of this run


class JobTiers(Protocol):
    """The tiers on which jobs run."""

    async def ready(self, tier: str) -> bool:
        """Return whether the tier answers a real request."""


class JobRunner(JobTiers, Protocol):
    """The interface of a job runner, which workers use."""

    def run(self, job_run: JobRun) -> AsyncGenerator[JobPiece, None]:
        """Yield the answer, first an AnswerHead, if any. Closing the generator stops the work. Raises CausewayError."""

    def record_expired(self, job: ExpiredJob) -> None:
        """Write the audit record of a job that expired while it was not running."""


class JobBackend(JobTiers, Protocol):
    """The interface of MeteredRunner's backend, which also reports an answer's source and whether it is billable."""

    def reply(self, job_run: JobRun) -> tuple[Billing, AsyncGenerator[JobPiece, None]]:
        """Start the answer. Raises CausewayError, and so may the generator."""

    def max_tokens(self, tier: str) -> int:
        """Return the maximum number of tokens of an answer of the tier, if the request sets none."""


@dataclass(eq=False, repr=False)
class ServiceBackend:
    """Backend that runs jobs on the same cache and service as interactive requests."""

    caching_service: CachingService
    embed: Embed  # makes vectors, which are neither cached nor shared
    tiers: Mapping[str, Tier]  # tiers by name
    pools: Mapping[str, Pool]  # endpoints by the tier's name

    def reply(self, job_run: JobRun) -> tuple[Billing, AsyncGenerator[JobPiece, None]]:
        """Start the answer. Raises ModelNotFound."""
        context = self._context(job_run)
        if context.request.kind == "embedding":
            return Billing(lambda _: None, ""), self._vectors(context)
        return self.caching_service.reply(context)

    async def _vectors(self, context: RequestContext) -> AsyncGenerator[JobPiece, None]:
        for piece in await self.embed(context):
            yield piece

    def _context(self, job_run: JobRun) -> RequestContext:
        """Return the request's context. Raises ModelNotFound."""
        record = job_run.record
        named = self.tiers.get(job_run.request.model)  # with its adapter, if it has one
        tier = named if named is not None and named.name == record.tier else self.tiers.get(record.tier)
        if tier is None:
            raise errors.ModelNotFound(f"The tier {record.tier!r} no longer exists.", param="model")
        return RequestContext(
            id=record.id,
            # Always streamed, so that progress can be reported.
            request=msgspec.structs.replace(job_run.request, stream=True),
            session=job_run.session,
            tier=tier,
            deadline=job_run.deadline,
            priority=record.priority,
            traceparent=record.traceparent,
            trace=job_run.trace,
            tenant=tenant_of(record.owner),
            tokens=job_run.body_bytes / BYTES_PER_TOKEN * job_run.request.n / job_run.request.sequences
            + (0 if job_run.request.kind == "embedding" else job_run.request.max_tokens or tier.max_tokens),
            critical=True,  # A job has time to wait for a whole answer of its own tier.
            meter=job_run.meter,
        )

    def max_tokens(self, tier: str) -> int:
        """Return the tier's own limit; 0 for a tier that no longer exists."""
        return self.tiers[tier].max_tokens if tier in self.tiers else 0

    async def ready(self, tier: str) -> bool:
        """Return whether an endpoint of the tier answers."""
        return "" in (await self.pools[self.tiers[tier].name].check()).values()


@dataclass(eq=False, repr=False)
class MeteredRunner:
    """A JobRunner over a backend.

    A tenant over its rate or budget gets RateLimited, and the job waits without losing an attempt. Such a run does not
    leave an audit record, so each job has one record per actual run, or one for its expiry. Tokens that were generated
    for another request cost the job nothing.

    A run is billed when the job store accepts its report, in the same transaction: a run that another worker has taken
    over costs nothing, and a worker that is killed after its report loses no bill. A run whose job was cancelled has no
    report: it costs its prompt and the tokens generated until it stopped.
    """

    backend: JobBackend
    ledger: Ledger
    trace: JobTrace | None = None
    revocations: RevocationList | None = None
    _: KW_ONLY
    sessions: TierSessions | None = None  # None: sessions are off
    route: str = "job"  # name of the route in usage and audit records

    async def run(self, job_run: JobRun) -> AsyncGenerator[JobPiece, None]:
        """Yield the answer of a run. Raises CausewayError."""
        record = job_run.record
        principal = _principal(record.owner)
        entry = self._open(record.id, principal, record.tier)
        refused = False
        try:
            self._check_token(record)
            limits = self.ledger.limits(principal)
            limits.check_request(job_run.request)
            request = limits.bounded(job_run.request)
            try:
                await self.ledger.admit(
                    entry,
                    principal,
                    request,
                    job_run.body_bytes,
                    max_tokens=self.backend.max_tokens(record.tier),
                    lifetime_s=max(0.0, job_run.deadline - time.monotonic()),
                    fence=record.fence,
                )
            except errors.RateLimited:
                refused = True
                raise
            job_run = await self._in_session(job_run, request)
            job_run = msgspec.structs.replace(job_run, trace=self._begin_trace(job_run))
            async with aclosing(self._stream(entry, job_run)) as pieces:
                async for piece in pieces:
                    yield piece
            entry.outcome = "ok"
        except errors.CausewayError as error:
            entry.outcome = error.code
            raise
        finally:
            if not refused:
                charge = self.ledger.charge(entry)
                job_run.receipt.issue(
                    None if charge is None else _bill(charge), lambda end: self.ledger.close_run(entry, charge, end)
                )

    async def _in_session(self, job_run: JobRun, request: Request) -> JobRun:
        """Return the run of `request` in its session, which stays at the tier that the job was accepted for."""
        record, turn = job_run.record, None
        if self.sessions is not None:
            tenant = tenant_of(record.owner)
            turn = await self.sessions.find(request, tenant, record.owner, record.tier, is_placed=True)
        if turn is not None:
            request = turn.bound(request)
            if turn.pinned != record.tier:
                turn = TierTurn(turn.turn, turn.tenant)
        return msgspec.structs.replace(job_run, request=request, session=turn)

    def _check_token(self, record: JobRecord) -> None:
        """Check the token that submitted the job. Raises TokenRevoked or IdentityUnavailable."""
        if self.revocations is None or not record.token_id:
            return
        try:
            self.revocations.check(record.owner, record.token_id, record.token_issued)
        except errors.AuthenticationFailed as error:
            raise TokenRevoked(f"The job did not run: {error.message}") from None

    async def ready(self, tier: str) -> bool:
        return await self.backend.ready(tier)

    def record_expired(self, job: ExpiredJob) -> None:
        entry = self._open(job.id, _principal(job.owner), job.tier)
        entry.outcome = errors.DeadlineExceeded.code
        entry.billable = False
        self.ledger.close(entry)

    def _open(self, job: str, principal: Principal, tier: str) -> LedgerEntry:
        entry = self.ledger.open(self.route, {})
        entry.id, entry.principal, entry.tier = job, principal, tier
        return entry

    def _begin_trace(self, job_run: JobRun) -> Trace | None:
        if self.trace is None:
            return None
        record = job_run.record
        return self.trace.process(job_run.request, record.id, record.tier, record.traceparent, record.attempts)

    async def _stream(self, entry: LedgerEntry, job_run: JobRun) -> AsyncGenerator[JobPiece, None]:
        billing, answer = self.backend.reply(job_run)
        usage, outcome, turn, head = Usage(), errors.ClientGone.code, job_run.session, None
        try:
            async with aclosing(answer) as pieces:
                async for piece in pieces:
                    if isinstance(piece, AnswerHead):
                        head = piece if turn is None or self.sessions is None else self.sessions.decided(turn, piece)
                        entry.response_headers = dict(head.headers)
                    else:
                        usage = piece.usage or usage
                        if turn is not None and isinstance(piece, Chunk):
                            turn.turn.add(piece)
                    yield piece
            if turn is not None and head is not None and self.sessions is not None:
                await self.sessions.keep(turn, head, job_run.request)
            outcome = "ok"
        except errors.CausewayError as error:
            outcome = error.code
            raise
        finally:
            entry.cache, entry.billable = billing.status, billing.billable
            await self._count(entry, billing, job_run, usage, abandoned=outcome == errors.ClientGone.code)
            if job_run.trace is not None:
                job_run.trace.end(tier=entry.tier, outcome=outcome, usage=entry.usage, headers=entry.response_headers)

    async def _count(
        self, entry: LedgerEntry, billing: Billing, job_run: JobRun, reported: Usage, *, abandoned: bool
    ) -> None:
        """Set the usage of a run: the reported one, or if the answer has no end, the counted one."""
        entry.usage = billing.billed(reported)
        if not billing.billable:
            return
        if entry.usage.prompt_tokens:
            entry.usage = job_run.meter.heard(entry.usage)
            return
        # A shared generation may go on for other requests; the job pays for its part until here.
        if not billing.goes_on:
            with anyio.move_on_after(_COUNT_S, shield=True):
                await job_run.meter.wait()
        consumption = job_run.meter.consumption(abandoned=abandoned)
        tokens = max(entry.usage.completion_tokens, consumption.usage.completion_tokens)
        entry.usage = job_run.meter.heard(Usage(consumption.usage.prompt_tokens, tokens))
        entry.estimated = consumption.estimated


def _principal(owner: str) -> Principal:
    tenant, _, device = owner.partition("/")
    return Principal(tenant, device, frozenset({"jobs"}))


def _bill(charge: Charge) -> RunBill:
    return RunBill(charge.reservation.tenant, charge.amounts, charge.reservation.release)
