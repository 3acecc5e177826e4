"""A ledger entry per request: limits before it; usage, cost and one audit record after it, whatever its outcome."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import anyio
import msgspec
from prometheus_client import CollectorRegistry

from causeway_server.router.errors import ClientGone, InvalidRequest
from causeway_server.router.parts.reading import count_parts
from causeway_server.router.prices import FREE, PICO_USD
from causeway_server.router.serving.metrics import Counter, Histogram
from causeway_server.router.types import Request, Usage

from ..core.principal import Principal
from .audit import AuditLog, AuditRecord
from .tenants.config import TenantLimits, TenantsConfig
from .tenants.rate_limiter import TenantRateLimiter
from .tenants.usage import Charge, Demand, Reservation, UsageRecorder

BYTES_PER_TOKEN = 4  # of English text; `settle` corrects the estimate
_MIN_BYTES_PER_TOKEN = 2  # of code, numbers and other languages: what a prompt may cost
_ANSWER_TOKENS = 256  # reserved for an answer without a maximum length
_MOST_AUDIO_MS = 120_000  # of a clip, as encoders read it unless `causeway-cloud triton --max-audio-s` says otherwise
_LIFETIME_MARGIN_S = 30.0  # for the flush, and for a generation that goes on for other requests
RunEnd = Literal["accepted", "superseded", "cancelled"]
"""Result of reporting a job's run to the job store."""
MAX_TENANTS = 256  # with series of their own in a process; the rest are "other"
_FIRST_TOKEN_S = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
SUPERSEDED = "superseded"
"""Outcome of a job's run whose report the job store did not accept."""
_BACKGROUND = frozenset({"job", "stream"})
_POLICY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}(@[A-Za-z0-9._-]{1,64})?")


class LedgerEntry:
    """Entry of one request. The owner fills it in as facts become known and calls `Ledger.close` exactly once."""

    def __init__(self, route: str, policy: str = "", request_id: str = "") -> None:
        self.route = route  # chat, completion, embedding, response, transcription, generate, realtime, job or stream
        self.policy = policy
        self.id = request_id
        self.principal: Principal | None = None
        self.tier = ""
        self.response_headers: dict[str, str] = {}
        self.reservation: Reservation | None = None
        self.of_key: Reservation | None = None  # of the budget of its API key
        self.estimated_prompt_tokens = 0  # from the body's length
        self.usage = Usage()
        self.first_token_s: float | None = None  # from the request's arrival; None: there was none
        self.estimated = False  # the prompt's tokens in `usage` are an estimate
        self.cache = ""
        self.closes_later = False  # at the end of a shared generation, which may outlast the request
        self.billable = True  # False: the tokens were generated for another request
        self.admitted = False  # so that it has an outcome of its own
        self.outcome = ClientGone.code  # stays when the handler is cancelled

    @property
    def variant(self) -> str:
        """The tier's variant that answered; "" for the tier's own model."""
        return self.response_headers.get("x-causeway-variant", "")


