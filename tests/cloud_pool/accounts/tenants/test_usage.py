"""Usage by tenant, tier and route."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
import redis.asyncio
from anyio import to_thread
from click.testing import CliRunner, Result
from prometheus_client import CollectorRegistry

from causeway_server.cloud_pool.accounts.audit import AuditLog
from causeway_server.cloud_pool.accounts.ledger import Ledger, LedgerEntry, TenantMetrics
from causeway_server.cloud_pool.accounts.tenants.config import TenantConfig, TenantLimits, TenantsConfig, TierPrice
from causeway_server.cloud_pool.accounts.tenants.rate_limiter import TenantRateLimiter
from causeway_server.cloud_pool.accounts.tenants.usage import Charge, Reservation, UsageRecorder, UsageRow, read_usage
from causeway_server.cloud_pool.cli.usage import usage_command
from causeway_server.cloud_pool.core.principal import Principal
from causeway_server.router.errors import ConfigError, InvalidRequest
from causeway_server.router.types import Message, Request, Usage
from tests.redis_server import RedisServer, unreachable_redis

NOW = 1_795_262_400.0
DAY = "2026-11-21"
CONFIG = TenantsConfig(prices=(TierPrice(tier="large", input=500, output=1500),))


def ledger(client: redis.asyncio.Redis | None, config: TenantsConfig = CONFIG) -> Ledger:
    recorder = UsageRecorder(config, client, wall_clock=lambda: NOW)
    return Ledger(config, TenantRateLimiter(config, client), recorder, AuditLog(""), TenantMetrics(CollectorRegistry()))


async def admitted(
    each: Ledger, tenant: str, request: Request, body_bytes: int = 100, *, route: str = "chat", tier: str = "large"
) -> LedgerEntry:
    entry = LedgerEntry(route)
    entry.tier = tier
    principal = Principal(tenant, "kiosk", frozenset())
    await each.admit(entry, principal, request, body_bytes, max_tokens=100, lifetime_s=60.0)
    return entry


async def reserved_tokens(each: Ledger, tenant: str, request: Request, body_bytes: int) -> int:
    reservation = (await admitted(each, tenant, request, body_bytes)).reservation
    assert reservation is not None
    return reservation.tokens


def one(tenant: str, prompt: int = 10) -> Charge:
    return Charge(Reservation(tenant, 0), "large", "chat", Usage(prompt, 1), 5)


class LossyClient:
    """Runs scripts in a real Redis and loses their replies."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self.loses_replies = True
        self.lost = 0

    def register_script(self, text: str) -> Callable[..., Awaitable[object]]:
        script = self._client.register_script(text)

        async def run(*arguments: Any) -> object:
            reply = await script(*arguments)
            if not self.loses_replies:
                return reply
            self.lost += 1
            raise redis.ConnectionError("the reply was lost")

        return run


def ask(**changes: Any) -> Request:
    return Request(kind="chat", model="large", messages=(Message("user", "hello"),), **changes)


@pytest.mark.redis
async def test_usage_of_two_gateways_is_summed(client: redis.asyncio.Redis) -> None:
    gateways = [ledger(client) for _ in range(2)]
    for each in gateways:
        for route in ("chat", "chat", "job"):
            entry = await admitted(each, "acme", ask(), route=route)
            entry.usage = Usage(1000, 100)
            charge = each.charge(entry)
            assert charge is not None
            assert charge.pico_usd == 650_000_000_000
            each.close(entry)
        await each.flush()
    assert await read_usage(client, "acme", DAY) == (
        UsageRow("large", "chat", 4, 4000, 400, 2.6),
        UsageRow("large", "job", 2, 2000, 200, 1.3),
    )
    assert await read_usage(client, "other", DAY) == ()


@pytest.mark.redis
async def test_a_batch_whose_reply_was_lost_counts_once(client: redis.asyncio.Redis) -> None:
    lossy = LossyClient(client)
    recorder = UsageRecorder(CONFIG, cast("redis.asyncio.Redis", lossy), wall_clock=lambda: NOW)
    recorder.record(one("acme"))
    assert not await recorder.flush()
    assert not await recorder.flush()
    lossy.loses_replies = False
    assert await recorder.flush()
    assert lossy.lost == 2
    assert [row.requests for row in await read_usage(client, "acme", DAY)] == [1]


