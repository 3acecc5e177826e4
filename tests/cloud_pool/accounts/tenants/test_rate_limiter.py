"""Rates and budgets of tenants, with a real Redis and without."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from causeway_server.cloud_pool.accounts.tenants.config import TenantConfig, TenantLimits, TenantsConfig
from causeway_server.cloud_pool.accounts.tenants.rate_limiter import SETTLE_SCRIPT, TAKE_SCRIPT, TenantRateLimiter
from causeway_server.cloud_pool.accounts.tenants.usage import Charge, Demand, Reservation, UsageRecorder
from causeway_server.cloud_pool.core.principal import Principal
from causeway_server.cloud_pool.redis.connect import ConnectionOptions, open_redis
from causeway_server.router.errors import RateLimited
from causeway_server.router.serving.responses import error_response
from causeway_server.router.types import Usage
from tests.redis_server import RedisServer, unreachable_redis

pytestmark = pytest.mark.redis

NOON = 1_800_014_400.0 - 1_800_014_400.0 % 86400 + 43200  # unix, s


class Clock:
    """One clock for everything: monotonic, wall and Redis's."""

    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def budgets(
    limits: TenantLimits, client: redis.asyncio.Redis | None, clock: Clock, share: float = 0.5
) -> TenantRateLimiter:
    # A long timeout: a real Redis may be slow under load, and these tests are not about the timeout.
    config = TenantsConfig(default=limits, local_share=share, redis_timeout_s=20.0)
    return TenantRateLimiter(config, client, clock=clock, wall_clock=clock, now_s=clock)


def used(reservation: Reservation, tokens: int, pico_usd: int = 0) -> Charge:
    return Charge(reservation, "large", "chat", Usage(tokens), pico_usd)


async def refused(limiter: TenantRateLimiter, tenant: str = "acme", tokens: int = 0, cost: int = 0) -> float:
    """Expect 429 with Retry-After; returns the time to wait, s."""
    with pytest.raises(RateLimited) as caught:
        await limiter.reserve(tenant, Demand(tokens=tokens, pico_usd=cost))
    answer = error_response(caught.value)
    assert answer.status == 429
    assert int(answer.headers["Retry-After"]) >= 1
    assert caught.value.retry_after_s is not None
    return caught.value.retry_after_s


async def test_a_tenant_without_limits_needs_no_redis(clock: Clock) -> None:
    limiter = budgets(TenantLimits(), unreachable_redis(), clock)
    assert await limiter.reserve("acme", Demand(tokens=10**9)) == Reservation("acme", 10**9)
    assert limiter.local_checks == 0


@pytest.mark.parametrize(
    ("limits", "at_once"),
    [
        (TenantLimits(), 100),
        (TenantLimits(requests_per_s=2.0), 4),
        (TenantLimits(requests_per_s=2.0, burst=7), 7),
        (TenantLimits(requests_per_s=80.0, burst=7), 100),
        (TenantLimits(requests_per_s=2.0, submissions_per_s=0.0), 4),
    ],
)
async def test_submissions_have_the_lower_one_of_two_rates(clock: Clock, limits: TenantLimits, at_once: int) -> None:
    limiter = budgets(limits, None, clock)
    for _ in range(at_once):
        await limiter.take_submission("flood")
    with pytest.raises(RateLimited, match="a second"):
        await limiter.take_submission("flood")
    await limiter.take_submission("quiet")


async def test_reads_have_a_rate_unless_it_is_off(clock: Clock) -> None:
    limiter = budgets(TenantLimits(), None, clock)
    for _ in range(1000):
        await limiter.take_reads("flood", 1)
    with pytest.raises(RateLimited, match="reads_per_s"):
        await limiter.take_reads("flood", 1)
    await limiter.take_reads("quiet", 1)
    unlimited = budgets(TenantLimits(reads_per_s=0.0, submissions_per_s=0.0), None, clock)
    for _ in range(2000):
        await unlimited.take_reads("flood", 1)
        await unlimited.take_submission("flood")


class LossyRelay:
    """Stands between a client and Redis; where `loses`, it cuts the connection in place of a script's reply."""

    def __init__(self, port: int) -> None:
        self._redis_port = port
        self.loses = False
        self.lost = 0

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_redis, to_redis = await asyncio.open_connection("127.0.0.1", self._redis_port)
        while data := await reader.read(1 << 16):
            to_redis.write(data)
            reply = await from_redis.read(1 << 16)
            if self.loses and b"EVALSHA" in data.upper():
                self.lost += 1
                break
            writer.write(reply)
        for each in (writer, to_redis):
            each.close()