class Ledger(msgspec.Struct, frozen=True):
    """The ledger: limits before a request; usage after it, which is written to Redis in the background."""

    config: TenantsConfig
    limiter: TenantRateLimiter
    usage: UsageRecorder
    audit: AuditLog
    metrics: TenantMetrics
    wall_clock: Callable[[], float] = time.time  # unix, s

    def open(self, route: str, headers: Mapping[str, str], request_id: str = "") -> LedgerEntry:
        """Open an entry. The policy comes from `x-causeway-policy` (name@revision), which is recorded, not trusted."""
        policy = headers.get("x-causeway-policy", "")
        return LedgerEntry(route, policy if policy and _POLICY.fullmatch(policy) else "", request_id)

    def limits(self, principal: Principal) -> TenantLimits:
        return self.config.limits(principal.tenant)

    async def admit_submission(self, principal: Principal) -> None:
        """Count a submission of a job or batch against the tenant's rate of submissions. Raises RateLimited."""
        await self.limiter.take_submission(principal.tenant)

    async def admit_reads(self, principal: Principal, reads: int) -> None:
        """Count reads of jobs, files and batches against the tenant's rate of reads. Raises RateLimited."""
        await self.limiter.take_reads(principal.tenant, reads)

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
        """Reserve an estimate of the request's tokens before it is tokenised, and its maximum cost.

        Args:
            max_tokens: Maximum length of an answer, if the request names no maximum.
            lifetime_s: Time after which the request has ended or its process was killed.
            fence: Fence of a job's run, whose reservation belongs to the job.

        Raises:
            RateLimited: A rate or the budget does not allow the request now.
            InvalidRequest: The request may cost more than the budget of a day.
        """
        entry.estimated_prompt_tokens = body_bytes // BYTES_PER_TOKEN
        sequences = request.sequences
        answers = 0 if request.kind == "embedding" else sequences
        demand = Demand(
            sequences=sequences,
            tokens=entry.estimated_prompt_tokens + answers * (request.max_tokens or _ANSWER_TOKENS),
            pico_usd=self.check_cost(principal.tenant, entry.tier, request, body_bytes, max_tokens),
            lifetime_s=lifetime_s + _LIFETIME_MARGIN_S,
            job=entry.id if fence else "",
            fence=fence,
        )
        if principal.usd_per_day and demand.pico_usd > principal.usd_per_day * PICO_USD:
            raise _too_costly(demand.pico_usd, principal.usd_per_day, request)
        entry.reservation = await self.limiter.reserve(principal.tenant, demand)
        if principal.usd_per_day:
            entry.of_key = await self.limiter.reserve_of_key(principal, demand)

    def check_cost(self, tenant: str, tier: str, request: Request, body_bytes: int, max_tokens: int) -> int:
        """Return the maximum cost of a request, in 1e-12 USD. `max_tokens`: for a request without a maximum of its own.

        Raises InvalidRequest if it exceeds the budget of a day, so that the request could never run.
        """
        price = self.config.price(tier)
        if price is FREE:
            return 0
        answers = 0 if request.kind == "embedding" else request.sequences
        answer_tokens = (request.max_tokens or max_tokens) * answers
        audio_ms = _most_audio_ms(request) if price.audio_second else 0
        most = Usage(math.ceil(body_bytes / _MIN_BYTES_PER_TOKEN), answer_tokens, audio_ms=audio_ms)
        pico_usd = most.pico_usd(price)
        usd_per_day = self.config.limits(tenant).usd_per_day
        if usd_per_day and pico_usd > usd_per_day * PICO_USD:
            raise _too_costly(pico_usd, usd_per_day, request)
        return pico_usd

    def charge(self, entry: LedgerEntry) -> Charge | None:
        """Return the cost of an ended request; None if it was refused and so has no reservation."""
        if entry.reservation is None:
            return None
        usage = entry.usage
        if entry.billable and usage.completion_tokens and not usage.prompt_tokens:  # the model told no number
            usage = msgspec.structs.replace(usage, prompt_tokens=entry.estimated_prompt_tokens)
            entry.estimated = True
        pico_usd = usage.pico_usd(self.config.price(entry.tier))
        return Charge(entry.reservation, entry.tier, entry.route, usage, pico_usd, entry.variant)

    def close(self, entry: LedgerEntry) -> None:
        """Settle the reservation, record the usage and write the audit record."""
        self._settle(entry, self.charge(entry))

    def close_run(self, entry: LedgerEntry, charge: Charge | None, end: RunEnd) -> None:
        """Close a job's run after its report, which has recorded the usage if the job store accepted it.

        A cancelled job's run is billed for what it used, a run that another one has superseded is not.
        """
        if end == "cancelled":
            entry.outcome = ClientGone.code
            self._settle(entry, charge)
            return
        if charge is not None:
            self.limiter.settle(charge)
        if end == "superseded":
            entry.outcome = SUPERSEDED
            if charge is not None:
                self.usage.release(charge.reservation)
                charge = msgspec.structs.replace(charge, pico_usd=0)
        self._record(entry, charge)

    def _settle(self, entry: LedgerEntry, charge: Charge | None) -> None:
        """Settle the reservation, record the usage exactly once per reservation, and write the audit record."""
        if charge is not None:
            of_key = () if entry.of_key is None else (msgspec.structs.replace(charge, reservation=entry.of_key),)
            for each in (charge, *of_key):
                self.limiter.settle(each)
                self.usage.record(each)
        self._record(entry, charge)

    def _record(self, entry: LedgerEntry, charge: Charge | None) -> None:
        if charge is not None and entry.outcome != SUPERSEDED:
            self.metrics.count(charge.reservation.tenant, entry, charge.usage, charge.pico_usd)
        usage = entry.usage if charge is None else charge.usage
        principal = entry.principal
        self.audit.enqueue(
            AuditRecord(
                at=self.wall_clock(),
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
                cached_tokens=usage.cached_tokens,
                audio_ms=usage.audio_ms,
                pico_usd=0 if charge is None else charge.pico_usd,
                estimated=entry.estimated,
                cache=entry.cache,
                guard=entry.response_headers.get("x-causeway-guard", ""),
                parts=entry.response_headers.get("x-causeway-modalities", ""),
                variant=entry.variant,
                session=entry.response_headers.get("x-causeway-session", ""),
                region=entry.response_headers.get("x-causeway-region", ""),
            )
        )

    async def watch(self) -> None:
        """Flush every `usage_flush_s`, until cancelled."""
        while True:
            await self.flush()
            await anyio.sleep(self.config.usage_flush_s)

    async def flush(self) -> None:
        """Write what was settled since the last flush to Redis, and count the live gateways."""
        # Usage first: what was spent while Redis was away is then part of what the budget is checked against.
        await self.usage.flush()
        await self.limiter.flush()


