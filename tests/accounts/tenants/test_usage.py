"""What was used, by tenant, tier and route."""

from __future__ import annotations

import json
from typing import Any

import pytest
import redis.asyncio
from anyio import to_thread
from click.testing import CliRunner, Result

from cloud_pool.accounts.tenants.accounting import TenantAccounting
from cloud_pool.accounts.tenants.config import Price, TenantConfig, TenantLimits, TenantsConfig
from cloud_pool.accounts.tenants.rate_limiter import TenantRateLimiter
from cloud_pool.accounts.tenants.usage import UsageRecorder, UsageRow, read_usage
from cloud_pool.cli.usage import usage_command
from router.errors import ConfigError, InvalidRequest
from router.types import Message, Request, Usage
from tests.redis_server import RedisServer

NOW = 1_795_262_400.0
DAY = "2026-11-21"
CONFIG = TenantsConfig(prices=(Price(tier="large", per_1k_prompt=0.5, per_1k_completion=1.5),))


def accounts(client: redis.asyncio.Redis | None, config: TenantsConfig = CONFIG) -> TenantAccounting:
    book = UsageRecorder(config, client, wall_clock=lambda: NOW)
    return TenantAccounting(config, TenantRateLimiter(config, client), book)


def ask(**changes: Any) -> Request:
    return Request(kind="chat", model="large", messages=(Message("user", "hello"),), **changes)


@pytest.mark.redis
async def test_two_gateways_add_up(client: redis.asyncio.Redis) -> None:
    """Requests, tokens and money of all gateways are one sum for each tenant, tier and route."""
    gateways = [accounts(client) for _ in range(2)]
    for each in gateways:
        for route in ("chat", "chat", "job"):
            reservation = await each.reserve("acme", ask(), 100)
            assert each.settle(reservation, "large", route, Usage(1000, 100)) == 650_000
        await each.flush()
    assert await read_usage(client, "acme", DAY) == (
        UsageRow("large", "chat", 4, 4000, 400, 2.6),
        UsageRow("large", "job", 2, 2000, 200, 1.3),
    )
    assert await read_usage(client, "other", DAY) == ()


@pytest.mark.redis
async def test_a_batch_whose_reply_was_lost(client: redis.asyncio.Redis) -> None:
    """A batch that Redis has taken, and that is sent again because nobody heard so, counts once."""
    book = UsageRecorder(CONFIG, client, wall_clock=lambda: NOW)
    real, replies = book._add, [0]

    async def deaf(*args: Any) -> None:
        await real(*args)
        replies[0] += 1
        raise redis.ConnectionError("the reply was lost")

    book.record("acme", "large", "chat", Usage(10, 1), 5)
    book._add = deaf
    assert not await book.flush()
    assert not await book.flush()
    book._add = real
    assert await book.flush()
    assert replies == [2]
    assert [row.requests for row in await read_usage(client, "acme", DAY)] == [1]


@pytest.mark.redis
async def test_redis_killed_and_back(redis_server: RedisServer, client: redis.asyncio.Redis) -> None:
    """What is recorded while Redis is away is there when it is back, and what it had confirmed has survived kill -9."""
    book = UsageRecorder(CONFIG, client, wall_clock=lambda: NOW)
    book.record("acme", "large", "chat", Usage(10, 1), 5)
    assert await book.flush()
    redis_server.kill()
    try:
        book.record("acme", "large", "chat", Usage(10, 1), 5)
        assert not await book.flush()
        book.record("acme", "large", "chat", Usage(10, 1), 5)
    finally:
        redis_server.start()
    assert await book.flush()
    (row,) = await read_usage(client, "acme", DAY)
    assert (row.requests, row.prompt_tokens, row.usd) == (3, 30, 15e-6)


@pytest.mark.redis
async def test_the_command(redis_server: RedisServer, client: redis.asyncio.Redis) -> None:
    """`usage` shows a tenant's day as a table and as JSON; another tenant's is empty, and no Redis is status 2."""
    each = accounts(client)
    each.settle(await each.reserve("acme", ask(), 100), "large", "chat", Usage(1000, 100))
    await each.flush()

    async def said(*args: str) -> Result:
        return await to_thread.run_sync(lambda: CliRunner().invoke(usage_command, args, env={"COLUMNS": "120"}))

    shown = await said("acme", "--redis", redis_server.url, "--day", DAY)
    assert shown.exit_code == 0
    assert "0.650000" in shown.output
    listed = await said("acme", "--redis", redis_server.url, "--day", DAY, "--json")
    assert json.loads(listed.output)[0]["prompt_tokens"] == 1000
    assert json.loads((await said("other", "--redis", redis_server.url, "--day", DAY, "--json")).output) == []
    assert (await said("acme", "--redis", "redis://127.0.0.1:1/0")).exit_code == 2
    assert (await said("acme", "--redis", "nonsense")).exit_code == 2


async def test_memory_is_bounded() -> None:
    """Without Redis for long, tenants without end cost counted records, not memory."""
    book = UsageRecorder(CONFIG, redis.asyncio.Redis(host="127.0.0.1", port=1, retry=None), wall_clock=lambda: NOW)
    for number in range(5000):
        book.record(f"t{number}", "large", "chat", Usage(1, 1), 1)
    assert book.lost == 1000
    assert not await book.flush()
    book.record("t0", "large", "chat", Usage(1, 1), 1)
    assert book.lost == 1001


async def test_a_tier_without_a_price() -> None:
    """It costs nothing, and is counted all the same."""
    each = accounts(None)
    assert each.settle(await each.reserve("acme", ask(), 10), "small", "chat", Usage(10, 10)) == 0


async def test_what_is_reserved() -> None:
    """The body's length stands for the prompt's, the longest answer for the answer's, once for each that is wanted."""
    config = TenantsConfig(default=TenantLimits(tokens_per_minute=10_000))
    each = accounts(None, config)
    assert (await each.reserve("a", ask(max_tokens=50, n=3), 400)).tokens == 250
    assert (await each.reserve("b", ask(), 400)).tokens == 356


def test_caps() -> None:
    """Each tenant's own sizes: bodies are bounded, a longer answer is 400, no named length is the longest."""
    limits = TenantConfig(name="acme", max_tokens=100, max_body_bytes=10)
    assert (limits.body_bytes(100), limits.body_bytes(5)) == (10, 5)
    limits.check_request(ask(max_tokens=100))
    with pytest.raises(InvalidRequest) as caught:
        limits.check_request(ask(max_tokens=101))
    assert caught.value.param == "max_tokens"
    assert limits.bounded(ask()).max_tokens == 100
    assert limits.bounded(ask(max_tokens=3)).max_tokens == 3
    assert TenantLimits().bounded(ask()).max_tokens is None
    assert TenantLimits().body_bytes(7) == 7
    TenantLimits().check_request(ask(max_tokens=10**9))


def test_the_same_name_twice() -> None:
    """A tenant or a price that is there twice is refused with its place."""
    for config in (
        TenantsConfig(overrides=(TenantConfig(name="a"), TenantConfig(name="a"))),
        TenantsConfig(prices=(Price(tier="a"), Price(tier="a"))),
    ):
        with pytest.raises(ConfigError, match=r"\[1\]"):
            config.check()
