"""A run that counts: a tenant's caps, rates and costs hold for jobs too, and each run leaves one audit record."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from router.errors import CausewayError
from router.types import Chunk

from ..identity.principal import Principal
from ..ledger import Ledger
from .runner import Errand, Runner


class AccountedRunner:
    """A tenant over its rate gets RateLimited, and its job waits without losing an attempt."""

    def __init__(self, runner: Runner, ledger: Ledger) -> None:
        self._runner = runner
        self._ledger = ledger

    async def run(self, errand: Errand) -> AsyncGenerator[Chunk, None]:
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
            async with aclosing(self._runner.run(msgspec.structs.replace(errand, request=request))) as chunks:
                async for chunk in chunks:
                    entry.usage = chunk.usage or entry.usage
                    yield chunk
            entry.outcome = "ok"
        except CausewayError as error:
            entry.outcome = error.code
            raise
        finally:
            self._ledger.close(entry)

    async def ready(self, tier: str) -> bool:
        return await self._runner.ready(tier)
