"""A Redis that evicts keys forgets budgets and revocations: real servers, of which some evict."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import anyio
import pytest
import pytest_asyncio
import redis.asyncio

from causeway_server.cloud_pool.app import build
from causeway_server.cloud_pool.config import Config
from causeway_server.cloud_pool.http.config import ServerConfig
from causeway_server.cloud_pool.redis.connect import EvictionCheck, eviction_fault, open_redis
from tests.cloud_pool.unreachable import unreachable_tier
from tests.redis_deployments import ClusterDeployment
from tests.redis_server import RedisServer, unreachable_redis

pytestmark = pytest.mark.redis
EVICTING = {"maxmemory": "100mb", "maxmemory-policy": "volatile-lru"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    try:
        yield server
    finally:
        server.kill()


@pytest_asyncio.fixture
async def client(server: RedisServer) -> AsyncIterator[redis.asyncio.Redis]:
    client = open_redis(server.url)
    yield client
    await client.aclose()


async def configure(client: redis.asyncio.Redis, **settings: str) -> None:
    for name, value in settings.items():
        await client.config_set(name.replace("_", "-"), value)


@pytest.mark.parametrize(
    ("maxmemory", "policy", "evicts"),
    [
        ("0", "allkeys-lru", False),
        ("100mb", "noeviction", False),
        ("100mb", "allkeys-lru", True),
        ("100mb", "volatile-ttl", True),
    ],
)
async def test_a_policy_counts_where_memory_is_bounded(
    client: redis.asyncio.Redis, server: RedisServer, maxmemory: str, policy: str, evicts: bool
) -> None:
    await configure(client, maxmemory=maxmemory, maxmemory_policy=policy)
    fault = await eviction_fault(client)
    assert bool(fault) is evicts
    if evicts:
        assert f"redis://127.0.0.1:{server.port}/0" in fault
        assert f"maxmemory-policy {policy}" in fault
        assert "noeviction" in fault


async def test_a_managed_redis_may_refuse_config(client: redis.asyncio.Redis, server: RedisServer) -> None:
    """INFO says the same; where that is refused, too, nothing is known, which is a fault."""
    await configure(client, maxmemory="100mb", maxmemory_policy="allkeys-lru")
    await client.acl_setuser("managed", enabled=True, nopass=True, commands=["+@all", "-config"], keys=["*"])
    await client.acl_setuser("silent", enabled=True, nopass=True, commands=["+@all", "-info"], keys=["*"])
    for user, expected in (("managed", "allkeys-lru"), ("silent", "permit INFO")):
        other = open_redis(f"redis://{user}:x@127.0.0.1:{server.port}/0")
        fault = await eviction_fault(other)
        await other.aclose()
        assert expected in fault
        assert ":x@" not in fault


async def test_one_evicting_node_of_a_cluster_is_found(cluster: ClusterDeployment) -> None:
    client = open_redis(cluster.url)
    assert await eviction_fault(client) == ""
    with cluster.servers[2].client() as node:
        for name, value in EVICTING.items():
            node.config_set(name, value)
        assert "volatile-lru" in await eviction_fault(client)
        node.config_set("maxmemory", "0")
    assert await eviction_fault(client) == ""
    await client.aclose()


async def test_a_change_is_logged_once(client: redis.asyncio.Redis, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "causeway_server")
    check = EvictionCheck(client)
    await configure(client, maxmemory="100mb", maxmemory_policy="allkeys-lru")
    for _ in range(2):
        await check.check()
        assert check.fault
    await configure(client, maxmemory_policy="noeviction")
    for _ in range(2):
        await check.check()
        assert check.fault == ""
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"]


async def test_a_redis_that_is_away_changes_nothing(client: redis.asyncio.Redis, server: RedisServer) -> None:
    await configure(client, maxmemory="100mb", maxmemory_policy="allkeys-lru")
    check = EvictionCheck(client)
    await check.check()
    server.kill()
    await check.check()
    assert check.fault
    started = EvictionCheck(unreachable_redis())
    await started.check()
    assert started.fault == ""


async def test_operators_see_an_evicting_redis(client: redis.asyncio.Redis, server: RedisServer) -> None:
    await configure(client, maxmemory="100mb", maxmemory_policy="allkeys-lru")
    config = Config(server=ServerConfig(port=0), tiers=(unreachable_tier(),), redis=server.url)
    async with anyio.create_task_group() as tasks, aiohttp.ClientSession() as http:
        app = build(config, tasks)
        await app.start()
        async with http.get(f"{app.operator_url}/readyz") as answer:
            (problem,) = (await answer.json())["problems"]
        async with http.get(f"{app.operator_url}/metrics") as answer:
            metrics = await answer.text()
        await app.stop()
    await app.close()
    assert "allkeys-lru" in problem
    assert "causeway_gateway_redis_evicts 1.0" in metrics
