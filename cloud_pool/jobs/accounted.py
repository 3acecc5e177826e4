"""A run that counts: a tenant's caps, rates and costs hold for jobs too, and each run leaves one audit record."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from router.errors import CausewayError
from router.types import Usage

from ..call import Head, Piece
from ..identity.principal import Principal
from ..ledger import Entry, Ledger
from .runner import Answers, Errand


class AccountedRunner:
    """A tenant over its rate gets RateLimited, and its job waits without losing an attempt. What was not made for a job
    costs it no tokens."""

    def __init__(self, answers: Answers, ledger: Ledger) -> None:
        self._answers = answers
        self._ledger = ledger

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
            async with aclosing(self._answered(entry, msgspec.structs.replace(errand, request=request))) as pieces:
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

    async def _answered(self, entry: Entry, errand: Errand) -> AsyncGenerator[Piece, None]:
        reply, answer = self._answers.reply(errand)
        seen = Usage()

        def used(usage: Usage) -> None:
            entry.usage = usage
            if entry.deferred:
                self._ledger.close(entry)

        try:
            async with aclosing(answer) as pieces:
                async for piece in pieces:
                    if not isinstance(piece, Head):
                        seen = piece.usage or seen
                    yield piece
        finally:
            entry.cache, entry.paid = reply.status, reply.paid
            entry.deferred = not reply.account(seen, used)
