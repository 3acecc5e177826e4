"""One ledger entry per request: limits before it; usage, cost and one audit record after it, whatever its outcome."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

from router.errors import ClientGone
from router.types import Request, Usage

from ..core.principal import Principal
from .audit import AuditLog, AuditRecord
from .tenants.accounting import BYTES_PER_TOKEN, TenantAccounting
from .tenants.config import TenantLimits
from .tenants.metrics import TenantMetrics
from .tenants.usage import Charge, Reservation

RunEnd = Literal["accepted", "superseded", "cancelled"]
"""What became of the report of a job's run."""
SUPERSEDED = "superseded"
"""Outcome of a job's run whose report the job store did not accept."""
_POLICY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}(@[A-Za-z0-9._-]{1,64})?")


class LedgerEntry:
    """One request. The owner fills it in as facts become known and calls `Ledger.close` exactly once."""

    def __init__(self, route: str, policy: str = "") -> None:
        self.route = route  # chat, completion, embedding, response, transcription, generate, realtime, job or stream
        self.policy = policy
        self.id = ""
        self.principal: Principal | None = None
        self.tier = ""
        self.response_headers: dict[str, str] = {}
        self.reservation: Reservation | None = None
        self.estimated_prompt_tokens = 0  # from the body's length
        self.usage = Usage()
        self.estimated = False  # the prompt's tokens in `usage` are an estimate
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

    async def admit_submission(self, principal: Principal) -> None:
        """Count a submission of a job or batch against the tenant's rate of submissions. Raises RateLimited."""
        await self._accounting.take_submission(principal.tenant)

    async def admit_reads(self, principal: Principal, reads: int) -> None:
        """Count reads of jobs, files and batches against the tenant's rate of reads. Raises RateLimited."""
        await self._accounting.take_reads(principal.tenant, reads)

    async def admit(
        self,
        entry: LedgerEntry,
        principal: Principal,
        request: Request,
        body_bytes: int,
        *,
        max_tokens: int,
        lifetime_s: float,
        fence: int = 0,
    ) -> None:
        """Reserve the request's tokens and the most that it may cost. `entry.tier` is the tier that it names.

        Args:
            max_tokens: of an answer, if the request names no maximum
            lifetime_s: within which the request ends, or its process was killed
            fence: of a job's run; its reservation is the job's

        Raises:
            RateLimited: a rate or the budget does not allow it now
            InvalidRequest: it may cost more than the budget of a day
        """
        entry.estimated_prompt_tokens = body_bytes // BYTES_PER_TOKEN
        entry.reservation = await self._accounting.reserve(
            principal.tenant,
            request,
            body_bytes,
            tier=entry.tier,
            max_tokens=max_tokens,
            lifetime_s=lifetime_s,
            job=entry.id if fence else "",
            fence=fence,
        )

    def charge(self, entry: LedgerEntry) -> Charge | None:
        """Return what a request costs that has ended; None if it was refused: then it has no reservation."""
        if entry.reservation is None:
            return None
        usage = entry.usage
        if entry.billable and usage.completion_tokens and not usage.prompt_tokens:  # the model told no number
            usage = Usage(entry.estimated_prompt_tokens, usage.completion_tokens)
            entry.estimated = True
        return self._accounting.charge(entry.reservation, entry.tier, entry.route, usage)

    def close(self, entry: LedgerEntry) -> None:
        """Settle the reservation, record the usage and write the audit record."""
        charge = self.charge(entry)
        if charge is not None:
            self._accounting.settle(charge)
        self._record(entry, charge)

    def close_run(self, entry: LedgerEntry, charge: Charge | None, end: RunEnd) -> None:
        """Close a job's run after its report, which has recorded the usage if the job store has accepted it.

        A run whose job was cancelled costs what it has used, as an answer does whose client has left. One that another
        run has superseded costs nothing.
        """
        accepted = end == "accepted"
        if end == "cancelled":
            entry.outcome = ClientGone.code
            if charge is not None:
                self._accounting.settle(charge)
            self._record(entry, charge)
            return
        if charge is not None:
            self._accounting.settle_run(charge, accepted=accepted)
            charge = charge if accepted else msgspec.structs.replace(charge, micro_usd=0)
        if not accepted:
            entry.outcome = SUPERSEDED
        self._record(entry, charge)

    def _record(self, entry: LedgerEntry, charge: Charge | None) -> None:
        if charge is not None and entry.outcome != SUPERSEDED:
            self._metrics.count(charge.reservation.tenant, entry.tier, entry.route, charge.usage, charge.micro_usd)
        usage = entry.usage if charge is None else charge.usage
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
                micro_usd=0 if charge is None else charge.micro_usd,
                estimated=entry.estimated,
                cache=entry.cache,
                parts=entry.response_headers.get("x-causeway-modalities", ""),
            )
        )
