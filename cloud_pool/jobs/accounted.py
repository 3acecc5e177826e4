"""A run that counts: a tenant's caps, rates and costs hold for jobs too, and each run leaves one audit record."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from router.errors import CausewayError, ClientGone
from router.types import Usage

from ..call import Head, Piece
from ..identity.principal import Principal
from ..ledger import Entry, Ledger
from ..traced import JobTrace, Trace
from .runner import Answers, Errand


class AccountedRunner:
    """A tenant over its rate gets RateLimited, and its job waits without losing an attempt. What was not made for a job
    costs it no tokens."""

    def __init__(self, answers: Answers, ledger: Ledger, trace: JobTrace | None = None) -> None:
        self._answers = answers
        self._ledger = ledger
        self._trace = trace

    async def run(self, errand: Errand) -> AsyncGenerator[Piece, None]:
        """Raises CausewayError."""
        tenant, _, device = errand.owner.partition("/")
        principal = Principal(tenant, device, frozenset({"jobs"}))
        entry = self._ledger.open("job", {})
        entry.id, entry.principal, entry.tier = errand.id, principal, errand.tier
        try:
            limits = self._ledger.limits(principal)
            limits.check_request(errand.request)
            request = limits.bounded(errand.request)
            await self._ledger.admit(entry, principal, request, errand.body_bytes)
            errand = msgspec.structs.replace(errand, request=request, trace=self._traced(errand))
            async with aclosing(self._answered(entry, errand)) as pieces:
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

    def _traced(self, errand: Errand) -> Trace | None:
        if self._trace is None:
            return None
        return self._trace.process(errand.request, errand.id, errand.tier, errand.traceparent, errand.attempt)

    async def _answered(self, entry: Entry, errand: Errand) -> AsyncGenerator[Piece, None]:
        reply, answer = self._answers.reply(errand)
        seen, outcome = Usage(), ClientGone.code

        def used(usage: Usage) -> None:
            entry.usage = usage
            if errand.trace is not None:
                errand.trace.end(tier=entry.tier, outcome=outcome, usage=usage, headers=entry.told)
            if entry.deferred:
                self._ledger.close(entry)

        try:
            async with aclosing(answer) as pieces:
                async for piece in pieces:
                    if isinstance(piece, Head):
                        entry.told = dict(piece.headers)
                    else:
                        seen = piece.usage or seen
                    yield piece
            outcome = "ok"
        except CausewayError as error:
            outcome = error.code
            raise
        finally:
            entry.cache, entry.paid = reply.status, reply.paid
            entry.deferred = not reply.account(seen, used)
