"""Rates and daily budgets of tenants, shared by all gateways through Redis.

A request reserves its tokens and the most that it may cost before it begins; what is not used is given back after it.

1. Redis answers: its token buckets, its usage of the day and its reservations decide.
2. Redis does not answer within `redis_timeout_s`: this gateway decides alone, with its share of each rate and of what
   was left of each budget: one part in as many as there were gateways when Redis was last reached, or `local_share` if
   it never was. `local_checks` counts these requests.
3. Redis answers again, which is tried in the background: what was handed out alone is taken from its buckets and
   budgets first, then (1).

Each charge has an id, which Redis remembers: one whose reply was lost, so that a cluster's client repeats it or this
gateway makes it again by itself, counts once.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Final, Literal, TypeVar, cast

import anyio
import msgspec
import redis.asyncio
from redis.exceptions import RedisError

from causeway_server.router.errors import RateLimited
from causeway_server.router.prices import PICO_USD

from ...core.principal import Principal
from ...redis.connect import client_fault, is_wrong_data
from ...redis.keys import load_script
from .config import TenantLimits, TenantsConfig
from .usage import API_KEY, GATEWAYS_KEY, READS, SUBMISSIONS, Charge, Demand, Reservation, tenant_key


class TokenBucket(msgspec.Struct):
    """A local token bucket of at most `capacity`, which gains `rate` per second, as lua/token_bucket.lua does.

    It may be in debt: an answer that was longer than reserved is paid for before the next one begins.
    """

    rate: float  # 0: no limit
    capacity: float
    level: float
    at: float  # monotonic, s: when the bucket had this level

    def refill(self, now: float) -> None:
        """Refill the bucket up to `now`. A clock that was set back changes nothing."""
        self.level = min(self.capacity, self.level + max(0.0, now - self.at) * self.rate)
        self.at = now

    def wait_s(self, amount: float) -> float:
        """Return the time in seconds until the bucket holds `amount`; 0 if it already does."""
        return max(0.0, amount - self.level) / self.rate if self.rate else 0.0

    def debit(self, amount: float) -> None:
        """Take `amount`; a negative amount is a refund."""
        self.level = min(self.capacity, self.level - amount)


Exhausted = Literal["", "budget", "reserved", "requests", "tokens"]
"""Limit that refuses a request; "reserved": the rest of the budget is reserved for requests in progress."""


class LocalLimits:
    """A tenant's limits at one gateway without Redis: `share` of each rate and of the rest of the day's budget.

    Args:
        day: UTC day, such as 2026-11-21.
        used_pico_usd: Part of the day's budget that was spent or reserved when Redis was last reached.
        now: Monotonic seconds.
    """

    def __init__(self, limits: TenantLimits, share: float, day: str, used_pico_usd: int, now: float) -> None:
        requests, tokens = max(1.0, limits.request_capacity * share), limits.tokens_per_minute * share
        self._requests = TokenBucket(limits.requests_per_s * share, requests, requests, now)
        self._tokens = TokenBucket(tokens / 60.0, tokens, tokens, now)
        self._pico_usd_per_day = limits.usd_per_day * PICO_USD
        self._share = share
        self._day = day
        self._used_pico_usd = used_pico_usd
        self._spent_pico_usd = 0
        self.doubtful: dict[str, tuple[float, float]] = {}  # charges that Redis may have made, too: requests, tokens
        self._reserved: dict[str, tuple[Reservation, float]] = {}  # by id, with when it ends (monotonic, s)

    def take(self, reservation: Reservation, ends_at: float, day: str, now: float) -> tuple[Exhausted, float]:
        """Take a request, its tokens and its cost, all or nothing. Return what is exhausted, and the wait in s."""
        self._begin_day(day)
        others = sum(each.pico_usd for each, _ in self._reserved.values() if each.id != reservation.id)
        budget = (self._pico_usd_per_day - self._used_pico_usd) * self._share - self._spent_pico_usd
        if reservation.pico_usd and reservation.pico_usd > budget:
            return "budget", 0.0
        if reservation.pico_usd and reservation.pico_usd > budget - others:
            return "reserved", 0.0
        tokens = min(float(reservation.tokens), self._tokens.capacity)
        sequences = min(float(reservation.sequences), self._requests.capacity)
        self._requests.refill(now)
        self._tokens.refill(now)
        if (wait_s := self._requests.wait_s(sequences)) > 0:
            return "requests", wait_s
        if (wait_s := self._tokens.wait_s(tokens)) > 0:
            return "tokens", wait_s
        self._requests.debit(sequences)
        self._tokens.debit(tokens)
        if reservation.id:
            self._reserved[reservation.id] = reservation, ends_at
        return "", 0.0

    def debit_tokens(self, amount: float) -> None:
        """Take tokens, also into debt; a negative amount is a refund."""
        self._tokens.debit(amount)

    def doubt(self, charge: str, requests: float, tokens: float) -> None:
        """Record a charge that was made here after its reply from Redis was lost: Redis may have made it too."""
        self.doubtful[charge] = min(requests, self._requests.capacity), min(tokens, self._tokens.capacity)

    def settle(self, charge: Charge, day: str) -> None:
        """Replace a reservation of this gateway by the actual cost; reservations made in Redis are settled there."""
        self._begin_day(day)
        reservation = charge.reservation
        if self._reserved.get(reservation.id, (None,))[0] == reservation:
            del self._reserved[reservation.id]
        elif reservation.id:
            return
        self._spent_pico_usd += charge.pico_usd

    def missing(self, now: float) -> tuple[float, float]:
        """Return the number of requests and tokens that the buckets lack after refilling."""
        self._requests.refill(now)
        self._tokens.refill(now)
        return self._requests.capacity - self._requests.level, self._tokens.capacity - self._tokens.level

    def reservations(self, now: float) -> Iterator[tuple[Reservation, float]]:
        """Yield the reservations in progress, each with its remaining time in seconds."""
        for reservation, ends_at in self._reserved.values():
            if ends_at > now:
                yield reservation, ends_at - now

    def _begin_day(self, day: str) -> None:
        if day != self._day:
            self._day, self._used_pico_usd, self._spent_pico_usd = day, 0, 0


_DAY_S = 86_400


class BudgetDay:
    """The current UTC day. `wall_clock`: Unix time in seconds, corrected by `follow`."""

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        self._wall_clock = wall_clock
        self._behind_s = 0.0

    def follow(self, redis_s: float) -> None:
        """Correct the clock by Redis's, which shows `redis_s` (Unix time) now."""
        self._behind_s = redis_s - self._wall_clock()

    def unix_time(self) -> float:
        """Return the corrected Unix time in seconds."""
        return self._wall_clock() + self._behind_s

    @property
    def name(self) -> str:
        """Name of the day, such as 2026-11-21."""
        return datetime.fromtimestamp(self.unix_time(), UTC).strftime("%Y-%m-%d")

    @property
    def number(self) -> int:
        """Number of days since 1970-01-01."""
        return int(self.unix_time() // _DAY_S)

    @property
    def left_s(self) -> float:
        """Time until midnight, in seconds."""
        return _DAY_S - self.unix_time() % _DAY_S


_LUA: Final = f"{__package__}.lua"
_TOKEN_BUCKET: Final = load_script(_LUA, "token_bucket")
_BUDGET: Final = load_script(_LUA, "budget")
TAKE_SCRIPT: Final = load_script(_LUA, "take", _TOKEN_BUCKET, _BUDGET)
SETTLE_SCRIPT: Final = load_script(_LUA, "settle", _TOKEN_BUCKET)
RESTORE_SCRIPT: Final = load_script(_LUA, "restore", _TOKEN_BUCKET, _BUDGET)
GATEWAYS_SCRIPT: Final = load_script(_LUA, "gateways")
_MAX_LOCAL_TENANTS = 10_000
_CHARGE_MS = 120_000  # how long Redis remembers a charge, to make one that comes again only once
_ALIVE_S = 10.0  # how long a gateway counts after its last sign, or three flushes if that is longer
_FLUSH_TIMEOUT_S = 1.0
_RESERVED_RETRY_S = 2.0  # while the rest of a budget is reserved: requests end at any time
_ALONE_RETRY_S = 10.0  # while this gateway's share of a budget is used up and Redis is away
log = logging.getLogger(__name__)
Value = TypeVar("Value")


class TenantRateLimiter:
    """Rate limits and budgets by tenant.

    Args:
        client: Redis; None: this gateway is the only one and has the whole rates and budgets.
        is_gateway: Whether this process counts among those that share the limits while Redis is unavailable.
        clock: Monotonic clock, in seconds.
        wall_clock: Unix time in seconds; with a Redis, its clock determines the day.
        now_s: Replacement for Redis's clock in tests; a negative value uses Redis's clock.
    """

    def __init__(
        self,
        config: TenantsConfig,
        client: redis.asyncio.Redis | None,
        *,
        is_gateway: bool = True,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        now_s: Callable[[], float] = lambda: -1.0,
    ) -> None:
        self._config = config
        self._redis = client
        self._clock = clock
        self.day = BudgetDay(wall_clock)
        self._now_s = now_s
        self._name = secrets.token_hex(8) if is_gateway else ""
        if client is not None:
            self._take = client.register_script(TAKE_SCRIPT)
            self._settle = client.register_script(SETTLE_SCRIPT)
            self._restore = client.register_script(RESTORE_SCRIPT)
            self._gateways_script = client.register_script(GATEWAYS_SCRIPT)
        self._gateways = 0
        self._alone = client is None
        self._retry_at = float("-inf")
        self._local: OrderedDict[str, LocalLimits] = OrderedDict()
        self._used: OrderedDict[str, tuple[str, int]] = OrderedDict()  # day and 1e-12 USD, as Redis last said
        self._unsettled: dict[str, int] = {}
        self.local_checks = 0

    def decides_now(self, principal: Principal) -> bool:
        """Return whether a reservation waits for nothing: no limit, or no Redis to ask."""
        if self._alone:
            return not principal.usd_per_day  # two reservations, of which the second may be refused
        limits = self._config.limits(principal.tenant)
        return not (limits.requests_per_s or limits.tokens_per_minute or limits.usd_per_day or principal.usd_per_day)

    async def reserve(self, tenant: str, demand: Demand) -> Reservation:
        """Take a request's sequences, tokens (at most a full bucket) and cost. Raises RateLimited."""
        return await self._reserve(tenant, self._config.limits(tenant), demand)

    async def reserve_of_key(self, principal: Principal, demand: Demand) -> Reservation:
        """Reserve a request's cost in the budget of its API key. Raises RateLimited."""
        limits = TenantLimits(usd_per_day=principal.usd_per_day)
        return await self._reserve(f"{principal.tenant}{API_KEY}{principal.token_id}", limits, demand)

    async def _reserve(self, tenant: str, limits: TenantLimits, demand: Demand) -> Reservation:
        tokens = min(demand.tokens, limits.tokens_per_minute) if limits.tokens_per_minute else demand.tokens
        cost = demand.pico_usd if limits.usd_per_day else 0
        name = (demand.job or secrets.token_hex(8)) if cost else ""
        reservation = Reservation(tenant, tokens, cost, name, demand.fence, demand.sequences)
        if not (limits.requests_per_s or limits.tokens_per_minute or cost):
            return reservation
        error = await self._check(limits, reservation, demand.lifetime_s)
        if error is not None:
            raise error
        return reservation

    async def take_submission(self, tenant: str) -> None:
        """Take a submission of a job, file or batch from its separate bucket. Raises RateLimited."""
        limits = self._config.limits(tenant)
        key = "requests_per_s" if limits.of_submissions.requests_per_s == limits.requests_per_s else "submissions_per_s"
        await self._take_of(tenant + SUBMISSIONS, f"submissions a second ({key})")

    async def take_reads(self, tenant: str, reads: int) -> None:
        """Take reads of jobs, files and batches; a list counts as several. Raises RateLimited."""
        await self._take_of(tenant + READS, "reads of jobs, files and batches a second (reads_per_s)", reads)

    async def _take_of(self, bucket: str, what: str, count: int = 1) -> None:
        limits = self._limits_of(bucket)
        taken = Reservation(bucket, 0, sequences=count)
        error = await self._check(limits, taken, 0.0) if limits.requests_per_s else None
        if error is not None:
            raise RateLimited(f"Your limit is {limits.requests_per_s:g} {what}.", retry_after_s=error.retry_after_s)

    def settle(self, charge: Charge) -> None:
        """Correct the reservation by the actual use. The cost itself is written with the tenant's usage."""
        reservation = charge.reservation
        difference = charge.usage.prompt_tokens + charge.usage.completion_tokens - reservation.tokens
        if difference and self._limits_of(reservation.tenant).tokens_per_minute:
            self._unsettled[reservation.tenant] = self._unsettled.get(reservation.tenant, 0) + difference
        local = self._local.get(reservation.tenant)
        if local is not None:
            local.settle(charge, self.day.name)

    async def flush(self) -> None:
        """Send settled differences to Redis and count the gateways; after an outage, restore first. Never raises."""
        if self._redis is not None and self._clock() >= self._retry_at:
            try:
                with anyio.fail_after(_FLUSH_TIMEOUT_S):
                    await self._meet()
                    await self._restore_all()
            except (RedisError, OSError, TimeoutError) as error:
                self._leave_redis(error)
        unsettled, self._unsettled = self._unsettled, {}
        for tenant, amount in unsettled.items():
            await self._settle_tokens(tenant, amount)

    # --- with Redis ------------------------------------------------------------------------------------------------

    async def _check(self, limits: TenantLimits, reservation: Reservation, lifetime_s: float) -> RateLimited | None:
        charge = ""
        if not self._alone:
            charge = secrets.token_hex(8)
            try:
                with anyio.fail_after(self._config.redis_timeout_s):
                    return await self._check_in_redis(limits, reservation, lifetime_s, charge)  # (1)
            except (RedisError, OSError, TimeoutError) as error:
                self._failed(reservation.tenant, error)
        if self._redis is not None:
            self.local_checks += 1
        refusal = self._check_locally(limits, reservation, lifetime_s)  # (2)
        if charge and refusal is None:
            requests = min(float(reservation.sequences), limits.request_capacity)
            self._local_limits(reservation.tenant, limits).doubt(charge, requests, float(reservation.tokens))
        return refusal

    async def _check_in_redis(
        self, limits: TenantLimits, reservation: Reservation, lifetime_s: float, charge: str
    ) -> RateLimited | None:
        tenant = reservation.tenant
        budget = round(limits.usd_per_day * PICO_USD)
        requests = min(float(reservation.sequences), limits.request_capacity)
        amounts: list[float | str] = list(_rates(limits, requests, float(reservation.tokens)))
        amounts += [budget, reservation.pico_usd, reservation.id, reservation.fence, lifetime_s]
        kind, wait_ms, spent, reserved = await self._take_today(tenant, amounts, charge)
        if kind == "day":
            self.day.follow(wait_ms / 1000.0)
            kind, wait_ms, spent, reserved = await self._take_today(tenant, amounts, charge)
        if reservation.pico_usd:
            _remember(self._used, tenant, (self.day.name, spent + reserved))
        return self._error(kind, wait_ms / 1000.0, limits, reservation, left=budget - spent)

    async def _take_today(self, tenant: str, amounts: list[float | str], charge: str) -> tuple[str, int, int, int]:
        names = ("requests", "tokens", f"usage:{self.day.name}", "budget", "budget:ends", f"charge:{charge}")
        keys = [tenant_key(tenant, name) for name in names]
        reply = await self._take(keys, [self._now_s(), *amounts, self.day.number, _CHARGE_MS])
        exhausted, wait_ms, spent, reserved = cast("tuple[bytes | str, int, int, int]", reply)
        return exhausted.decode() if isinstance(exhausted, bytes) else exhausted, wait_ms, spent, reserved

    async def _settle_tokens(self, tenant: str, amount: int) -> None:
        limits = self._config.limits(tenant)
        rate, capacity = limits.tokens_per_minute / 60.0, float(limits.tokens_per_minute)
        charge = ""
        if not self._alone:
            charge = secrets.token_hex(8)
            keys = [tenant_key(tenant, "tokens"), tenant_key(tenant, f"charge:{charge}")]
            try:
                with anyio.fail_after(self._config.redis_timeout_s):
                    await self._settle(keys, [self._now_s(), rate, capacity, amount, _CHARGE_MS])
                return
            except (RedisError, OSError, TimeoutError) as error:
                self._failed(tenant, error)
        local = self._local_limits(tenant, limits)
        local.debit_tokens(amount)
        if charge:
            local.doubt(charge, 0.0, float(amount))

    async def _meet(self) -> None:
        alive_s = max(_ALIVE_S, 3 * self._config.usage_flush_s)
        reply = await self._gateways_script([GATEWAYS_KEY], [self._name, alive_s, self._now_s()])
        self._gateways, now_ms = cast("tuple[int, int]", reply)
        self.day.follow(now_ms / 1000.0)

    async def _restore_all(self) -> None:
        """Restore all tenants' charges in Redis (3). Raises RedisError, OSError or TimeoutError; the rest is kept."""
        while self._local:
            tenant, local = self._local.popitem()
            try:
                await self._restore_one(tenant, local)
            except BaseException as error:
                if is_wrong_data(error):
                    self._damaged(tenant)
                    continue
                self._local.setdefault(tenant, local)
                raise
        if self._alone:
            self._alone = False
            log.info("Tenants' rate limits are checked in Redis again.")

    async def _restore_one(self, tenant: str, local: LocalLimits) -> None:
        limits, now = self._limits_of(tenant), self._clock()
        requests, tokens = local.missing(now)
        names = ("requests", "tokens", "budget", "budget:ends", *(f"charge:{charge}" for charge in local.doubtful))
        keys = [tenant_key(tenant, name) for name in names]
        doubtful = [amount for amounts in local.doubtful.values() for amount in amounts]
        reservations = [
            part
            for each, lifetime_s in local.reservations(now)
            for part in (each.id, each.fence, each.pico_usd, lifetime_s)
        ]
        rates = _rates(limits, requests, tokens)
        await self._restore(keys, [self._now_s(), *rates, len(local.doubtful), *doubtful, *reservations])

    def _limits_of(self, bucket: str) -> TenantLimits:
        """Return the limits that belong to a bucket: of a tenant's requests, submissions or reads, or of an API key."""
        if API_KEY in bucket:
            return TenantLimits()  # it has a budget alone, which comes with each request
        limits = self._config.limits(bucket.partition("/")[0])
        if bucket.endswith(READS):
            return limits.of_reads
        return limits.of_submissions if bucket.endswith(SUBMISSIONS) else limits

    def _failed(self, tenant: str, error: Exception) -> None:
        """Decide locally from now on (2): for all tenants, or for one alone if its keys are damaged."""
        if is_wrong_data(error):
            self._damaged(tenant)
        else:
            self._leave_redis(error)

    def _damaged(self, tenant: str) -> None:
        log.error(
            "The rate limits of tenant %s are checked by this process alone, because their keys in Redis are damaged.",
            tenant,
        )

    def _leave_redis(self, error: Exception) -> None:
        if not self._alone:
            log.warning("Tenants' rate limits are checked by this process alone: %s", client_fault(error, self._redis))
        self._alone = True
        self._retry_at = self._clock() + self._config.redis_retry_after_s

    # --- alone -----------------------------------------------------------------------------------------------------

    def _check_locally(self, limits: TenantLimits, reservation: Reservation, lifetime_s: float) -> RateLimited | None:
        now = self._clock()
        local = self._local_limits(reservation.tenant, limits)
        exhausted, wait_s = local.take(reservation, now + lifetime_s, self.day.name, now)
        if self._redis is not None and exhausted in ("budget", "reserved"):
            return self._error("share", _ALONE_RETRY_S, limits, reservation)
        return self._error(exhausted, wait_s, limits, reservation)

    def _local_limits(self, tenant: str, limits: TenantLimits) -> LocalLimits:
        local = self._local.get(tenant)
        if local is None:
            day, used = self._used.get(tenant, ("", 0))
            today = self.day.name
            local = LocalLimits(limits, self._share, today, used if day == today else 0, self._clock())
        _remember(self._local, tenant, local)
        return local

    @property
    def _share(self) -> float:
        if self._redis is None:
            return 1.0
        return 1.0 / self._gateways if self._gateways else self._config.local_share

    def _error(
        self, exhausted: str, wait_s: float, limits: TenantLimits, reservation: Reservation, left: float = 0.0
    ) -> RateLimited | None:
        """Return the error; None if nothing is exhausted. `left`: rest of the day's budget, in 1e-12 USD."""
        if not exhausted:
            return None
        budget = f"Your budget of {limits.usd_per_day:g} USD a day"
        if exhausted == "requests":
            return RateLimited(f"Your limit is {limits.requests_per_s:g} requests a second.", retry_after_s=wait_s)
        if exhausted == "tokens":
            return RateLimited(f"Your limit is {limits.tokens_per_minute} tokens a minute.", retry_after_s=wait_s)
        if exhausted == "reserved":
            message = (
                f"The rest of your budget of {limits.usd_per_day:g} USD a day is reserved for requests in progress. "
                "Retry, or ask for fewer `max_tokens`."
            )
            return RateLimited(message, retry_after_s=_RESERVED_RETRY_S)
        if exhausted == "share":
            message = f"{budget} is limited to this gateway's share while the gateways cannot share it."
            return RateLimited(message, retry_after_s=wait_s)
        message = f"{budget} is spent."
        if left > 0:
            rest, cost = left / PICO_USD, reservation.pico_usd / PICO_USD
            message = f"{budget} has {rest:g} USD left, and this request may cost up to {cost:g}: ask for fewer tokens."
        return RateLimited(message, retry_after_s=self.day.left_s)


def _rates(limits: TenantLimits, requests: float, tokens: float) -> tuple[float, ...]:
    """Return the scripts' arguments for both buckets: rate, capacity and amount of each."""
    per_s = limits.tokens_per_minute / 60.0
    return limits.requests_per_s, limits.request_capacity, requests, per_s, limits.tokens_per_minute, tokens


def _remember(values: OrderedDict[str, Value], tenant: str, value: Value) -> None:
    """Store a value, keeping only the most recently used tenants."""
    values[tenant] = value
    values.move_to_end(tenant)
    while len(values) > _MAX_LOCAL_TENANTS:
        values.popitem(last=False)
