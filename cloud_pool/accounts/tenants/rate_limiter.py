"""Rates and daily budgets of tenants, shared by all gateways through Redis.

1. Redis answers: its token buckets and its usage of the day decide.
2. Redis does not answer within `redis_timeout_s`, or did not within the last `redis_retry_after_s`: local buckets with
   `local_share` of each rate decide, and the cost that this gateway has seen against `local_share` of the budget.
   `local_checks` counts these requests.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import cast

import anyio
import msgspec
import redis.asyncio
from redis.exceptions import RedisError

from router.errors import RateLimited

from .config import MICRO_USD_PER_USD, TenantLimits, TenantsConfig
from .scripts import SETTLE_SCRIPT, TAKE_SCRIPT, requests_key, tokens_key, usage_key
from .token_bucket import TokenBucket

_MAX_LOCAL_TENANTS = 10_000  # tenants whose buckets are kept here
_log = logging.getLogger("causeway.cloud.tenants")


class TokenReservation(msgspec.Struct, frozen=True):
    tenant: str
    tokens: int  # reserved


class _LocalBuckets(msgspec.Struct):
    """One tenant's share."""

    requests: TokenBucket
    tokens: TokenBucket
    day: str = ""
    micro_usd: int = 0


class TenantRateLimiter:
    """`client` None: (2) with the whole rates. `now_s` replaces Redis's own clock, for tests."""

    def __init__(
        self,
        config: TenantsConfig,
        client: redis.asyncio.Redis | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        now_s: Callable[[], float] = lambda: -1.0,
    ) -> None:
        self._config = config
        self._redis = client
        self._clock = clock
        self._wall_clock = wall_clock
        self._now_s = now_s
        self._take = client.register_script(TAKE_SCRIPT) if client is not None else None
        self._settle = client.register_script(SETTLE_SCRIPT) if client is not None else None
        self._share = config.local_share if client is not None else 1.0
        self._retry_at = float("-inf")
        self._local_buckets: OrderedDict[str, _LocalBuckets] = OrderedDict()
        self._unsettled: dict[str, int] = {}
        self.local_checks = 0

    async def take(self, tenant: str, tokens: int) -> TokenReservation:
        """Reserves `tokens`, a full bucket's worth at most. Raises RateLimited that says when to come back."""
        limits = self._config.limits(tenant)
        tokens = min(tokens, limits.tokens_per_minute) if limits.tokens_per_minute else tokens
        if limits.requests_per_s or limits.tokens_per_minute or limits.usd_per_day:
            exhausted, wait_s = await self._check(tenant, limits, tokens)
            if exhausted:
                raise _rate_limited(exhausted, wait_s, limits, self._wall_clock())
        return TokenReservation(tenant, tokens)

    def settle(self, grant: TokenReservation, used_tokens: int, micro_usd: int) -> None:
        """Exactly once for each grant. Redis hears of it with the next `flush`."""
        limits = self._config.limits(grant.tenant)
        if limits.tokens_per_minute:
            self._unsettled[grant.tenant] = self._unsettled.get(grant.tenant, 0) + used_tokens - grant.tokens
        if limits.usd_per_day:
            local = self._local(grant.tenant, limits)
            day = _day(self._wall_clock())
            local.micro_usd = micro_usd + (local.micro_usd if local.day == day else 0)
            local.day = day

    async def flush(self) -> None:
        """Faults are counted where the next `take` meets them; what could not be told is told the local buckets."""
        owed, self._unsettled = self._unsettled, {}
        for tenant, amount in owed.items():
            limits = self._config.limits(tenant)
            rate, capacity = limits.tokens_per_minute / 60.0, float(limits.tokens_per_minute)
            try:
                if self._settle is None or self._clock() < self._retry_at:
                    raise TimeoutError
                with anyio.fail_after(self._config.redis_timeout_s):
                    await self._settle([tokens_key(tenant)], [self._now_s(), rate, capacity, amount])
            except (RedisError, OSError, TimeoutError):
                local = self._local(tenant, limits)
                local.tokens = local.tokens.less(amount, capacity * self._share)

    async def _check(self, tenant: str, limits: TenantLimits, tokens: int) -> tuple[str, float]:
        """What lacks ("requests", "tokens", "budget", or "" when nothing does), and for how long, s."""
        if self._take is not None and self._clock() >= self._retry_at:
            try:
                with anyio.fail_after(self._config.redis_timeout_s):
                    return await self._check_in_redis(tenant, limits, tokens)  # (1)
            except (RedisError, OSError, TimeoutError) as error:
                _log.warning("tenants' rates are this gateway's own for now: %s", str(error) or type(error).__name__)
                self._retry_at = self._clock() + self._config.redis_retry_after_s
        if self._redis is not None:
            self.local_checks += 1
        return self._check_locally(tenant, limits, tokens)  # (2)

    async def _check_in_redis(self, tenant: str, limits: TenantLimits, tokens: int) -> tuple[str, float]:
        assert self._take is not None
        day = _day(self._wall_clock())
        numbers = (
            limits.requests_per_s,
            limits.capacity,
            limits.tokens_per_minute / 60.0,
            limits.tokens_per_minute,
            tokens,
            round(limits.usd_per_day * MICRO_USD_PER_USD),
        )
        reply = await self._take(
            [requests_key(tenant), tokens_key(tenant), usage_key(tenant, day)], [self._now_s(), *numbers]
        )
        exhausted, wait_ms = cast("tuple[bytes | str, int]", reply)
        return (exhausted.decode() if isinstance(exhausted, bytes) else exhausted), wait_ms / 1000.0

    def _check_locally(self, tenant: str, limits: TenantLimits, tokens: int) -> tuple[str, float]:
        local = self._local(tenant, limits)
        share, now = self._share, self._clock()
        spent = local.micro_usd if local.day == _day(self._wall_clock()) else 0
        if limits.usd_per_day and spent >= limits.usd_per_day * MICRO_USD_PER_USD * share:
            return "budget", 0.0
        rate, capacity = limits.requests_per_s * share, max(1.0, limits.capacity * share)
        token_rate, token_capacity = limits.tokens_per_minute / 60.0 * share, limits.tokens_per_minute * share
        tokens_wanted = min(float(tokens), token_capacity)
        requests = local.requests.filled(rate, capacity, now)
        budget = local.tokens.filled(token_rate, token_capacity, now)
        if rate and (wait_s := requests.wait_s(rate, 1.0)) > 0:
            return "requests", wait_s
        if token_rate and (wait_s := budget.wait_s(token_rate, tokens_wanted)) > 0:
            return "tokens", wait_s
        local.requests, local.tokens = requests.less(1.0, capacity), budget.less(tokens_wanted, token_capacity)
        return "", 0.0

    def _local(self, tenant: str, limits: TenantLimits) -> _LocalBuckets:
        found = self._local_buckets.get(tenant)
        if found is None:
            now = self._clock()
            tokens = TokenBucket(limits.tokens_per_minute * self._share, now)
            found = self._local_buckets[tenant] = _LocalBuckets(
                TokenBucket(max(1.0, limits.capacity * self._share), now), tokens
            )
            while len(self._local_buckets) > _MAX_LOCAL_TENANTS:
                self._local_buckets.popitem(last=False)
        self._local_buckets.move_to_end(tenant)
        return found


def _rate_limited(exhausted: str, wait_s: float, limits: TenantLimits, now: float) -> RateLimited:
    """`now` is unix time, s."""
    if exhausted == "requests":
        message = f"Your limit is {limits.requests_per_s:g} requests a second."
    elif exhausted == "tokens":
        message = f"Your limit is {limits.tokens_per_minute} tokens a minute."
    else:
        message = f"Your budget of {limits.usd_per_day:g} USD a day is spent."
        day = datetime.fromtimestamp(now, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        wait_s = (day + timedelta(days=1)).timestamp() - now
    return RateLimited(message, retry_after_s=wait_s)


def _day(now: float) -> str:
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%d")
