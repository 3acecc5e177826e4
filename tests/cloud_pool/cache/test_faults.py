"""Redis gone, hanging, full or corrupt: requests go on, and the faults are counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
import redis

from causeway_server.cloud_pool.cache.config import CacheConfig
from causeway_server.cloud_pool.cache.store import GenerationKey, RemoteLeader
from tests.jumping_loop import JumpingLoop, run_jumping
from tests.redis_server import RedisServer
from tests.waiting import until

from .gateways import Clock, Gateway, ask, begun, gateway, joined

pytestmark = pytest.mark.redis
Two = tuple[Gateway, Gateway]


@pytest.fixture
def own_redis(redis_server: RedisServer, tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis that a test may kill; the session's fixture skips without redis-server."""
    server = RedisServer(tmp_path, "--appendonly", "no")
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture
def hasty(config: CacheConfig) -> CacheConfig:
    return msgspec.structs.replace(config, redis_timeout_s=2.0, redis_retry_after_s=0.05)


@pytest.fixture
async def two(own_redis: RedisServer, hasty: CacheConfig, clock: Clock) -> AsyncIterator[Two]:
    async with gateway(own_redis.url, hasty, clock) as one, gateway(own_redis.url, hasty, clock) as other:
        yield one, other


async def test_requests_go_on_without_redis(two: Two, own_redis: RedisServer) -> None:
    """Requests on one gateway still share; answers are stored again when Redis is back."""
    one, other = two
    own_redis.kill()
    clients = [one.ask(ask()), one.ask(ask(stream=True))]
    one.script.permit(9)
    assert [(await each.end()).text for each in clients] == ["one two three"] * 2
    assert [each.reply.status for each in clients] == ["miss", "coalesced"]
    assert len(one.script.requests) == 1
    assert one.fault("redis_unavailable") > 0
    assert await one.cache.find_stale(ask(), "acme") is None
    own_redis.start()
    await asyncio.sleep(0.1)
    one.script.permit(9)
    await one.ask(ask()).end()
    await until(lambda: not one.caching_service.generations)
    other.script.permit(9)
    assert (await other.ask(ask()).end()).reply.status == "hit"


async def test_hanging_redis_costs_one_timeout(own_redis: RedisServer, hasty: CacheConfig, clock: Clock) -> None:
    """After `redis_timeout_s` it is skipped for a moment."""
    config = msgspec.structs.replace(hasty, redis_retry_after_s=3600.0)
    async with gateway(own_redis.url, config, clock) as one:
        one.script.permit(99)
        await one.ask(ask("warm")).end()
        await until(lambda: not one.caching_service.generations)
        with own_redis.paused():
            clients = [await one.ask(ask(str(at))).end() for at in range(20)]
        assert {each.text for each in clients} == {"one two three"}
        # The first call waited; the others' calls (enter and keep) were skipped.
        assert one.fault("redis_unavailable") >= 20
    assert one.cache.store.is_suspended


async def test_redis_dies_under_a_follower(two: Two, own_redis: RedisServer) -> None:
    """The leader goes on for its own client; the follower generates the rest itself, no word twice."""
    one, other = two
    leader = await begun(one)
    follower = await joined(other)
    own_redis.kill()
    other.script.permit(9)
    one.script.permit(9)
    assert (await follower.end()).text == "one two three"
    assert (await leader.end()).text == "one two three"
    assert follower.error is None
    assert other.fault("redis_unavailable") > 0


async def test_redis_loses_its_data_during_a_generation(two: Two, own_redis: RedisServer) -> None:
    """The old leader's answer is not stored, and no follower waits for it."""
    one, other = two
    leader = one.ask(ask())
    await until(lambda: len(one.script.requests) == 1)
    own_redis.flush()
    other.script.permit(9)
    assert (await other.ask(ask()).end()).reply.status == "miss"
    one.script.permit(9)
    assert (await leader.end()).text == "one two three"
    await until(lambda: not one.caching_service.generations)
    assert one.fault("lost_lease") == 1


async def test_full_redis_counts_as_unavailable(two: Two, own_redis: RedisServer) -> None:
    one, _ = two
    with redis.Redis.from_url(own_redis.url) as client:
        client.config_set("maxmemory", "1")
        client.config_set("maxmemory-policy", "noeviction")
        one.script.permit(9)
        assert (await one.ask(ask()).end()).text == "one two three"
        client.config_set("maxmemory", "0")
    assert one.fault("redis_unavailable") > 0


def entry_of(client: redis.Redis, config: CacheConfig) -> bytes:
    (key,) = client.keys(f"{config.key_prefix}:*:entry")
    assert isinstance(key, bytes)
    return key


