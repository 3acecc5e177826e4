"""One call before the work, one after it."""

from __future__ import annotations

import anyio

from router.types import Request, Usage

from .config import Price, TenantLimits, TenantsConfig
from .rate_limiter import TenantRateLimiter, TokenReservation
from .usage import UsageRecorder

BYTES_PER_TOKEN = 4  # of English text; a wrong guess is put right when the answer has ended
_ANSWER_TOKENS = 256  # reserved for an answer whose length nobody has bounded


class TenantAccounting:
    def __init__(self, config: TenantsConfig, budgets: TenantRateLimiter, book: UsageRecorder) -> None:
        self._config = config
        self._prices = {price.tier: price for price in config.prices}
        self.budgets = budgets
        self.book = book

    def limits(self, tenant: str) -> TenantLimits:
        return self._config.limits(tenant)

    async def admit(self, tenant: str, request: Request, body_bytes: int) -> TokenReservation:
        """Before anything is tokenised. Raises RateLimited."""
        answer = (request.max_tokens or _ANSWER_TOKENS) * request.n
        return await self.budgets.take(tenant, body_bytes // BYTES_PER_TOKEN + answer)

    def ended(self, grant: TokenReservation, tier: str, route: str, usage: Usage) -> int:
        """Exactly once for each grant, whatever became of the request. The cost in micro-dollars."""
        micro_usd = self._prices.get(tier, Price(tier=tier)).micro_usd(usage)
        self.budgets.settle(grant, usage.prompt_tokens + usage.completion_tokens, micro_usd)
        self.book.record(grant.tenant, tier, route, usage, micro_usd)
        return micro_usd

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            await anyio.sleep(self._config.usage_flush_s)
            await self.flush()

    async def flush(self) -> None:
        await self.budgets.flush()
        await self.book.flush()
