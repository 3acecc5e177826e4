"""Gateways that divide a tier's permits through a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import anyio
import pytest
import redis.asyncio

from cloud_pool.admission import AdmissionController, AdmissionSettings
from cloud_pool.admission.peer_heartbeat import ALIVE_S, PeerHeartbeat, SharedTier
from tests.redis_server import RedisServer, unreachable_redis

ENDPOINTS = ("10.0.0.1:8001",)


@pytest.fixture
async def client(redis_server: RedisServer) -> AsyncIterator[redis.asyncio.Redis]:
    """An empty Redis."""
    redis_server.flush()
    async with redis.asyncio.Redis.from_url(redis_server.url, retry=None) as made:
        yield made


def controller(permits: int = 16, least: int = 1) -> AdmissionController:
    return AdmissionController(permits, 64, AdmissionSettings(permits=permits, max_queued=64, min_permits=least))


def gateway(
    client: redis.asyncio.Redis, name: str, own: AdmissionController, endpoints: tuple[str, ...] = ENDPOINTS
) -> PeerHeartbeat:
    return PeerHeartbeat(client, [SharedTier("large", endpoints, 16, own)], name=name)


async def test_two_gateways_halve_the_permits(client: redis.asyncio.Redis) -> None:
    one, two = controller(), controller()
    first, second = gateway(client, "a", one), gateway(client, "b", two)
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
    first, second = gateway(client, "a", one), gateway(client, "b", two)

    async def hold() -> None:
        async with one.acquire("standard", 60.0):
            await asyncio.Event().wait()

    async with anyio.create_task_group() as tasks:
        for _ in range(40):
            tasks.start_soon(hold)
        await anyio.wait_all_tasks_blocked()
        for each in (first, second, first, second):
            await each.beat()
        assert (one.limit, two.limit) == (12, 4)
        tasks.cancel_scope.cancel()


async def test_a_gone_gateways_permits_are_redistributed(client: redis.asyncio.Redis) -> None:
    """At once when it stops, after ALIVE_S when it was killed; the others take them one heartbeat later."""
    one = controller()
    beaten = anyio.Event()

    async def sleep(seconds: float) -> None:
        beaten.set()
        await anyio.sleep_forever()

    first, killed = gateway(client, "a", one), gateway(client, "c", controller())
    second = PeerHeartbeat(client, [SharedTier("large", ENDPOINTS, 16, controller())], name="b", sleep=sleep)
    await killed.beat()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(second.watch)
        await beaten.wait()
        await first.beat()
        assert one.limit == 6
        assert await client.hlen(_key()) == 3
        tasks.cancel_scope.cancel()
    await client.hset(_key(), "c", f"{(await client.time())[0] - ALIVE_S - 1:.3f} 0")
    await first.beat()
    assert one.limit == 6
    await first.beat()
    assert one.limit == 16
    assert await client.hkeys(_key()) == [b"a"]


async def test_gateways_of_other_endpoints_do_not_divide(client: redis.asyncio.Redis) -> None:
    one, two = controller(), controller()
    one.set_upper_bound(8)
    one.set_upper_bound(16)
    for each in (gateway(client, "a", one), gateway(client, "b", two, ("10.0.0.2:8001",))):
        await each.beat()
    assert one.limit == 16


async def test_without_redis_each_gateway_keeps_its_part(redis_server: RedisServer) -> None:
    one = controller()
    async with unreachable_redis() as unreachable:
        lost = gateway(unreachable, "a", one)
        one.set_upper_bound(8)
        await lost.beat()
    assert lost.fault
    assert one.limit == 8


async def test_a_fixed_limit_is_not_divided(client: redis.asyncio.Redis) -> None:
    one = controller(16, least=0)
    for each in (gateway(client, "a", one), gateway(client, "b", controller())):
        await each.beat()
    assert one.limit == 16


def _key() -> str:
    return SharedTier("large", ENDPOINTS, 16, controller()).key