def _too_costly(pico_usd: int, usd_per_day: float, request: Request) -> InvalidRequest:
    return InvalidRequest(
        f"This request may cost up to {pico_usd / PICO_USD:g} USD, and your budget is"
        f" {usd_per_day:g} USD a day: ask for fewer tokens.",
        param=request.limit_name,
    )


def _most_audio_ms(request: Request) -> int:
    """Return the length of the longest audio that encoders read, for each clip of a request."""
    return count_parts(request, "audio") * _MOST_AUDIO_MS


class TenantMetrics:
    """Prometheus metrics by tenant, whose names come from tokens and configuration alone and are bounded in number."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, histogram = partial(Counter, registry), partial(Histogram, registry)
        self._tokens = counter("causeway_gateway_tenant_tokens", ("tenant", "tier", "type"))
        self._usd = counter("causeway_gateway_tenant_cost_usd", ("tenant", "tier", "route"))
        self._requests = counter("causeway_gateway_tenant_requests", ("tenant", "outcome"))
        self._first_token = histogram("causeway_gateway_tenant_first_token_seconds", ("tenant",), _FIRST_TOKEN_S)
        self._tenants: set[str] = set()

    def count(self, tenant: str, entry: LedgerEntry, usage: Usage, pico_usd: int) -> None:
        if tenant not in self._tenants:
            if len(self._tenants) < MAX_TENANTS:
                self._tenants.add(tenant)
            else:
                tenant = "other"
        self._tokens.add((tenant, entry.tier, "input"), usage.prompt_tokens)
        self._tokens.add((tenant, entry.tier, "output"), usage.completion_tokens)
        self._usd.add((tenant, entry.tier, entry.route), pico_usd / PICO_USD)
        if entry.route not in _BACKGROUND:
            self._requests.add((tenant, entry.outcome))
            if entry.first_token_s is not None:
                self._first_token.observe((tenant,), entry.first_token_s)
