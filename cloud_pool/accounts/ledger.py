"""One ledger entry per request: limits before it; usage, cost and one audit record after it, whatever its outcome."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import anyio
import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from router.errors import ClientGone, InvalidRequest
from router.types import Request, Usage

from ..core.principal import Principal
from .audit import AuditLog, AuditRecord
from .tenants.config import MICRO_USD_PER_USD, Price, TenantLimits, TenantsConfig
from .tenants.rate_limiter import TenantRateLimiter
from .tenants.usage import Charge, Demand, Reservation, UsageRecorder

BYTES_PER_TOKEN = 4  # of English text; `settle` corrects the estimate
_MIN_BYTES_PER_TOKEN = 2  # of code, numbers and other languages: what a prompt may cost
_ANSWER_TOKENS = 256  # reserved for an answer without a maximum length
_LIFETIME_MARGIN_S = 30.0  # for the flush, and for a generation that goes on for other requests
ReadValue = Callable[[], float]
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


class TenantAccounting:
    """Limits and usage together: reserves requests, settles them, and writes usage to Redis in the background."""

    def __init__(self, config: TenantsConfig, limiter: TenantRateLimiter, usage: UsageRecorder) -> None:
        self.config = config
        self.usage = usage
        self._prices = {price.tier: price for price in config.prices}
        self._limiter = limiter

    async def reserve(
        self,
        tenant: str,
        request: Request,
        body_bytes: int,
        *,
        tier: str,
        max_tokens: int,
        lifetime_s: float,
        job: str = "",
        fence: int = 0,
    ) -> Reservation:
        """Reserve an estimate of the request's tokens, before it is tokenised, and the most that it may cost.

        Args:
            max_tokens: of an answer, if the request names no maximum
            lifetime_s: within which the request ends, or its process was killed
            job, fence: of a job's run

        Raises:
            RateLimited: a rate or the budget does not allow it now
            InvalidRequest: it may cost more than the budget of a day
        """
        tokens = body_bytes // BYTES_PER_TOKEN + _answers(request) * (request.max_tokens or _ANSWER_TOKENS)
        demand = Demand(
            sequences=request.sequences,
            tokens=tokens,
            micro_usd=self.check_cost(tenant, tier, request, body_bytes, max_tokens),
            lifetime_s=lifetime_s + _LIFETIME_MARGIN_S,
            job=job,
            fence=fence,
        )
        return await self._limiter.reserve(tenant, demand)

    def check_cost(self, tenant: str, tier: str, request: Request, body_bytes: int, max_tokens: int) -> int:
        """Return the most that a request may cost, micro-USD.

        Args:
            max_tokens: of an answer, if the request names no maximum

        Raises:
            InvalidRequest: it is more than the budget of a day, so that the request could never run
        """
        answer_tokens = (request.max_tokens or max_tokens) * _answers(request)
        most = Usage(math.ceil(body_bytes / _MIN_BYTES_PER_TOKEN), answer_tokens)
        micro_usd = self._price(tier).micro_usd(most)
        usd_per_day = self.config.limits(tenant).usd_per_day
        if usd_per_day and micro_usd > usd_per_day * MICRO_USD_PER_USD:
            raise InvalidRequest(
                f"this request may cost up to {micro_usd / MICRO_USD_PER_USD:g} USD, and your budget is"
                f" {usd_per_day:g} USD a day: ask for fewer tokens",
                param=request.limit_name,
            )
        return micro_usd

    async def take_submission(self, tenant: str) -> None:
        """Count a submission of a job, file or batch. Raises RateLimited."""
        await self._limiter.take_submission(tenant)

    async def take_reads(self, tenant: str, reads: int) -> None:
        """Count reads of jobs, files and batches. Raises RateLimited."""
        await self._limiter.take_reads(tenant, reads)

    def charge(self, reservation: Reservation, tier: str, route: str, usage: Usage) -> Charge:
        """Return what a request has cost."""
        return Charge(reservation, tier, route, usage, self._price(tier).micro_usd(usage))

    def settle(self, charge: Charge) -> None:
        """Record what a request has used, exactly once per reservation."""
        self._limiter.settle(charge)
        self.usage.record(charge)

    def settle_run(self, charge: Charge, *, accepted: bool) -> None:
        """Settle a job's run. Its report has billed it, or was not accepted: then it costs nothing."""
        self._limiter.settle(charge)
        if not accepted:
            self.usage.release(charge.reservation)

    async def watch(self) -> None:
        """Flush every `usage_flush_s`, until cancelled."""
        while True:
            await self.flush()
            await anyio.sleep(self.config.usage_flush_s)

    async def flush(self) -> None:
        """Write what was settled since the last flush to Redis, and meet the other gateways."""
        # Usage first: what was spent while Redis was away is then part of what the budget is checked against.
        await self.usage.flush()
        await self._limiter.flush()

    def _price(self, tier: str) -> Price:
        return self._prices.get(tier, Price(tier=tier))


