"""A tenant's budget over HTTP: more requests at once than it pays for, and a gateway that is killed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest
import redis.asyncio

from causeway_server.cloud_pool.accounts.tenants.rate_limiter import TenantRateLimiter
from causeway_server.cloud_pool.accounts.tenants.usage import Demand, tenant_key
from causeway_server.router.errors import RateLimited
from tests.cloud_pool.accounts.identity.gateway import ASK, Gateway, running
from tests.redis_server import RedisServer
from tests.waiting import until

from .gateway_process import gateway_config

pytestmark = pytest.mark.redis
ROOT = Path(__file__).parents[4]
USD = 0.01  # a budget for one answer of 100 tokens, of which ten are used
BODY = {**ASK, "max_tokens": 100}


def error(answer: tuple[int, dict[str, Any]]) -> str:
    return str(answer[1]["error"]["message"])


async def test_a_budget_for_one_request_lets_one_run(redis_server: RedisServer, client: redis.asyncio.Redis) -> None:
    """Of 14 at once; what it has left over is for the others afterwards."""
    config = gateway_config(redis_server.url, USD)
    async with running(config) as first, running(config) as second:
        for each in (first, second):
            each.service.held = anyio.Event()
        asking = [asyncio.ensure_future(each.post(body=BODY)) for each in (first, second) for _ in range(7)]
        try:
            with anyio.fail_after(60):
                while sum(each.done() for each in asking) < 13:
                    waiting = [each for each in asking if not each.done()]
                    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            assert len(first.service.calls) + len(second.service.calls) == 1
        finally:
            for each in (first, second):
                if each.service.held is not None:
                    each.service.held.set()
        answers = await asyncio.gather(*asking)
        assert Counter(status for status, _ in answers) == {200: 1, 429: 13}
        assert "reserved for requests in progress" in error(next(each for each in answers if each[0] == 429))
        for each in (first, second):
            await each.accounts.ledger.flush()
        status, _ = await second.post(body={**ASK, "max_tokens": 90})
        assert status == 200
        assert await client.exists(tenant_key("default", "budget"))


@pytest.mark.parametrize("leaves", [True, False])
async def test_a_request_that_fails_gives_the_budget_back(
    redis_server: RedisServer, client: redis.asyncio.Redis, leaves: bool
) -> None:
    """So does a client that leaves: it pays for its tokens only."""
    async with running(gateway_config(redis_server.url, USD)) as gateway:
        if leaves:
            await leave(gateway)
        else:
            status, _ = await gateway.post(body={**BODY, "model": "none"})
            assert status == 404
        await gateway.accounts.ledger.flush()
        gateway.service.held = None
        assert (await gateway.post(body={**BODY, "max_tokens": 99}))[0] == 200


async def leave(gateway: Gateway) -> None:
    gateway.service.held = anyio.Event()
    asking = asyncio.ensure_future(gateway.post(body={**BODY, "stream": True}))
    await gateway.service.reached.wait()
    assert (await gateway.post(body=BODY))[0] == 429
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: "client_gone" in gateway.metrics())


async def test_a_request_beyond_the_days_budget_is_invalid(
    redis_server: RedisServer, client: redis.asyncio.Redis
) -> None:
    async with running(gateway_config(redis_server.url, USD)) as gateway:
        answer = await gateway.post(body={**BODY, "max_tokens": 101})
        assert answer[0] == 400
        assert "your budget is 0.01 USD a day" in error(answer)
        status, _ = await gateway.post(body=ASK)  # the tier's own maximum costs more
        assert status == 400


async def ask_process(url: str) -> None:
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/chat/completions", json=BODY) as answer:
        await answer.read()


async def test_a_killed_gateway_gives_its_reservations_back(
    redis_server: RedisServer, client: redis.asyncio.Redis
) -> None:
    """kill -9 amid an answer: the reservation ends when the request would have ended at the latest."""
    command = [sys.executable, "-m", "tests.cloud_pool.accounts.tenants.gateway_process", redis_server.url, str(USD)]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    url = (await process.stdout.readline()).decode().strip()
    config = gateway_config(redis_server.url, USD)
    async with running(config) as gateway:
        asking = asyncio.ensure_future(ask_process(url))
        assert (await process.stdout.readline()).strip() == b"reached"
        process.kill()
        await process.wait()
        await asyncio.gather(asking, return_exceptions=True)
        assert (await gateway.post(body=BODY))[0] == 429
    deadline_s = config.server.default_deadline_s

    def later(seconds: float) -> TenantRateLimiter:
        return TenantRateLimiter(config.tenants, client, now_s=lambda: time.time() + seconds)

    with pytest.raises(RateLimited):
        await later(deadline_s - 1.0).reserve("default", Demand(tokens=1, pico_usd=10**10))
    await later(deadline_s + 60.0).reserve("default", Demand(tokens=1, pico_usd=10**10))
