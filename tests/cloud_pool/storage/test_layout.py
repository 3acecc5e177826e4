"""Keys in Redis carry a layout version: a process that knows another one says so and changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp
import anyio
import pytest
import redis
from prometheus_client import CollectorRegistry

from causeway_server.cloud_pool.accounts.identity.config import IdentityConfig
from causeway_server.cloud_pool.app import JobsGateway, build_accounts
from causeway_server.cloud_pool.background import WorkerRuntime
from causeway_server.cloud_pool.config import Config
from causeway_server.cloud_pool.jobs.http.job_api import JobCallers
from causeway_server.cloud_pool.jobs.worker.execution import WorkerSlots
from causeway_server.cloud_pool.observability.metrics import Metrics
from causeway_server.cloud_pool.redis.keys import ACCOUNTS_LAYOUT, ACCOUNTS_LAYOUT_KEY, JOBS_LAYOUT
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.storage.job_store import JobStore
from causeway_server.cloud_pool.storage.record import NewJob
from causeway_server.cloud_pool.storage.redis_client import JobStoreLayoutMismatch, RedisClient
from causeway_server.router.errors import ConfigError
from tests.cloud_pool.jobs.conftest import Clock
from tests.cloud_pool.jobs.gateway import identify, serving
from tests.cloud_pool.jobs.redis_server import RedisServer
from tests.cloud_pool.jobs.scripted_worker import ScriptedRunner, answers
from tests.cloud_pool.jobs.test_api import CHAT, TIER

NEWER = str(JOBS_LAYOUT + 1)
ADVICE = {NEWER: "Upgrade this process", "0": "Let that version finish its work"}


def worker(config: JobsConfig) -> WorkerRuntime:
    return WorkerRuntime(
        config, {"large": TIER}, ScriptedRunner(answers), {"large": WorkerSlots("large", 1)}, CollectorRegistry()
    )


async def test_a_worker_marks_an_empty_redis_with_its_layout(config: JobsConfig, database: RedisClient) -> None:
    runtime = worker(config)
    stop = anyio.Event()
    starting = asyncio.create_task(runtime.start(stop))
    assert await starting is True
    assert await database.command("GET", database.key("layout")) == str(JOBS_LAYOUT).encode()
    await runtime.close()


@pytest.mark.parametrize("found", ADVICE)
async def test_a_worker_does_not_start_over_another_layout(
    config: JobsConfig, database: RedisClient, found: str
) -> None:
    await database.command("SET", database.key("layout"), found)
    runtime = worker(config)
    with pytest.raises(ConfigError, match=f"have layout {found}.*works with layout {JOBS_LAYOUT}.*{ADVICE[found]}"):
        await runtime.start(anyio.Event())
    await runtime.close()


@pytest.mark.parametrize("found", ADVICE)
async def test_a_gateway_refuses_jobs_over_another_layout(
    config: JobsConfig, database: RedisClient, clock: Clock, found: str
) -> None:
    """Interactive requests need no jobs, so the gateway itself starts."""
    await database.command("SET", database.key("layout"), found)
    gateway = JobsGateway(config, {"big": TIER}, JobCallers(identify), CollectorRegistry(), clock=clock)
    headers = {"authorization": "Bearer kiosk"}
    async with (
        serving(gateway.api.handler) as url,
        aiohttp.ClientSession(url, headers=headers) as http,
        http.post("/v1/jobs", json=CHAT) as response,
    ):
        fault = (await response.json())["error"]
    await gateway.close()
    assert (response.status, fault["code"]) == (503, "job_store_layout")
    assert ADVICE[found] in fault["message"]


async def test_a_running_process_changes_nothing_after_the_layout_has_changed(
    store: JobStore, database: RedisClient, new_job: Callable[..., NewJob]
) -> None:
    """No script runs any more: not one that adds a job, not one that ends it."""
    await store.accept(new_job())
    (record,) = (await store.claim("w", "large", ["standard"])).records
    await database.command("SET", database.key("layout"), NEWER)
    with pytest.raises(JobStoreLayoutMismatch, match=f"layout {NEWER}"):
        await store.succeed(record.id, record.fence, b"{}")
    with pytest.raises(JobStoreLayoutMismatch):
        await store.accept(new_job())
    await database.command("SET", database.key("layout"), JOBS_LAYOUT)
    assert await store.succeed(record.id, record.fence, b"{}")


async def test_a_process_does_not_start_over_accounts_of_another_layout(redis_server: RedisServer) -> None:
    config = Config(redis=redis_server.url, identity=IdentityConfig())
    with redis.Redis.from_url(redis_server.url) as client:
        client.delete(ACCOUNTS_LAYOUT_KEY)
        accounts = build_accounts(config, Metrics())
        await accounts.prepare()
        assert client.get(ACCOUNTS_LAYOUT_KEY) == str(ACCOUNTS_LAYOUT).encode()
        client.set(ACCOUNTS_LAYOUT_KEY, ACCOUNTS_LAYOUT + 1)
        try:
            with pytest.raises(ConfigError, match="Upgrade this process"):
                await accounts.prepare()
        finally:
            client.delete(ACCOUNTS_LAYOUT_KEY)
            await accounts.close()
