"""Budgets of tenants are reserved before a request and settled after it, on a real Redis; without it, gateways share.

The load: requests of one tenant at two gateways at once, whose prices let only one of them run; gateways that are
killed; a Redis that goes away with 3 gateways at work.
"""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest
import redis.asyncio
from prometheus_client import CollectorRegistry

from causeway_server.cloud_pool.accounts.audit import AuditLog
from causeway_server.cloud_pool.accounts.ledger import Ledger, LedgerEntry, TenantMetrics
from causeway_server.cloud_pool.accounts.tenants.config import TenantLimits, TenantsConfig, TierPrice
from causeway_server.cloud_pool.accounts.tenants.rate_limiter import TenantRateLimiter
from causeway_server.cloud_pool.accounts.tenants.usage import UsageRecorder, tenant_key
from causeway_server.cloud_pool.core.principal import Principal
from causeway_server.router.errors import InvalidRequest, RateLimited
from causeway_server.router.types import Message, Request, Usage
from tests.redis_server import RedisServer

from .test_rate_limiter import NOON, Clock

pytestmark = pytest.mark.redis

PRICE = TierPrice(tier="large", input=0, output=1000)  # 0.001 USD a token
DAY = "2027-01-15"
ACME = Principal("acme", "kiosk", frozenset())


def ledger(config: TenantsConfig, limiter: TenantRateLimiter, usage: UsageRecorder) -> Ledger:
    return Ledger(config, limiter, usage, AuditLog(""), TenantMetrics(CollectorRegistry()))


class Gateway:
    """The ledger of one gateway. `wrong_by_s`: of its own clock; `clock` is Redis's."""

    def __init__(
        self, client: redis.asyncio.Redis | None, clock: Clock, limits: TenantLimits, wrong_by_s: float = 0.0
    ) -> None:
        # A long timeout: a real Redis may be slow under load, and these tests are not about the timeout.
        config = TenantsConfig(default=limits, prices=(PRICE,), redis_timeout_s=20.0)
        limiter = TenantRateLimiter(config, client, clock=clock, wall_clock=lambda: clock() + wrong_by_s, now_s=clock)
        self.limiter = limiter
        usage = UsageRecorder(config, client, wall_clock=limiter.day.unix_time)
        self.ledger = ledger(config, limiter, usage)

    async def reserve(self, tokens: int = 100, job: str = "", fence: int = 0, n: int = 1) -> LedgerEntry:
        request = Request(kind="chat", model="large", messages=(Message("user", "hello"),), max_tokens=tokens, n=n)
        entry = LedgerEntry("chat")
        entry.id, entry.tier = job, "large"
        await self.ledger.admit(entry, ACME, request, 100, max_tokens=500, lifetime_s=60.0, fence=fence)
        return entry

    async def granted(self, tokens: int = 100) -> int:
        """How many requests it admits until the first refusal."""
        for count in range(10_000):
            try:
                await self.reserve(tokens)
            except RateLimited:
                return count
        raise AssertionError("no limit")

    async def refusal(self, tokens: int = 100) -> RateLimited:
        with pytest.raises(RateLimited) as caught:
            await self.reserve(tokens)
        return caught.value

    async def settle(self, entry: LedgerEntry, tokens: int) -> None:
        entry.usage = Usage(0, tokens)
        self.ledger.close(entry)
        await self.ledger.flush()


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def spent(client: redis.asyncio.Redis) -> int:
    return int(await client.hget(tenant_key("acme", f"usage:{DAY}"), "pico_usd") or 0)


async def test_a_budget_for_one_request_lets_one_run(client: redis.asyncio.Redis, clock: Clock) -> None:
    """Of 14 at once at two gateways. The others may come again when it has ended, and cost what is left."""
    gateways = [Gateway(client, clock, TenantLimits(usd_per_day=0.1)) for _ in range(2)]
    found = await asyncio.gather(*(gateways[at % 2].reserve() for at in range(14)), return_exceptions=True)
    (reservation,) = (each for each in found if isinstance(each, LedgerEntry))
    refused = [each for each in found if isinstance(each, RateLimited)]
    assert len(refused) == 13
    assert {each.retry_after_s for each in refused} == {2.0}
    assert "reserved for requests in progress" in refused[0].message
    await gateways[0].settle(reservation, 60)
    assert await gateways[1].granted(10) == 4
    assert await spent(client) == 60_000 * 10**6


async def test_what_is_left_of_a_budget_is_said(client: redis.asyncio.Redis, clock: Clock) -> None:
    gateway = Gateway(client, clock, TenantLimits(usd_per_day=0.1))
    await gateway.settle(await gateway.reserve(), 60)
    error = await gateway.refusal(41)
    assert "has 0.04 USD left, and this request may cost up to 0.041" in error.message
    assert error.retry_after_s == NOON // 86400 * 86400 + 86400 - NOON
    await gateway.settle(await gateway.reserve(40), 40)
    assert "is spent" in (await gateway.refusal(1)).message