async def test_a_charge_whose_reply_was_lost_counts_once(client: redis.asyncio.Redis, clock: Clock) -> None:
    """Redis made it; the gateway, which cannot know, makes it again by itself, and Redis tells them apart later."""
    relay = LossyRelay(int(client.connection_pool.connection_kwargs["port"]))
    listener = await asyncio.start_server(relay.connected, "127.0.0.1", 0)
    lossy = redis.asyncio.Redis(port=listener.sockets[0].getsockname()[1], retry=Retry(NoBackoff(), 0))
    limiter = budgets(TenantLimits(requests_per_s=0.001, burst=10, tokens_per_minute=6000), lossy, clock)
    try:
        await limiter.reserve("acme", Demand(tokens=100))
        relay.loses = True
        await limiter.reserve("acme", Demand(tokens=200))
        assert (relay.lost, limiter.local_checks) == (1, 1)
        relay.loses = False
        clock.now += 1.0
        await limiter.flush()
        level = await client.hget("causeway:tenant:{acme}:requests", "level")
        assert float(level or 0) == pytest.approx(8.0, abs=0.01)
        tokens = await client.hget("causeway:tenant:{acme}:tokens", "level")
        assert float(tokens or 0) >= 5700.0
    finally:
        await lossy.aclose()
        listener.close()


async def test_a_repeated_charge_is_made_once(client: redis.asyncio.Redis, clock: Clock) -> None:
    """As the client of a cluster repeats a script whose reply was lost: with the same arguments."""
    take = client.register_script(TAKE_SCRIPT)
    settle = client.register_script(SETTLE_SCRIPT)
    names = ("requests", "tokens", "usage:x", "budget", "budget:ends", "charge:1")
    keys = [f"causeway:tenant:{{acme}}:{name}" for name in names]
    for _ in range(2):
        assert (await take(keys, [clock(), 1, 10, 3, 1, 100, 40, 0, 0, "", 0, 60, 0, 60_000]))[0] == b""
        await settle([keys[1], f"{keys[5]}s"], [clock(), 1, 100, 10, 60_000])
    levels = [float(await client.hget(key, "level") or 0) for key in keys[:2]]
    assert levels == [7.0, 50.0]


async def test_two_gateways_share_a_burst(client: redis.asyncio.Redis, clock: Clock) -> None:
    limits = TenantLimits(requests_per_s=5.0, burst=10)
    gateways = [budgets(limits, client, clock) for _ in range(2)]
    found = await asyncio.gather(
        *(gateways[at % 2].reserve("acme", Demand(tokens=0)) for at in range(40)), return_exceptions=True
    )
    assert sum(isinstance(each, Reservation) for each in found) == 10
    assert all(isinstance(each, Reservation | RateLimited) for each in found)
    await gateways[0].reserve("other", Demand(tokens=0))
    assert await refused(gateways[1]) == pytest.approx(0.2, abs=0.002)
    clock.now += 0.2
    await gateways[1].reserve("acme", Demand(tokens=0))
    await refused(gateways[0])


async def test_tokens_are_reserved_and_settled(client: redis.asyncio.Redis, clock: Clock) -> None:
    first, second = (budgets(TenantLimits(tokens_per_minute=600), client, clock) for _ in range(2))
    reservation = await first.reserve("acme", Demand(tokens=500))
    assert await refused(second, tokens=200) == pytest.approx(10.0, abs=0.01)  # 100 missing, 10 per second
    first.settle(used(reservation, 100))
    await first.flush()
    await second.reserve("acme", Demand(tokens=500))
    await refused(second, tokens=1)


async def test_an_answer_longer_than_reserved_delays_the_next_request(
    client: redis.asyncio.Redis, clock: Clock
) -> None:
    limiter = budgets(TenantLimits(tokens_per_minute=600), client, clock)
    limiter.settle(used(await limiter.reserve("acme", Demand(tokens=600)), 900))
    await limiter.flush()
    assert await refused(limiter, tokens=100) == pytest.approx(40.0, abs=0.01)
    clock.now += 40.0
    await limiter.reserve("acme", Demand(tokens=100))


async def test_a_request_larger_than_the_bucket_is_possible(client: redis.asyncio.Redis, clock: Clock) -> None:
    limiter = budgets(TenantLimits(tokens_per_minute=600), client, clock)
    assert (await limiter.reserve("acme", Demand(tokens=10**6))).tokens == 600
    await refused(limiter, tokens=10**6)


@pytest.mark.parametrize("in_redis", [True, False])
async def test_a_request_counts_as_its_sequences(client: redis.asyncio.Redis, clock: Clock, in_redis: bool) -> None:
    limiter = budgets(TenantLimits(requests_per_s=8.0, burst=16), client if in_redis else None, clock)
    await limiter.reserve("acme", Demand(tokens=0, sequences=12))
    with pytest.raises(RateLimited) as caught:
        await limiter.reserve("acme", Demand(tokens=0, sequences=12))
    assert caught.value.retry_after_s == pytest.approx(1.0, abs=0.002)
    clock.now += 1.0
    await limiter.reserve("acme", Demand(tokens=0, sequences=12))


async def test_a_refusal_takes_nothing(client: redis.asyncio.Redis, clock: Clock) -> None:
    limiter = budgets(TenantLimits(requests_per_s=1.0, burst=2, tokens_per_minute=60), client, clock)
    await limiter.reserve("acme", Demand(tokens=60))
    for _ in range(5):
        await refused(limiter, tokens=60)
    clock.now += 60.0
    await limiter.reserve("acme", Demand(tokens=1))
    await limiter.reserve("acme", Demand(tokens=1))


