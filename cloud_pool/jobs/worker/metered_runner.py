"""Tenant limits, usage, cost and an audit record for each run of a job.

A run is billed when the job store accepts its report, in the same transaction: a run that another worker has taken
over costs nothing, and a worker that is killed after its report loses no bill. A run whose job was cancelled has no
report: it costs its prompt and what was generated until it stopped.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import anyio
import msgspec

from router.errors import AuthenticationFailed, CausewayError, ClientGone, DeadlineExceeded, RateLimited
from router.types import Usage

from ...accounts.identity.revocation import RevocationList
from ...accounts.ledger import Ledger, LedgerEntry
from ...accounts.tenants.usage import Charge
from ...cache.caching_service import Billing
from ...core.late import LateReading
from ...core.principal import Principal
from ...core.request_context import AnswerHead
from ...observability.tracing import JobTrace, Trace
from ...storage.errors import TokenRevoked
from ...storage.jobs.replies import ExpiredJob
from ...storage.record import RunBill
from ...upstreams.triton.calls import STOP_S
from .runner import JobBackend, JobPiece, JobRun

_COUNT_S = 2 * STOP_S  # until the model has stopped


class MeteredRunner:
    """A JobRunner over a backend.

    A tenant over its rate or budget gets RateLimited, and the job waits without losing an attempt; this run leaves no
    audit record, so that each job has one for each run that happened, or one that says that it expired. Tokens that
    were generated for another request cost the job nothing.
    """

    def __init__(
        self,
        backend: JobBackend,
        ledger: Ledger,
        trace: JobTrace | None = None,
        revocations: RevocationList | None = None,
        *,
        route: str = "job",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`route`: in usage and audit records; `clock`: monotonic time, s, of the runs' deadlines."""
        self._backend = backend
        self._revocations = revocations
        self._ledger = ledger
        self._trace = trace
        self._route = route
        self._clock = clock

    async def run(self, job_run: JobRun) -> AsyncGenerator[JobPiece, None]:
        """Raises CausewayError."""
        principal = _principal(job_run.owner)
        entry = self._open(job_run.id, principal, job_run.tier)
        refused = False
        try:
            self._check_token(job_run)
            limits = self._ledger.limits(principal)
            limits.check_request(job_run.request)
            request = limits.bounded(job_run.request)
            try:
                await self._ledger.admit(
                    entry,
                    principal,
                    request,
                    job_run.body_bytes,
                    max_tokens=self._backend.max_tokens(job_run.tier),
                    lifetime_s=max(0.0, job_run.deadline - self._clock()),
                    fence=job_run.fence,
                )
            except RateLimited:
                refused = True
                raise
            job_run = msgspec.structs.replace(job_run, request=request, trace=self._begin_trace(job_run))
            async with aclosing(self._stream(entry, job_run)) as pieces:
                async for piece in pieces:
                    yield piece
            entry.outcome = "ok"
        except CausewayError as error:
            entry.outcome = error.code
            raise
        finally:
            if not refused:
                charge = _discounted(self._ledger.charge(entry), job_run.price_share)
                job_run.receipt.issue(
                    None if charge is None else _bill(charge),
                    lambda end: self._ledger.close_run(entry, charge, end),
                )

    def _check_token(self, job_run: JobRun) -> None:
        """Raises TokenRevoked or IdentityUnavailable."""
        if self._revocations is None or not job_run.token_id:
            return
        try:
            self._revocations.check(job_run.owner, job_run.token_id, job_run.token_issued)
        except AuthenticationFailed as error:
            raise TokenRevoked(f"The job did not run: {error.message}.") from None

    async def ready(self, tier: str) -> bool:
        """Whether the tier answers."""
        return await self._backend.ready(tier)

    def read_late(self, job_run: JobRun, by: float) -> LateReading | None:
        """Return the late parts' reading, or None; see `JobRunner.read_late`."""
        return self._backend.read_late(job_run, by)

    def record_expired(self, job: ExpiredJob) -> None:
        """Write the audit record of a job that expired while it was not running."""
        entry = self._open(job.id, _principal(job.owner), job.tier)
        entry.outcome = DeadlineExceeded.code
        entry.billable = False
        self._ledger.close(entry)

    def _open(self, job: str, principal: Principal, tier: str) -> LedgerEntry:
        entry = self._ledger.open(self._route, {})
        entry.id, entry.principal, entry.tier = job, principal, tier
        return entry

    def _begin_trace(self, job_run: JobRun) -> Trace | None:
        if self._trace is None:
            return None
        return self._trace.process(job_run.request, job_run.id, job_run.tier, job_run.traceparent, job_run.attempt)

    async def _stream(self, entry: LedgerEntry, job_run: JobRun) -> AsyncGenerator[JobPiece, None]:
        billing, answer = self._backend.reply(job_run)
        usage, outcome = Usage(), ClientGone.code
        try:
            async with aclosing(answer) as pieces:
                async for piece in pieces:
                    if isinstance(piece, AnswerHead):
                        entry.response_headers = dict(piece.headers)
                    else:
                        usage = piece.usage or usage
                    yield piece
            outcome = "ok"
        except CausewayError as error:
            outcome = error.code
            raise
        finally:
            entry.cache, entry.billable = billing.status, billing.billable
            await self._count(entry, billing, job_run, usage, abandoned=outcome == ClientGone.code)
            if job_run.trace is not None:
                job_run.trace.end(tier=entry.tier, outcome=outcome, usage=entry.usage, headers=entry.response_headers)

    async def _count(
        self, entry: LedgerEntry, billing: Billing, job_run: JobRun, reported: Usage, *, abandoned: bool
    ) -> None:
        """Set what a run has used: what the answer reported, or, without its end, what was counted upstream."""
        entry.usage = billing.billed(reported)
        if entry.usage.prompt_tokens or not billing.billable:
            return
        # A shared generation may go on for other requests; the job pays for its part until here.
        if not billing.goes_on:
            with anyio.move_on_after(_COUNT_S, shield=True):
                await job_run.meter.wait()
        consumption = job_run.meter.consumption(abandoned=abandoned)
        tokens = max(entry.usage.completion_tokens, consumption.usage.completion_tokens)
        entry.usage, entry.estimated = Usage(consumption.usage.prompt_tokens, tokens), consumption.estimated


def _principal(owner: str) -> Principal:
    tenant, _, device = owner.partition("/")
    return Principal(tenant, device, frozenset({"jobs"}))


def _discounted(charge: Charge | None, share: float) -> Charge | None:
    return charge and msgspec.structs.replace(charge, micro_usd=round(charge.micro_usd * share))


def _bill(charge: Charge) -> RunBill:
    return RunBill(charge.reservation.tenant, charge.amounts, charge.reservation.release)