@pytest.mark.redis
async def test_usage_survives_a_killed_redis(redis_server: RedisServer, client: redis.asyncio.Redis) -> None:
    recorder = UsageRecorder(CONFIG, client, wall_clock=lambda: NOW)
    recorder.record(one("acme"))
    assert await recorder.flush()
    redis_server.kill()
    try:
        recorder.record(one("acme"))
        assert not await recorder.flush()
        recorder.record(one("acme"))
    finally:
        redis_server.start()
    assert await recorder.flush()
    (row,) = await read_usage(client, "acme", DAY)
    assert (row.requests, row.prompt_tokens, row.usd) == (3, 30, 15e-12)


@pytest.mark.redis
async def test_the_usage_command_prints_a_table_or_json(redis_server: RedisServer, client: redis.asyncio.Redis) -> None:
    each = ledger(client)
    entry = await admitted(each, "acme", ask())
    entry.usage = Usage(1000, 100)
    each.close(entry)
    await each.flush()

    async def run(*args: str) -> Result:
        return await to_thread.run_sync(lambda: CliRunner().invoke(usage_command, args, env={"COLUMNS": "120"}))

    shown = await run("acme", "--redis", redis_server.url, "--day", DAY)
    assert shown.exit_code == 0
    assert "0.650000" in shown.output
    listed = await run("acme", "--redis", redis_server.url, "--day", DAY, "--format", "json")
    assert json.loads(listed.output)[0]["prompt_tokens"] == 1000
    assert json.loads((await run("other", "--redis", redis_server.url, "--day", DAY, "--format", "json")).output) == []
    assert (
        f"other has no recorded usage on {DAY}"
        in (await run("other", "--redis", redis_server.url, "--day", DAY)).output
    )
    assert (await run("acme", "--redis", "redis://127.0.0.1:1/0")).exit_code == 2
    assert (await run("acme", "--redis", "nonsense")).exit_code == 2


@pytest.mark.parametrize("day", ["yesterday", "2026-13-01", "21.11.2026", ""])
def test_a_bad_day_is_an_error_that_says_what_to_write(day: str) -> None:
    result = CliRunner().invoke(usage_command, ["acme", "--redis", "redis://127.0.0.1:1/0", "--day", day])
    assert result.exit_code == 2
    assert "is not a day: write year-month-day, such as 2026-11-21" in result.output


async def test_pending_usage_is_bounded() -> None:
    recorder = UsageRecorder(CONFIG, unreachable_redis(), wall_clock=lambda: NOW)
    for number in range(5000):
        recorder.record(one(f"t{number}"))
    assert recorder.lost == 1000
    assert not await recorder.flush()
    recorder.record(one("t0"))
    assert recorder.lost == 1001


async def test_a_tier_without_a_price_costs_nothing() -> None:
    each = ledger(None)
    entry = await admitted(each, "acme", ask(), tier="small")
    entry.usage = Usage(10, 10)
    charge = each.charge(entry)
    assert charge is not None
    assert charge.pico_usd == 0


async def test_reserved_tokens_are_estimated_from_body_and_max_tokens() -> None:
    config = TenantsConfig(default=TenantLimits(tokens_per_minute=10_000))
    each = ledger(None, config)
    assert await reserved_tokens(each, "a", ask(max_tokens=50, n=3), 400) == 250
    assert await reserved_tokens(each, "b", ask(), 400) == 356
    assert await reserved_tokens(each, "c", ask(max_tokens=50, n=3, prompts=("a", "b")), 400) == 400


def test_tenant_limits_bound_bodies_and_answers() -> None:
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


def test_duplicate_names_are_refused() -> None:
    for config in (
        TenantsConfig(overrides=(TenantConfig(name="a"), TenantConfig(name="a"))),
        TenantsConfig(prices=(TierPrice(tier="a"), TierPrice(tier="a"))),
    ):
        with pytest.raises(ConfigError, match=r"\[1\]"):
            config.check({}, "")
