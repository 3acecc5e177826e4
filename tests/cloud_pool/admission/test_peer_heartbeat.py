"""Gateways and workers that divide a tier's permits through a real Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import msgspec
import pytest
import redis.asyncio

from causeway_server.cloud_pool.admission import AdmissionController, AdmissionSettings
from causeway_server.cloud_pool.admission.division import PeerKind, PeerState
from causeway_server.cloud_pool.admission.peer_heartbeat import ALIVE_S, PeerHeartbeat, SharedTier
from causeway_server.cloud_pool.dispatch.endpoint_selection import PoolCapacity
from tests.redis_server import RedisServer, unreachable_redis

from .waiters import acquire

ENDPOINTS = ("10.0.0.1:8001",)


@pytest.fixture
async def client(redis_server: RedisServer) -> AsyncIterator[redis.asyncio.Redis]:
    """An empty Redis."""
    redis_server.flush()
    async with redis.asyncio.Redis.from_url(redis_server.url, retry=None) as made:
        yield made


class Endpoints:
    """A tier's endpoints, as configured and as they are."""

    def __init__(self, *configured: str) -> None:
        self.configured = configured or ENDPOINTS
        self.capacity = PoolCapacity(1)


def controller(permits: int = 16, least: int = 1) -> AdmissionController:
    return AdmissionController(permits, 64, AdmissionSettings(permits=permits, max_queued=64, min_permits=least))


def peer(
    client: redis.asyncio.Redis | None,
    name: str,
    own: AdmissionController,
    endpoints: Endpoints | None = None,
    kind: PeerKind = "gateway",
) -> PeerHeartbeat:
    return PeerHeartbeat(client, [shared(own, endpoints)], kind=kind, name=name)


def shared(own: AdmissionController, endpoints: Endpoints | None = None) -> SharedTier:
    tier = endpoints or Endpoints()
    return SharedTier("large", 16, lambda: tier.configured, lambda: tier.capacity, own)


@asynccontextmanager
async def holding(admission: AdmissionController, count: int, tenant: str = "") -> AsyncIterator[None]:
    """So many requests that run or wait."""

    async def hold() -> None:
        async with acquire(admission, "standard", 60.0, tenant):
            await asyncio.Event().wait()

    async with anyio.create_task_group() as tasks:
        for _ in range(count):
            tasks.start_soon(hold)
        await anyio.wait_all_tasks_blocked()
        yield
        tasks.cancel_scope.cancel()


async def beat(*peers: PeerHeartbeat, times: int = 3) -> None:
    """Until each has seen the others."""
    for _ in range(times):
        for each in peers:
            await each.beat()


async def test_two_gateways_halve_the_permits(client: redis.asyncio.Redis) -> None:
    one, two = controller(), controller()
    first, second = peer(client, "a", one), peer(client, "b", two)
    await first.beat()
    assert one.limit == 8  # The initial limit with an upper bound of 16.
    await second.beat()
    await first.beat()
    one.set_upper_bound(16)
    assert one.limit == 16  # A limit at its bound follows the bound.
    await first.beat()
    assert (one.limit, two.limit) == (8, 8)
    assert not first.fault


async def test_permits_follow_the_demand(client: redis.asyncio.Redis) -> None:
    one, two = controller(), controller()
    one.set_upper_bound(8)  # a limit at its bound follows the bound
    first, second = peer(client, "a", one), peer(client, "b", two)
    async with holding(one, 40):
        await beat(first, second, times=2)
        assert (one.limit, two.limit) == (12, 4)


async def test_a_gone_gateways_permits_are_redistributed(client: redis.asyncio.Redis) -> None:
    """At once when it stops, after ALIVE_S when it was killed; the others take them one heartbeat later."""
    one = controller()
    beaten = anyio.Event()

    async def sleep(seconds: float) -> None:
        beaten.set()
        await anyio.sleep_forever()

    first, killed = peer(client, "a", one), peer(client, "c", controller())
    second = PeerHeartbeat(client, [shared(controller())], name="b", sleep=sleep)
    await killed.beat()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(second.watch)
        await beaten.wait()
        await first.beat()
        assert one.limit == 6
        assert await client.hlen(_key()) == 3
        tasks.cancel_scope.cancel()
    silent = msgspec.json.encode(PeerState("gateway", 0.0)).decode()
    await client.hset(_key(), "c", f"{(await client.time())[0] - ALIVE_S - 1:.3f} {silent}")
    await first.beat()
    assert one.limit == 6
    await first.beat()
    assert one.limit == 16
    assert await client.hkeys(_key()) == [b"a"]


