"""One ledger entry per request: limits before it; usage, cost and one audit record after it, whatever its outcome."""

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
    """One request. The owner fills it in as facts become known and calls `Ledger.close` exactly once."""

    def __init__(self, route: str, policy: str = "") -> None:
        self.route = route  # chat, completion, embedding or job
        self.policy = policy
        self.id = ""
        self.principal: Principal | None = None
        self.tier = ""
        self.response_headers: dict[str, str] = {}
        self.reservation: TokenReservation | None = None
        self.estimated_prompt_tokens = 0  # from the body's length
        self.usage = Usage()
        self.cache = ""
        self.closes_later = False  # at the end of a shared generation, which may outlast the request
        self.billable = True  # False: the tokens were generated for another request
        self.outcome = ClientGone.code  # stays when the handler is cancelled


class Ledger:
    """Opens and closes entries.

    Args:
        wall_clock: unix time, s
    """

    def __init__(
        self,
        accounting: TenantAccounting,
        audit: AuditLog,
        metrics: TenantMetrics,
        *,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._accounting = accounting
        self._audit = audit
        self._metrics = metrics
        self._wall_clock = wall_clock

    def open(self, route: str, headers: Mapping[str, str]) -> LedgerEntry:
        """Open an entry. The policy comes from `x-causeway-policy` (name@revision), which is recorded, not trusted."""
        policy = headers.get("x-causeway-policy", "")
        return LedgerEntry(route, policy if _POLICY.fullmatch(policy) else "")

    def limits(self, principal: Principal) -> TenantLimits:
        """Return the limits of the principal's tenant."""
        return self._accounting.config.limits(principal.tenant)

    async def admit(self, entry: LedgerEntry, principal: Principal, request: Request, body_bytes: int) -> None:
        """Reserve the request's tokens. Raises RateLimited."""
        entry.estimated_prompt_tokens = body_bytes // BYTES_PER_TOKEN
        entry.reservation = await self._accounting.reserve(principal.tenant, request, body_bytes)

    def close(self, entry: LedgerEntry) -> None:
        """Settle the reservation and write the audit record. A refused request has no reservation and costs nothing."""
        usage, micro_usd = entry.usage, 0
        if entry.reservation is not None:
            if self._prompt_is_unknown(entry):
                usage = Usage(entry.estimated_prompt_tokens, usage.completion_tokens)
            micro_usd = self._accounting.settle(entry.reservation, entry.tier, entry.route, usage)
            self._metrics.count(entry.reservation.tenant, entry.tier, entry.route, usage, micro_usd)
        principal = entry.principal
        self._audit.enqueue(
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

    def _prompt_is_unknown(self, entry: LedgerEntry) -> bool:
        # The prompt's length comes with the last chunk. A client that leaves earlier has used the model all the same.
        if not entry.billable or entry.usage.prompt_tokens:
            return False
        return bool(entry.usage.completion_tokens) or entry.outcome == ClientGone.code