async def test_a_spent_budget_is_refused_until_midnight_utc(client: redis.asyncio.Redis, clock: Clock) -> None:
    limiter = budgets(TenantLimits(usd_per_day=1.0), client, clock)
    book = UsageRecorder(TenantsConfig(), client, wall_clock=clock)
    for cost in (10**12 - 10, 9, 1):
        reservation = await limiter.reserve("acme", Demand(tokens=0, pico_usd=cost))
        book.record(used(reservation, 0, cost))
        await book.flush()
    assert await refused(limiter, cost=1) == 43200.0
    clock.now += 43200.0
    await limiter.reserve("acme", Demand(tokens=0, pico_usd=1))


async def test_redis_and_local_buckets_decide_alike(client: redis.asyncio.Redis, clock: Clock) -> None:
    chance = random.Random(7)
    limits = TenantLimits(requests_per_s=2.0, burst=4, tokens_per_minute=1200)
    shared, alone = budgets(limits, client, clock), budgets(limits, None, clock)
    seen = set()
    for _ in range(150):
        clock.now += chance.choice((0.0, 0.125, 0.5, 3.0))
        tokens = chance.choice((0, 10, 100, 400))
        outcomes = []
        for each in (shared, alone):
            try:
                each.settle(used(await each.reserve("acme", Demand(tokens=tokens)), tokens // 2))
                outcomes.append("")
            except RateLimited as error:
                outcomes.append(error.message)
            await each.flush()
        assert outcomes[0] == outcomes[1]
        seen.add(outcomes[0])
    assert len(seen) == 3, "each kind of refusal happened"


async def test_settlements_without_redis_go_to_the_local_bucket(
    redis_server: RedisServer, client: redis.asyncio.Redis, clock: Clock
) -> None:
    limiter = budgets(TenantLimits(tokens_per_minute=600), client, clock)
    reservation = await limiter.reserve("acme", Demand(tokens=10))
    redis_server.kill()
    try:
        limiter.settle(used(reservation, 310))
        await limiter.flush()
        assert await refused(limiter, tokens=1) > 0
    finally:
        redis_server.start()


async def test_concurrent_requests_wait_for_a_connection(
    redis_server: RedisServer, client: redis.asyncio.Redis, clock: Clock
) -> None:
    """None of a thousand falls back to the local share. (A busy machine may take long to connect 64 times at once.)"""
    async with open_redis(redis_server.url, "redis", ConnectionOptions(connect_timeout_s=60.0)) as many:
        limiter = budgets(TenantLimits(requests_per_s=1.0, burst=900), many, clock)
        found = await asyncio.gather(
            *(limiter.reserve("acme", Demand(tokens=0)) for _ in range(1000)), return_exceptions=True
        )
    assert sum(isinstance(each, Reservation) for each in found) == 900
    assert limiter.local_checks == 0


async def test_a_cancelled_check_leaves_no_reply_for_the_next_one(client: redis.asyncio.Redis, clock: Clock) -> None:
    limiter = budgets(TenantLimits(requests_per_s=1.0, burst=1000), client, clock)
    for _ in range(20):
        asking = asyncio.ensure_future(limiter.reserve("acme", Demand(tokens=0)))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    assert await limiter.reserve("acme", Demand(tokens=0)) == Reservation("acme", 0)
    assert limiter.local_checks == 0


def test_overrides_apply_by_name() -> None:
    config = TenantsConfig(default=TenantLimits(max_tokens=1), overrides=(TenantConfig(name="acme", max_tokens=7),))
    assert (config.limits("acme").max_tokens, config.limits("other").max_tokens) == (7, 1)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"overrides": [{"name": "a b"}]}, TenantsConfig)


async def test_submissions_are_shared_by_all_gateways(redis_server: RedisServer, clock: Clock) -> None:
    limits = TenantLimits(requests_per_s=1.0, burst=2, tokens_per_minute=1, usd_per_day=0.0001)
    client = redis.asyncio.Redis.from_url(redis_server.url)
    first, second = (budgets(limits, client, clock) for _ in range(2))
    await first.take_submission("sender")
    await second.take_submission("sender")
    with pytest.raises(RateLimited, match="requests_per_s") as caught:
        await first.take_submission("sender")
    assert caught.value.retry_after_s == pytest.approx(1.0, abs=0.01)
    clock.now += 1.0
    await second.take_submission("sender")
    await client.aclose()


def test_a_key_with_a_budget_never_reserves_at_once(clock: Clock) -> None:
    """Such a key makes two reservations: if the second is refused, the first one is to be returned."""
    limiter = budgets(TenantLimits(usd_per_day=1.0), None, clock)
    of_tenant = Principal("acme", "kiosk", frozenset({"chat"}))
    assert limiter.decides_now(of_tenant)
    assert not limiter.decides_now(msgspec.structs.replace(of_tenant, usd_per_day=0.1))
