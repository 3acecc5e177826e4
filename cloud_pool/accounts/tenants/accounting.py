"""Rates and usage together: one call before a request, one after it."""

from __future__ import annotations

import anyio

from router.types import Request, Usage

from .config import Price, TenantsConfig
from .rate_limiter import TenantRateLimiter, TokenReservation
from .usage import UsageRecorder

BYTES_PER_TOKEN = 4  # of English text; `settle` corrects the estimate
_ANSWER_TOKENS = 256  # reserved for an answer without a maximum length


class TenantAccounting:
    """Reserves and settles requests; writes usage to Redis in the background."""

    def __init__(self, config: TenantsConfig, limiter: TenantRateLimiter, usage: UsageRecorder) -> None:
        self.config = config
        self._prices = {price.tier: price for price in config.prices}
        self._limiter = limiter
        self._usage = usage

    async def reserve(self, tenant: str, request: Request, body_bytes: int) -> TokenReservation:
        """Reserve an estimate of the request's tokens, before it is tokenised. Raises RateLimited."""
        answer = 0 if request.kind == "embedding" else (request.max_tokens or _ANSWER_TOKENS) * request.n
        return await self._limiter.reserve(tenant, body_bytes // BYTES_PER_TOKEN + answer)

    def settle(self, reservation: TokenReservation, tier: str, route: str, usage: Usage) -> int:
        """Record what a request used, exactly once per reservation. Returns its cost in micro-dollars."""
        micro_usd = self._prices.get(tier, Price(tier=tier)).micro_usd(usage)
        self._limiter.settle(reservation, usage.prompt_tokens + usage.completion_tokens, micro_usd)
        self._usage.record(reservation.tenant, tier, route, usage, micro_usd)
        return micro_usd

    async def watch(self) -> None:
        """Flush every `usage_flush_s`, until cancelled."""
        while True:
            await anyio.sleep(self.config.usage_flush_s)
            await self.flush()

    async def flush(self) -> None:
        """Write what was settled since the last flush to Redis."""
        await self._limiter.flush()
        await self._usage.flush()