async def test_a_failed_request_gives_its_reservation_back(client: redis.asyncio.Redis, clock: Clock) -> None:
    gateway = Gateway(client, clock, TenantLimits(usd_per_day=0.1))
    await gateway.settle(await gateway.reserve(), 0)
    await gateway.reserve()


async def test_a_killed_gateway_gives_its_reservations_back(client: redis.asyncio.Redis, clock: Clock) -> None:
    """When its requests would have ended at the latest."""
    killed, other = (Gateway(client, clock, TenantLimits(usd_per_day=0.1)) for _ in range(2))
    await killed.reserve()
    clock.now += 60.0
    await other.refusal()
    clock.now += 31.0
    await other.reserve()


async def test_the_next_run_of_a_job_takes_its_reservation_over(client: redis.asyncio.Redis, clock: Clock) -> None:
    """After a worker was killed; the older run, should it still be there, cannot give it back."""
    first, second = (Gateway(client, clock, TenantLimits(usd_per_day=0.1)) for _ in range(2))
    old = await first.reserve(job="job_1", fence=1)
    await second.reserve(job="job_1", fence=2)
    old.usage = Usage(0, 50)
    first.ledger.close_run(old, first.ledger.charge(old), "superseded")
    await first.ledger.flush()
    assert await spent(client) == 0
    await second.refusal(1)


async def test_a_request_that_costs_more_than_a_days_budget_is_invalid(
    client: redis.asyncio.Redis, clock: Clock
) -> None:
    """It could never run: 400 that says so, instead of 429."""
    gateway = Gateway(client, clock, TenantLimits(usd_per_day=0.1))
    with pytest.raises(InvalidRequest, match=r"may cost up to 0\.101 USD, and your budget is 0\.1 USD a day") as caught:
        await gateway.reserve(101)
    assert caught.value.param == "max_tokens"


async def test_the_most_that_a_request_may_cost_counts_prompts_and_answers(client: redis.asyncio.Redis) -> None:
    config = TenantsConfig(
        default=TenantLimits(usd_per_day=1000.0), prices=(TierPrice(tier="large", input=1000, output=2000),)
    )
    each = ledger(config, TenantRateLimiter(config, client), UsageRecorder(config, client))
    request = Request(kind="completion", model="large", prompts=("a", "b", "c"), n=2)
    for tier, pico_usd in (("large", (501 * 1000 + 3 * 2 * 50 * 2000) * 10**6), ("small", 0)):
        entry = LedgerEntry("completion")
        entry.tier = tier
        await each.admit(entry, ACME, request, 1001, max_tokens=50, lifetime_s=1.0)
        assert entry.reservation is not None
        assert (entry.reservation.pico_usd, entry.reservation.id != "") == (pico_usd, pico_usd > 0)


@pytest.mark.parametrize("seed", range(5))
async def test_reservations_add_up_in_any_order(client: redis.asyncio.Redis, clock: Clock, seed: int) -> None:
    """Jobs, requests, lost replies, ends and midnights: the sum is never negative, and at the end nothing is left."""
    chance = random.Random(seed)
    gateway = Gateway(client, clock, TenantLimits(usd_per_day=1.0))
    keys = tenant_key("acme", "budget"), tenant_key("acme", "budget:ends")
    held: list[LedgerEntry] = []
    for _ in range(300):
        clock.now += chance.choice((0.0, 1.0, 20.0, 3000.0))
        if held and chance.random() < 0.5:
            reservation = chance.choice(held)  # perhaps twice
            await gateway.settle(reservation, chance.choice((0, 1, 200)))
            if chance.random() < 0.8:
                held.remove(reservation)
        else:
            job = f"job_{chance.randrange(5)}" if chance.random() < 0.5 else ""
            with contextlib.suppress(RateLimited):
                held.append(await gateway.reserve(chance.randrange(1, 300), job, chance.randrange(3) if job else 0))
        amounts = {key: value for key, value in (await client.hgetall(keys[0])).items() if key != b"sum"}
        total = sum(int(value.split()[0]) for value in amounts.values())
        assert int(await client.hget(keys[0], "sum") or 0) == total
        assert await client.zcard(keys[1]) == len(amounts)
    for reservation in held:
        await gateway.settle(reservation, 0)
    clock.now += 100.0
    await gateway.granted(1000)
    for key in keys:
        assert await client.exists(key) == 0 or await client.ttl(key) > 0


