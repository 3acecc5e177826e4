"""The cache, rates, usage, revocations and gateways' shared limits on a Redis Cluster; jobs refuse one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import anyio
import pytest
import redis.asyncio
from prometheus_client import CollectorRegistry

from causeway_server.cloud_pool.accounts.identity.config import IdentityConfig
from causeway_server.cloud_pool.accounts.identity.revocation import RevocationList, revoke_device, revoke_token
from causeway_server.cloud_pool.accounts.tenants.config import TenantLimits, TenantsConfig
from causeway_server.cloud_pool.accounts.tenants.rate_limiter import TenantRateLimiter
from causeway_server.cloud_pool.accounts.tenants.usage import Charge, Demand, Reservation, UsageRecorder, read_usage
from causeway_server.cloud_pool.admission import AdmissionController, AdmissionSettings
from causeway_server.cloud_pool.admission.peer_heartbeat import PeerHeartbeat, SharedTier
from causeway_server.cloud_pool.app import JobsGateway
from causeway_server.cloud_pool.background import WorkerRuntime
from causeway_server.cloud_pool.cache.config import CacheConfig
from causeway_server.cloud_pool.core.subject import ErasureSubject, marks_of
from causeway_server.cloud_pool.dispatch.endpoint_selection import PoolCapacity
from causeway_server.cloud_pool.erasure import gateway_kinds
from causeway_server.cloud_pool.jobs.http.job_api import JobCallers
from causeway_server.cloud_pool.jobs.worker.execution import WorkerSlots
from causeway_server.cloud_pool.redis.connect import open_redis
from causeway_server.cloud_pool.redis.keys import ACCOUNTS_LAYOUT, ACCOUNTS_LAYOUT_KEY, ensure_accounts_layout
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.router.errors import ConfigError, RateLimited
from causeway_server.router.types import Usage
from tests.cloud_pool.cache.gateways import Clock, ask, gateway
from tests.cloud_pool.jobs.gateway import identify, serving
from tests.cloud_pool.jobs.scripted_worker import ScriptedRunner, answers
from tests.cloud_pool.jobs.test_api import CHAT, TIER
from tests.redis_deployments import ClusterDeployment
from tests.waiting import until

pytestmark = [pytest.mark.redis, pytest.mark.slow]
NOW = 1_795_262_400.0
CACHE = CacheConfig(enabled=True, redis_timeout_s=5.0, lease_s=20.0, ttl_s=60.0)


@pytest.fixture
async def client(cluster: ClusterDeployment) -> AsyncIterator[redis.asyncio.Redis]:
    async with open_redis(cluster.url) as made:
        yield made


async def test_gateways_share_answers_whose_keys_are_spread_over_the_nodes(cluster: ClusterDeployment) -> None:
    async with gateway(cluster.url, CACHE, Clock()) as one, gateway(cluster.url, CACHE, Clock()) as other:
        one.script.permit(99)
        for number in range(12):
            made = await one.ask(ask(f"question {number}")).end()
            await until(lambda: not one.caching_service.generations)
            found = await other.ask(ask(f"question {number}")).end()
            assert (made.text, found.reply.status) == (found.text, "hit")
        assert not other.script.requests
        assert (one.fault("redis_unavailable"), other.fault("redis_unavailable")) == (0, 0)
    assert all(any(key.startswith("causeway:cache") for key in keys) for keys in cluster.keys_by_node())


async def test_an_answer_in_progress_is_followed_across_gateways(cluster: ClusterDeployment) -> None:
    """Its stream and the wake-up of its leader cross the nodes."""
    async with gateway(cluster.url, CACHE, Clock()) as one, gateway(cluster.url, CACHE, Clock()) as other:
        leader = one.ask(ask("a long question", stream=True))
        one.script.permit(1)
        await until(lambda: leader.text == "one ")
        follower = other.ask(ask("a long question", stream=True))
        await until(lambda: follower.text == "one ")
        one.script.permit(3)
        await leader.end()
        await follower.end()
        assert (leader.reply.status, follower.reply.status) == ("miss", "coalesced")
        assert follower.text == "one two three"
        assert not other.script.requests


async def test_rates_usage_and_shared_limits_work_on_a_cluster(client: redis.asyncio.Redis) -> None:
    limits = TenantLimits(requests_per_s=0.001, burst=2, usd_per_day=1.0)
    config = TenantsConfig(default=limits, redis_timeout_s=5.0)
    demand = Demand(tokens=10, pico_usd=10)
    limiters = [TenantRateLimiter(config, client) for _ in range(2)]
    for tenant in ("a", "b", "c", "d"):
        for limiter in limiters:
            await limiter.flush()
            reservation = await limiter.reserve(tenant, demand)
        with pytest.raises(RateLimited):
            await limiters[0].reserve(tenant, demand)
    assert sum(limiter.local_checks for limiter in limiters) == 0
    recorder = UsageRecorder(config, client, wall_clock=lambda: NOW)
    for tenant in ("a", "b", "c"):
        reservation = Reservation(tenant, 10, 10, reservation.id)
        recorder.record(Charge(reservation, "large", "chat", Usage(5, 2), 7))
    assert await recorder.flush()
    assert [row.requests for row in await read_usage(client, "b", "2026-11-21")] == [1]
    admission = AdmissionController(16, 64, AdmissionSettings(permits=16, max_queued=64))
    shared = SharedTier("large", 16, lambda: ("e",), lambda: PoolCapacity(1), admission)
    heartbeats = [PeerHeartbeat(client, [shared], name=name) for name in "ab"]
    for heartbeat in heartbeats:
        await heartbeat.beat()
        assert heartbeat.fault == ""


async def test_revocations_work_on_a_cluster(client: redis.asyncio.Redis) -> None:
    await revoke_token(client, "token-1", NOW + 60, NOW)
    await revoke_device(client, "acme/kiosk", NOW)
    revocations = RevocationList(IdentityConfig(), client, wall_clock=lambda: NOW)
    await revocations.refresh()
    assert revocations.last_error == ""
    assert (set(revocations.current.tokens), set(revocations.current.devices)) == ({"token-1"}, {"acme/kiosk"})


async def test_accounts_check_their_layout_on_a_cluster(client: redis.asyncio.Redis) -> None:
    await ensure_accounts_layout(client)
    assert await client.get(ACCOUNTS_LAYOUT_KEY) == str(ACCOUNTS_LAYOUT).encode()


async def test_a_worker_refuses_the_plain_url_of_a_clusters_node(cluster: ClusterDeployment) -> None:
    for server in cluster.servers:
        runtime = WorkerRuntime(
            JobsConfig(redis=server.url),
            {"large": TIER},
            ScriptedRunner(answers),
            {"large": WorkerSlots("large", 1)},
            CollectorRegistry(),
        )
        with pytest.raises(ConfigError, match="Jobs do not run on a Redis Cluster"):
            await runtime.start(anyio.Event())
        await runtime.close()


async def test_a_gateway_refuses_jobs_on_a_clusters_node(cluster: ClusterDeployment) -> None:
    made = JobsGateway(
        JobsConfig(redis=cluster.servers[0].url), {"big": TIER}, JobCallers(identify), CollectorRegistry()
    )
    headers = {"authorization": "Bearer kiosk"}
    async with (
        serving(made.api.handler) as url,
        aiohttp.ClientSession(url, headers=headers) as http,
        http.post("/v1/jobs", json=CHAT) as response,
    ):
        fault = (await response.json())["error"]
    await made.close()
    assert (response.status, fault["code"]) == (503, "job_store_is_cluster")


async def test_a_cluster_that_is_down_costs_only_the_sharing(cluster: ClusterDeployment) -> None:
    """A gateway that cannot reach any node answers all the same."""
    config = CacheConfig(enabled=True, redis_timeout_s=0.05, lease_s=20.0)
    async with gateway("redis+cluster://127.0.0.1:1", config, Clock()) as alone:
        alone.script.permit(9)
        assert (await asyncio.wait_for(alone.ask(ask()).end(), 60)).text == "one two three"
        assert alone.fault("redis_unavailable") > 0


NAMES = ("usage", "cached_answers")


async def test_usage_and_cached_answers_are_erased_on_every_node(client: redis.asyncio.Redis) -> None:
    """One tenant's keys go, whatever characters its name has, and so do old cached answers, which name no tenant."""
    days = [
        f"causeway:tenant:{{{tenant}}}:usage:2026-11-{day}" for tenant in ("gone*", "gone", "kept") for day in "123"
    ]
    cached = [f"erased:cache:{{{number}}}:entry" for number in range(30)]
    for key in (*days, *cached):
        await client.hset(key, "a", "1")
    for number, key in enumerate(cached[:20]):
        await client.hset(key, "of", marks_of("gone*" if number < 10 else "kept", "1", None))
    kinds = [kind for kind in gateway_kinds(client, client, "erased:cache", IdentityConfig()) if kind.name in NAMES]
    for subject, erased in ((ErasureSubject("gone*"), (3, 20)), (ErasureSubject("gone", device="1"), (0, 0))):
        found = [[name async for name in kind.find(subject)] for kind in kinds]
        assert tuple(map(len, found)) == erased
        for kind, names in zip(kinds, found, strict=True):
            assert [await kind.erase(name) for name in names] == [True] * len(names)
    assert [bool(await client.exists(key)) for key in days] == [False] * 3 + [True] * 6
