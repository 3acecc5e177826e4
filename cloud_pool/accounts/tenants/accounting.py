"""Limits and usage together: one call before a request, one after it."""

from __future__ import annotations

import math

import anyio

from router.errors import InvalidRequest
from router.types import Request, Usage

from .config import MICRO_USD_PER_USD, Price, TenantsConfig
from .rate_limiter import TenantRateLimiter
from .usage import Charge, Demand, Reservation, UsageRecorder

BYTES_PER_TOKEN = 4  # of English text; `settle` corrects the estimate
_MIN_BYTES_PER_TOKEN = 2  # of code, numbers and other languages: what a prompt may cost
_ANSWER_TOKENS = 256  # reserved for an answer without a maximum length
_LIFETIME_MARGIN_S = 30.0  # for the flush, and for a generation that goes on for other requests


class TenantAccounting:
    """Reserves and settles requests; writes usage to Redis in the background."""

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