def _answers(request: Request) -> int:
    return 0 if request.kind == "embedding" else request.sequences


class _ReadCounter(Collector):
    """A counter that another object keeps; it is read at every scrape."""

    def __init__(self, name: str, help_text: str, read: ReadValue) -> None:
        self._name, self._help_text, self._read = name, help_text, read

    def collect(self) -> Iterator[CounterMetricFamily]:
        yield CounterMetricFamily(self._name, self._help_text, value=self._read())


class TenantMetrics:
    """Prometheus metrics: usage by tenant, and what accounting had to skip.

    Tenants' names come from signed tokens and the configuration, never from a request's content.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._tokens = Counter(
            "causeway_cloud_tenant_tokens", "Tokens used, by tenant.", ("tenant", "tier", "type"), registry=registry
        )
        self._usd = Counter(
            "causeway_cloud_tenant_usd", "Cost in USD, by tenant.", ("tenant", "tier", "route"), registry=registry
        )

    def count(self, tenant: str, tier: str, route: str, usage: Usage, micro_usd: int) -> None:
        """Count one request."""
        self._tokens.labels(tenant, tier, "prompt").inc(usage.prompt_tokens)
        self._tokens.labels(tenant, tier, "completion").inc(usage.completion_tokens)
        self._usd.labels(tenant, tier, route).inc(micro_usd / MICRO_USD_PER_USD)

    def watch(
        self,
        *,
        local_checks: ReadValue,
        stale_accepts: ReadValue,
        revocations_restored: ReadValue,
        usage_lost: ReadValue,
        audit_lost: ReadValue,
        redis_evicts: ReadValue,
        key_file_stale: ReadValue,
        fleet_unreachable: ReadValue,
    ) -> None:
        """Export these values; each is read at every scrape."""
        for name, text, read in (
            (
                "causeway_cloud_local_rate_checks",
                "Rate and budget checks made without Redis, against this gateway's share.",
                local_checks,
            ),
            (
                "causeway_cloud_stale_revocation_accepts",
                "Tokens accepted while the copy of the revocations was too old.",
                stale_accepts,
            ),
            (
                "causeway_cloud_revocations_restored",
                "Revocations that Redis had lost and that this process wrote back.",
                revocations_restored,
            ),
            ("causeway_cloud_usage_records_lost", "Requests missing in the tenants' usage.", usage_lost),
            ("causeway_cloud_audit_records_lost", "Audit records that were not written.", audit_lost),
        ):
            self._registry.register(_ReadCounter(name, text, read))
        Gauge(
            "causeway_cloud_redis_evicts",
            "1 while the Redis of budgets, usage and revocations may evict keys.",
            registry=self._registry,
        ).set_function(redis_evicts)
        Gauge(
            "causeway_cloud_key_file_stale",
            "1 while the last change of the key file is invalid and therefore not in use.",
            registry=self._registry,
        ).set_function(key_file_stale)
        Gauge(
            "causeway_cloud_fleet_unreachable",
            "1 while keys and revocations of the fleet's control plane cannot be read.",
            registry=self._registry,
        ).set_function(fleet_unreachable)