# --- without Redis ---------------------------------------------------------------------------------------------------


async def test_gateways_divide_rates_and_budgets_while_redis_is_away(
    redis_server: RedisServer, client: redis.asyncio.Redis, clock: Clock
) -> None:
    """Three gateways together hand out no more than one limit, and afterwards nothing twice."""
    limits = TenantLimits(requests_per_s=0.001, burst=30, usd_per_day=3.0)
    gateways = [Gateway(client, clock, limits) for _ in range(3)]
    for each in (*gateways, *gateways):
        await each.ledger.flush()  # they meet
    await gateways[0].settle(await gateways[0].reserve(600), 600)
    for each in gateways[1:]:
        await each.settle(await each.reserve(1), 0)  # they learn what is spent
    redis_server.kill()
    try:
        alone = [await each.granted(300) for each in gateways]
        assert alone == [2, 2, 2]  # of the 2.40 USD that were left, 0.80 USD each
        assert (await gateways[0].refusal(300)).retry_after_s == 10.0
        assert [await each.granted(1) for each in gateways] == [8, 8, 8]  # 30 requests in all
        assert gateways[0].limiter.local_checks == 13
    finally:
        redis_server.start()
    clock.now += 10.0
    for each in gateways:
        await each.ledger.flush()
    before = [each.limiter.local_checks for each in gateways]
    error = await gateways[0].refusal(1)
    assert "requests a second" in error.message
    assert (error.retry_after_s or 0.0) > 1000.0  # 33 were taken of 30: a debt
    assert int(await client.hget(tenant_key("acme", "budget"), "sum") or 0) == 3 * (2 * 300 + 8) * 10**9
    assert [each.limiter.local_checks for each in gateways] == before


async def test_what_was_reserved_alone_is_settled_in_redis(
    redis_server: RedisServer, client: redis.asyncio.Redis, clock: Clock
) -> None:
    gateway = Gateway(client, clock, TenantLimits(usd_per_day=0.2))
    await gateway.ledger.flush()
    redis_server.kill()
    try:
        first, second = await gateway.reserve(), await gateway.reserve()
        await gateway.settle(first, 30)
    finally:
        redis_server.start()
    clock.now += 10.0
    await gateway.ledger.flush()
    assert await gateway.granted(10) == 7  # 30 spent, 100 reserved
    await gateway.settle(second, 50)
    assert await spent(client) == 80_000 * 10**6
    assert await gateway.granted(10) == 5


async def test_a_gateway_that_never_reached_redis_takes_its_local_share(
    redis_server: RedisServer, client: redis.asyncio.Redis, clock: Clock
) -> None:
    redis_server.kill()
    try:
        gateway = Gateway(client, clock, TenantLimits(requests_per_s=4.0, burst=8, usd_per_day=2.0))
        assert await gateway.granted(1) == 4
        clock.now += 10.0
        assert await gateway.granted(900) == 1
    finally:
        redis_server.start()


async def test_a_gateway_without_redis_has_the_whole_budget(clock: Clock) -> None:
    gateway = Gateway(None, clock, TenantLimits(usd_per_day=1.0))
    reservation = await gateway.reserve(600)
    assert (await gateway.refusal(600)).retry_after_s == 2.0
    await gateway.settle(reservation, 300)
    await gateway.settle(await gateway.reserve(700), 700)
    assert "is spent" in (await gateway.refusal(1)).message
    clock.now += 86400.0
    await gateway.reserve(1000)


async def test_each_sequence_of_a_request_is_taken_from_the_rate(client: redis.asyncio.Redis, clock: Clock) -> None:
    gateway = Gateway(client, clock, TenantLimits(requests_per_s=1.0, burst=8))
    await gateway.reserve(n=4)
    await gateway.reserve(n=4)
    assert "requests a second" in (await gateway.refusal()).message


@pytest.mark.parametrize("wrong_by_s", [86_400.0, -86_400.0])
async def test_the_day_is_that_of_redis(client: redis.asyncio.Redis, clock: Clock, wrong_by_s: float) -> None:
    """A process whose own clock is wrong neither uses another day's budget nor counts for one."""
    limits = TenantLimits(usd_per_day=0.25)
    punctual, wrong = Gateway(client, clock, limits), Gateway(client, clock, limits, wrong_by_s)
    await punctual.settle(await punctual.reserve(100), 100)
    await wrong.settle(await wrong.reserve(100), 100)
    assert await spent(client) == 200_000 * 10**6
    refused = await wrong.refusal(100)
    assert refused.retry_after_s == (await punctual.refusal(100)).retry_after_s
    unused = Gateway(client, clock, limits, wrong_by_s)
    await unused.ledger.flush()  # as at its start
    assert unused.limiter.day.name == DAY
