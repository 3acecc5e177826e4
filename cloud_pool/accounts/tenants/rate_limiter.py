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
from typing import Final, cast

import anyio
import msgspec
import redis.asyncio
from redis.exceptions import RedisError

from router.errors import RateLimited

from ...redis.scripts import load_script
from .config import MICRO_USD_PER_USD, TenantLimits, TenantsConfig
from .redis_keys import requests_key, tokens_key, usage_key

_LUA: Final = f"{__package__}.lua"
_TOKEN_BUCKET: Final = load_script(_LUA, "token_bucket")
TAKE_SCRIPT: Final = load_script(_LUA, "take", _TOKEN_BUCKET)
SETTLE_SCRIPT: Final = load_script(_LUA, "settle", _TOKEN_BUCKET)
_MAX_LOCAL_TENANTS = 10_000  # tenants with local buckets
_log = logging.getLogger("causeway.cloud.tenants")


class TokenReservation(msgspec.Struct, frozen=True):
    """Tokens taken from a tenant's bucket in advance."""

    tenant: str
    tokens: int


class TokenBucket(msgspec.Struct, frozen=True):
    """A local token bucket. It holds at most `capacity` and gains `rate` per second, as lua/token_bucket.lua does.

    A bucket may be in debt: an answer that was longer than reserved is paid for before the next one begins.
    """

    level: float
    at: float  # monotonic, s: when the bucket had this level

    def refilled(self, rate: float, capacity: float, now: float) -> TokenBucket:
        """Return the bucket at `now`. A clock that was set back changes nothing."""
        gained = max(0.0, now - self.at) * rate
        return TokenBucket(min(capacity, self.level + gained), now)

    def wait_s(self, rate: float, amount: float) -> float:
        """Return the time until the bucket holds `amount`; 0 if it does."""
        return max(0.0, amount - self.level) / rate

    def debited(self, amount: float, capacity: float) -> TokenBucket:
        """Return the bucket without `amount`; a negative amount is a refund."""
        return TokenBucket(min(capacity, self.level - amount), self.at)


class _LocalBuckets(msgspec.Struct):
    """Local buckets and cost of one tenant."""

    requests: TokenBucket
    tokens: TokenBucket
    day: str = ""
    micro_usd: int = 0