async def test_gateways_of_other_endpoints_do_not_divide(client: redis.asyncio.Redis) -> None:
    one, two = controller(), controller()
    one.set_upper_bound(8)
    one.set_upper_bound(16)
    await beat(peer(client, "a", one), peer(client, "b", two, Endpoints("10.0.0.2:8001")), times=1)
    assert one.limit == 16


async def test_without_redis_each_gateway_divides_by_what_it_knew(redis_server: RedisServer) -> None:
    one = controller(least=0)
    endpoints = Endpoints()
    async with unreachable_redis() as unreachable:
        lost = peer(unreachable, "a", one, endpoints)
        await beat(lost, times=1)
        assert lost.fault
        assert one.limit == 16
        endpoints.capacity = PoolCapacity(3)
        await beat(lost, times=2)
    assert one.limit == 48


async def test_a_gateway_that_starts_without_its_redis_has_all_permits_of_every_tier() -> None:
    """The first tier's exchange fails, so that nothing was noted of the second one."""
    one, two = controller(least=0), controller(least=0)
    async with unreachable_redis() as client:
        heartbeat = PeerHeartbeat(client, [shared(one), shared(two, Endpoints("10.0.0.2:8001"))])
        await heartbeat.beat()
    assert heartbeat.fault
    assert (one.limit, two.limit) == (16, 16)


async def test_a_fixed_limit_is_divided_too(client: redis.asyncio.Redis) -> None:
    one, two = controller(least=0), controller(least=0)
    await beat(peer(client, "a", one), peer(client, "b", two))
    assert (one.limit, two.limit) == (8, 8)


async def test_permits_follow_the_endpoints(client: redis.asyncio.Redis) -> None:
    """Out and back down, at both gateways."""
    one, two, endpoints = controller(least=0), controller(least=0), Endpoints()
    both = (peer(client, "a", one, endpoints), peer(client, "b", two, endpoints))
    limits = []
    for count in (1, 2, 4, 3, 1):
        endpoints.capacity = PoolCapacity(count)
        await beat(*both)
        limits.append((one.limit, two.limit))
    assert limits == [(8, 8), (16, 16), (32, 32), (24, 24), (8, 8)]


async def test_a_gateway_without_a_redis_follows_its_endpoints() -> None:
    one, endpoints = controller(least=0), Endpoints()
    alone = peer(None, "a", one, endpoints)
    for count in (4, 2):
        endpoints.capacity = PoolCapacity(count)
        await beat(alone)
        assert one.limit == 16 * count


async def test_a_limit_that_was_found_changes_with_the_endpoints() -> None:
    """A tier whose endpoints take 7 requests each, of at most 16."""
    one, endpoints = controller(), Endpoints()
    alone = peer(None, "a", one, endpoints)
    await beat(alone)
    async with acquire(one, "standard", 60.0) as permit:
        permit.failed()
    assert one.limit == 7
    endpoints.capacity = PoolCapacity(2)
    await beat(alone, times=2)
    assert one.limit == 14
    endpoints.capacity = PoolCapacity(1)
    await beat(alone, times=2)
    assert one.limit == 7


async def test_requests_at_ejected_endpoints_take_no_permits_of_others(client: redis.asyncio.Redis) -> None:
    """Of two endpoints with 16 requests each, one is ejected: its calls may hang, and the other has its full 16."""
    one, endpoints = controller(least=0), Endpoints()
    alone = peer(client, "a", one, endpoints)
    endpoints.capacity = PoolCapacity(2)
    await beat(alone)
    async with holding(one, 40):
        assert (one.scheduler.running, one.scheduler.waiting) == (32, 8)
        endpoints.capacity = PoolCapacity(1, away=16)
        await beat(alone)
        assert (one.limit, one.scheduler.running) == (32, 32)
        assert one.demand == 16 + 8
        endpoints.capacity = PoolCapacity(1)
        await beat(alone)
        assert one.limit == 16


