"""A run that counts: a tenant's caps, rates and costs hold for jobs too, and each run leaves one audit record."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from router.errors import CausewayError, ClientGone
from router.types import Usage

from ...accounts.identity.principal import Principal
from ...accounts.ledger import Ledger, LedgerEntry
from ...observability.tracing import JobTrace, Trace
from ...serving.request_context import AnswerHead, Piece
from .runner import JobBackend, JobRun


class MeteredRunner:
    """A tenant over its rate gets RateLimited, and its job waits without losing an attempt. What was not made for a job
    costs it no tokens."""

    def __init__(self, answers: JobBackend, ledger: Ledger, trace: JobTrace | None = None) -> None:
        self._answers = answers
        self._ledger = ledger
        self._trace = trace

    async def run(self, job_run: JobRun) -> AsyncGenerator[Piece, None]:
        """Raises CausewayError."""
        tenant, _, device = job_run.owner.partition("/")
        principal = Principal(tenant, device, frozenset({"jobs"}))
        entry = self._ledger.open("job", {})
        entry.id, entry.principal, entry.tier = job_run.id, principal, job_run.tier
        try:
            limits = self._ledger.limits(principal)
            limits.check_request(job_run.request)
            request = limits.bounded(job_run.request)
            await self._ledger.admit(entry, principal, request, job_run.body_bytes)
            job_run = msgspec.structs.replace(job_run, request=request, trace=self._traced(job_run))
            async with aclosing(self._answered(entry, job_run)) as pieces:
                async for piece in pieces:
                    yield piece
            entry.outcome = "ok"
        except CausewayError as error:
            entry.outcome = error.code
            raise
        finally:
            if not entry.deferred:
                self._ledger.close(entry)

    async def ready(self, tier: str) -> bool:
        return await self._answers.ready(tier)

    def _traced(self, job_run: JobRun) -> Trace | None:
        if self._trace is None:
            return None
        return self._trace.process(job_run.request, job_run.id, job_run.tier, job_run.traceparent, job_run.attempt)

    async def _answered(self, entry: LedgerEntry, job_run: JobRun) -> AsyncGenerator[Piece, None]:
        reply, answer = self._answers.reply(job_run)
        seen, outcome = Usage(), ClientGone.code

        def used(usage: Usage) -> None:
            entry.usage = usage
            if job_run.trace is not None:
                job_run.trace.end(tier=entry.tier, outcome=outcome, usage=usage, headers=entry.told)
            if entry.deferred:
                self._ledger.close(entry)

        try:
            async with aclosing(answer) as pieces:
                async for piece in pieces:
                    if isinstance(piece, AnswerHead):
                        entry.told = dict(piece.headers)
                    else:
                        seen = piece.usage or seen
                    yield piece
            outcome = "ok"
        except CausewayError as error:
            outcome = error.code
            raise
        finally:
            entry.cache, entry.paid = reply.status, reply.billable
            entry.deferred = not reply.settle(seen, used)