class TenantRateLimiter:
    """Rate limits by tenant.

    Args:
        client: None for local buckets only, with the whole rates
        clock: monotonic time, s
        wall_clock: unix time, s
        now_s: replaces Redis's clock in tests; a negative value uses Redis's clock
    """

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

    async def reserve(self, tenant: str, tokens: int) -> TokenReservation:
        """Take one request and `tokens`, at most a full bucket. Raises RateLimited with the time to wait."""
        limits = self._config.limits(tenant)
        tokens = min(tokens, limits.tokens_per_minute) if limits.tokens_per_minute else tokens
        if limits.requests_per_s or limits.tokens_per_minute or limits.usd_per_day:
            exhausted, wait_s = await self._check(tenant, limits, tokens)
            if exhausted:
                raise _rate_limited(exhausted, wait_s, limits, self._wall_clock())
        return TokenReservation(tenant, tokens)

    def settle(self, reservation: TokenReservation, used_tokens: int, micro_usd: int) -> None:
        """Correct a reservation by what was used, exactly once. The next `flush` sends the difference to Redis."""
        tenant = reservation.tenant
        limits = self._config.limits(tenant)
        if limits.tokens_per_minute:
            self._unsettled[tenant] = self._unsettled.get(tenant, 0) + used_tokens - reservation.tokens
        if limits.usd_per_day:
            local = self._local(tenant, limits)
            day = _day(self._wall_clock())
            local.micro_usd = micro_usd + (local.micro_usd if local.day == day else 0)
            local.day = day

    async def flush(self) -> None:
        """Send settled differences to Redis. If that fails, the local buckets take them; the next check logs it."""
        unsettled, self._unsettled = self._unsettled, {}
        for tenant, amount in unsettled.items():
            limits = self._config.limits(tenant)
            rate, capacity = limits.tokens_per_minute / 60.0, float(limits.tokens_per_minute)
            try:
                if self._settle is None or self._clock() < self._retry_at:
                    raise TimeoutError
                with anyio.fail_after(self._config.redis_timeout_s):
                    await self._settle([tokens_key(tenant)], [self._now_s(), rate, capacity, amount])
            except (RedisError, OSError, TimeoutError):
                local = self._local(tenant, limits)
                local.tokens = local.tokens.debited(amount, capacity * self._share)

    async def _check(self, tenant: str, limits: TenantLimits, tokens: int) -> tuple[str, float]:
        """Return what is exhausted ("requests", "tokens", "budget", or "" for nothing) and the time to wait, s."""
        if self._take is not None and self._clock() >= self._retry_at:
            try:
                with anyio.fail_after(self._config.redis_timeout_s):
                    return await self._check_in_redis(tenant, limits, tokens)  # (1)
            except (RedisError, OSError, TimeoutError) as error:
                _log.warning("tenants' rates are checked locally: %s", str(error) or type(error).__name__)
                self._retry_at = self._clock() + self._config.redis_retry_after_s
        if self._redis is not None:
            self.local_checks += 1
        return self._check_locally(tenant, limits, tokens)  # (2)

    async def _check_in_redis(self, tenant: str, limits: TenantLimits, tokens: int) -> tuple[str, float]:
        assert self._take is not None
        keys = [requests_key(tenant), tokens_key(tenant), usage_key(tenant, _day(self._wall_clock()))]
        numbers = (
            limits.requests_per_s,
            limits.request_capacity,
            limits.tokens_per_minute / 60.0,
            limits.tokens_per_minute,
            tokens,
            round(limits.usd_per_day * MICRO_USD_PER_USD),
        )
        reply = await self._take(keys, [self._now_s(), *numbers])
        exhausted, wait_ms = cast("tuple[bytes | str, int]", reply)
        return (exhausted.decode() if isinstance(exhausted, bytes) else exhausted), wait_ms / 1000.0

    def _check_locally(self, tenant: str, limits: TenantLimits, tokens: int) -> tuple[str, float]:
        local = self._local(tenant, limits)
        share, now = self._share, self._clock()
        spent = local.micro_usd if local.day == _day(self._wall_clock()) else 0
        if limits.usd_per_day and spent >= limits.usd_per_day * MICRO_USD_PER_USD * share:
            return "budget", 0.0
        rate, capacity = limits.requests_per_s * share, max(1.0, limits.request_capacity * share)
        token_rate, token_capacity = limits.tokens_per_minute / 60.0 * share, limits.tokens_per_minute * share
        needed = min(float(tokens), token_capacity)
        request_bucket = local.requests.refilled(rate, capacity, now)
        token_bucket = local.tokens.refilled(token_rate, token_capacity, now)
        if rate and (wait_s := request_bucket.wait_s(rate, 1.0)) > 0:
            return "requests", wait_s
        if token_rate and (wait_s := token_bucket.wait_s(token_rate, needed)) > 0:
            return "tokens", wait_s
        local.requests = request_bucket.debited(1.0, capacity)
        local.tokens = token_bucket.debited(needed, token_capacity)
        return "", 0.0

    def _local(self, tenant: str, limits: TenantLimits) -> _LocalBuckets:
        buckets = self._local_buckets.get(tenant)
        if buckets is None:
            now = self._clock()
            requests = TokenBucket(max(1.0, limits.request_capacity * self._share), now)
            tokens = TokenBucket(limits.tokens_per_minute * self._share, now)
            buckets = self._local_buckets[tenant] = _LocalBuckets(requests, tokens)
            while len(self._local_buckets) > _MAX_LOCAL_TENANTS:
                self._local_buckets.popitem(last=False)
        self._local_buckets.move_to_end(tenant)
        return buckets


def _rate_limited(exhausted: str, wait_s: float, limits: TenantLimits, now: float) -> RateLimited:
    """Return the error. `now` is unix time, s; a spent budget waits for the next UTC day."""
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