@pytest.mark.parametrize("harm", ["turned bits", "cut", "empty", "another type", "no age", "from the future"])
async def test_corrupt_entry_is_generated_again(
    two: Two, own_redis: RedisServer, hasty: CacheConfig, harm: str
) -> None:
    """It is counted where it cannot be an expired one."""
    one, other = two
    one.script.permit(9)
    await one.ask(ask()).end()
    await until(lambda: not one.caching_service.generations)
    with redis.Redis.from_url(own_redis.url) as client:
        key = entry_of(client, hasty)
        value = client.hget(key, "value")
        assert value is not None
        if harm == "turned bits":
            client.hset(key, "value", bytes(byte ^ 1 for byte in value))
        elif harm == "cut":
            client.hset(key, "value", value[:-1])
        elif harm == "empty":
            client.hset(key, "value", b"")
        elif harm == "another type":
            client.set(key, "not a hash")
        elif harm == "no age":
            client.hset(key, "at", "yesterday")
        else:
            client.hset(key, "at", str(1_900_000_000_000))
        other.script.permit(9)
        found = await other.ask(ask()).end()
        assert (found.text, found.reply.status) == ("one two three", "miss")
        await until(lambda: not other.caching_service.generations)
        assert other.fault("corrupt") == (1 if harm in ("turned bits", "cut", "empty") else 0)
        assert client.hget(key, "value") == value
    assert (await one.ask(ask()).end()).reply.status == "hit"


async def test_corrupt_entry_is_no_stale_answer(two: Two, own_redis: RedisServer, hasty: CacheConfig) -> None:
    one, other = two
    one.script.permit(9)
    await one.ask(ask()).end()
    await until(lambda: not one.caching_service.generations)
    assert await other.cache.find_stale(ask(), "acme") is not None
    with redis.Redis.from_url(own_redis.url) as client:
        client.hset(entry_of(client, hasty), "value", b"rubbish")
    assert await other.cache.find_stale(ask(), "acme") is None
    assert other.fault("corrupt") == 1


async def test_follower_of_a_corrupt_stream_generates_the_answer(
    two: Two, own_redis: RedisServer, hasty: CacheConfig
) -> None:
    one, other = two
    leader = await begun(one)
    follower = await joined(other)
    with redis.Redis.from_url(own_redis.url) as client:
        (flow,) = client.keys(f"{hasty.key_prefix}:*:flow:*")
        client.xadd(flow, {"kind": "chunks", "data": b"rubbish"})
    await until(lambda: other.fault("corrupt") >= 1)
    one.script.permit(9)
    other.script.permit(9)
    assert (await follower.end()).text == "one two three"
    await leader.end()


async def test_leader_without_pubsub_learns_of_followers_at_renewal(two: Two, own_redis: RedisServer) -> None:
    one, other = two
    with redis.Redis.from_url(own_redis.url) as client:
        client.client_kill_filter(_type="pubsub")
        client.acl_setuser("default", reset_channels=True, enabled=True)
        leader = one.ask(ask(stream=True))
        one.script.permit(1)
        await until(lambda: leader.text == "one " and one.fault("wakeups_unavailable") > 0)
        client.acl_setuser("default", channels=["*"], enabled=True)
    follower = await joined(other)
    one.script.permit(9)
    assert (await follower.end()).text == "one two three"
    await leader.end()


@pytest.mark.slow
async def test_a_wait_longer_than_the_clients_timeout_is_no_fault(
    redis_server: RedisServer, config: CacheConfig, clock: Clock
) -> None:
    """A follower of a long lease waits for a third of it, and redis-py gives up a reply after 5 s by default."""
    patient = msgspec.structs.replace(config, lease_s=20.0)
    leader = RemoteLeader(GenerationKey("key", "standard"), "fence")
    async with gateway(redis_server.url, patient, clock) as one:
        assert await one.cache.store.read(leader, b"0", 5.5) == []
        assert not one.cache.store.is_suspended
        assert one.fault("redis_unavailable") == 0


@pytest.mark.parametrize("iterations", range(10))
def test_a_gateway_lives_on_whose_first_calls_to_redis_are_late(
    redis_server: RedisServer, config: CacheConfig, clock: Clock, iterations: int
) -> None:
    """The time-outs of the gateway and of redis-py pass at once, wherever the first calls are."""

    async def test(loop: JumpingLoop) -> None:
        async with gateway(redis_server.url, config, clock) as one:
            for at in range(iterations + 30):
                await asyncio.sleep(0)
                if at == iterations:
                    loop.jump(10.0)
            client = one.ask(ask(), left_s=120.0)
            one.script.permit(4)
            assert (await client.end()).text == "one two three"

    run_jumping(test)
