"""What each request leaves behind, whatever becomes of it: its tenant's usage and cost, and one audit record."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping

from router.errors import ClientGone
from router.types import Request, Usage

from .audit import AuditLog, AuditRecord
from .identity.principal import Principal
from .tenants.accounting import BYTES_PER_TOKEN, TenantAccounting
from .tenants.config import TenantLimits
from .tenants.metrics import TenantMetrics
from .tenants.rate_limiter import TokenReservation

_POLICY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}(@[A-Za-z0-9._-]{1,64})?")


class LedgerEntry:
    """One request, filled in as it becomes known. `Ledger.close` is called exactly once."""

    def __init__(self, route: str) -> None:
        self.route = route
        self.id = ""
        self.principal: Principal | None = None
        self.policy = ""
        self.tier = ""
        self.told: dict[str, str] = {}  # the answer's headers about itself
        self.grant: TokenReservation | None = None
        self.prompt_guess = 0  # tokens, from the body's length
        self.usage = Usage()
        self.cache = ""
        self.deferred = False  # closed when the work is over, which outlasts the request
        self.paid = True  # whether tokens were made on this request's account
        self.outcome = ClientGone.code  # what it is when the handler is cancelled


class Ledger:
    def __init__(
        self,
        accounts: TenantAccounting,
        audit: AuditLog,
        metrics: TenantMetrics,
        *,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._accounts = accounts
        self._audit = audit
        self._metrics = metrics
        self._wall_clock = wall_clock

    def open(self, route: str, headers: Mapping[str, str]) -> LedgerEntry:
        """`x-causeway-policy` (name@revision) is the asker's own word: kept for the record, believed for nothing."""
        entry = LedgerEntry(route)
        said = headers.get("x-causeway-policy", "")
        entry.policy = said if _POLICY.fullmatch(said) else ""
        return entry

    def limits(self, principal: Principal) -> TenantLimits:
        return self._accounts.limits(principal.tenant)

    async def admit(self, entry: LedgerEntry, principal: Principal, request: Request, body_bytes: int) -> None:
        """Raises RateLimited."""
        entry.prompt_guess = body_bytes // BYTES_PER_TOKEN
        entry.grant = await self._accounts.admit(principal.tenant, request, body_bytes)

    def close(self, entry: LedgerEntry) -> None:
        usage, micro_usd = entry.usage, 0
        if entry.grant is not None:
            if entry.paid and not usage.prompt_tokens and (usage.completion_tokens or entry.outcome == ClientGone.code):
                # The prompt's length comes with the last chunk: who leaves before it has used the model all the same.
                usage = Usage(entry.prompt_guess, usage.completion_tokens)
            tenant = entry.grant.tenant
            micro_usd = self._accounts.ended(entry.grant, entry.tier, entry.route, usage)
            self._metrics.used(tenant, entry.tier, entry.route, usage, micro_usd)
        principal = entry.principal
        self._audit.offer(
            AuditRecord(
                at=self._wall_clock(),
                id=entry.id,
                tenant=principal.tenant if principal else "",
                device=principal.device if principal else "",
                token_id=principal.token_id if principal else "",
                policy=entry.policy,
                route=entry.route,
                tier=entry.tier,
                outcome=entry.outcome,
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                micro_usd=micro_usd,
                cache=entry.cache,
            )
        )