async def test_a_reloaded_configuration_moves_to_its_new_peers(client: redis.asyncio.Redis) -> None:
    one, two, endpoints = controller(least=0), controller(least=0), Endpoints()
    first = peer(client, "a", one, endpoints)
    await beat(first, peer(client, "b", two))
    assert one.limit == 8
    endpoints.configured = ("10.0.0.1:8001", "10.0.0.2:8001")
    await beat(first)
    assert one.limit == 16
    assert await client.hkeys(_key()) == [b"b"]


# --- workers ---------------------------------------------------------------------------------------------------------


async def test_workers_run_what_the_gateways_leave(client: redis.asyncio.Redis) -> None:
    """Twenty workers, each with more jobs than permits: together they stay below the endpoint's 16."""
    own = controller(least=0)
    crowd = [controller(least=0) for _ in range(20)]
    peers = [peer(client, f"w{at:02}", each, kind="worker") for at, each in enumerate(crowd)]
    gateway = peer(client, "g", own)
    await beat(gateway, *peers)
    assert sum(each.limit for each in crowd) == 15
    async with holding(own, 4):
        await beat(gateway, *peers)
        assert sum(each.limit for each in crowd) == 16 - 4 - 1 - 4


async def test_a_pipeline_that_stands_by_leaves_its_permits_to_the_one_that_receives(
    client: redis.asyncio.Redis,
) -> None:
    """It keeps one for a first message."""
    standby, receiving = controller(least=0), controller(least=0)
    peers = [peer(client, "a", standby, kind="worker"), peer(client, "b", receiving, kind="worker")]
    await beat(*peers)
    async with holding(receiving, 32):
        await beat(*peers)
        assert (standby.limit, receiving.limit) == (1, 15)


async def test_messages_that_wait_leave_jobs_their_half(client: redis.asyncio.Redis) -> None:
    """Jobs wait in Redis, messages in the pipeline."""
    jobs, messages = controller(least=0), controller(least=0)
    jobs.wants_more = True
    peers = [peer(client, "a", jobs, kind="worker"), peer(client, "b", messages, kind="worker")]
    await beat(*peers)
    async with holding(messages, 32):
        await beat(*peers)
        assert (jobs.limit, messages.limit) == (8, 8)


async def test_a_worker_takes_no_permit_before_its_third_heartbeat(client: redis.asyncio.Redis) -> None:
    """The gateways have not reserved it yet."""
    jobs = controller(least=0)
    worker = peer(client, "w", jobs, kind="worker")
    for _ in range(2):
        await worker.beat()
        assert jobs.limit == 0
    await worker.beat()
    assert jobs.limit == 16


async def test_a_flood_beside_another_tenant_and_running_jobs_stays_within_the_permits(
    client: redis.asyncio.Redis,
) -> None:
    """From its first moment on, which no heartbeat has seen."""
    own, jobs = controller(least=0), controller(least=0)
    gateway, worker = peer(client, "g", own), peer(client, "w", jobs, kind="worker")
    await beat(gateway, worker)
    async with holding(own, 1, "quiet"), holding(jobs, 3):
        await beat(gateway, worker)
        async with holding(own, 40, "flood"):
            assert own.scheduler.running + jobs.scheduler.running <= 16
            assert own.scheduler.waiting


async def test_workers_back_off_while_a_gateways_requests_wait(client: redis.asyncio.Redis) -> None:
    """The gateway has found that the server takes fewer than its permits."""
    own, jobs = controller(), controller(least=0)
    own.set_upper_bound(2)
    gateway, worker = peer(client, "g", own), peer(client, "w", jobs, kind="worker")
    await beat(worker, gateway)
    before = jobs.limit
    async with holding(own, own.limit + 1):
        assert own.scheduler.lacks_capacity(time.monotonic())
        await beat(gateway, worker, times=1)
    assert jobs.limit < before / 2


async def test_a_worker_that_lost_redis_runs_one_job() -> None:
    jobs = controller(least=0)
    async with unreachable_redis() as unreachable:
        await beat(peer(unreachable, "w", jobs, kind="worker"))
    assert jobs.limit == 1


def _key() -> str:
    return shared(controller()).key
