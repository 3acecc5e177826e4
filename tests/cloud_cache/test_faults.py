"""Redis gone, slow, full or full of rubbish: requests go on, and it counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
import redis

from cloud_pool.cache.config import CacheConfig
from tests.redis_server import RedisServer

from .gateways import Clock, Gateway, ask, gateway, until

pytestmark = pytest.mark.redis
Two = tuple[Gateway, Gateway]


@pytest.fixture
def own_redis(redis_server: RedisServer, tmp_path: Path) -> Iterator[RedisServer]:
    """One that a test may kill. The session's says whether there is a redis-server at all."""
    server = RedisServer(tmp_path, "--appendonly", "no")
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture
def hasty(config: CacheConfig) -> CacheConfig:
    return msgspec.structs.replace(config, redis_timeout_s=0.5, redis_retry_after_s=0.05)


@pytest.fixture
async def two(own_redis: RedisServer, hasty: CacheConfig, clock: Clock) -> AsyncIterator[Two]:
    async with gateway(own_redis.url, hasty, clock) as one, gateway(own_redis.url, hasty, clock) as other:
        yield one, other


async def test_without_redis_requests_go_on(two: Two, own_redis: RedisServer) -> None:
    """While Redis is away answers are made, still once for all who ask here together; then they are kept again."""
    one, other = two
    own_redis.kill()
    asked = [one.ask(ask()), one.ask(ask(stream=True))]
    one.script.permit(9)
    assert [(await each.end()).text for each in asked] == ["one two three"] * 2
    assert [each.reply.status for each in asked] == ["miss", "coalesced"]
    assert len(one.script.asked) == 1
    assert one.fault("redis_unavailable") > 0
    assert await one.cache.find_stale(ask(), "acme") is None
    own_redis.start()
    await asyncio.sleep(0.1)
    one.script.permit(9)
    await one.ask(ask()).end()
    await until(lambda: not one.caching_service.generations)
    other.script.permit(9)
    assert (await other.ask(ask()).end()).reply.status == "hit"


async def test_a_redis_that_hangs_costs_its_timeout_once(
    own_redis: RedisServer, hasty: CacheConfig, clock: Clock
) -> None:
    """A Redis that does not answer is waited for as long as `redis_timeout_s`, and then left alone for a moment."""
    config = msgspec.structs.replace(hasty, redis_retry_after_s=3600.0)
    async with gateway(own_redis.url, config, clock) as one:
        one.script.permit(99)
        await one.ask(ask("warm")).end()
        await until(lambda: not one.caching_service.generations)
        with own_redis.paused():
            asked = [await one.ask(ask(str(at))).end() for at in range(20)]
        assert {each.text for each in asked} == {"one two three"}
        # The first call waited; of each of the others' calls (enter, renewals of none, keep) none was made.
        assert one.fault("redis_unavailable") >= 20
    assert one.cache.store.is_suspended


async def test_redis_dies_under_a_follower(two: Two, own_redis: RedisServer) -> None:
    """A leader goes on for its own client; a follower makes the rest itself, without a word twice."""
    one, other = two
    leader = one.ask(ask(stream=True))
    one.script.permit(1)
    await until(lambda: leader.text == "one ")
    follower = other.ask(ask(stream=True))
    await until(lambda: follower.text == "one ")
    own_redis.kill()
    other.script.permit(9)
    one.script.permit(9)
    assert (await follower.end()).text == "one two three"
    assert (await leader.end()).text == "one two three"
    assert follower.error is None
    assert other.fault("redis_unavailable") > 0


async def test_redis_forgets_while_an_answer_is_made(two: Two, own_redis: RedisServer) -> None:
    """A Redis that comes back empty: the old leader's answer is given and not kept, nobody waits for it."""
    one, other = two
    leader = one.ask(ask())
    await until(lambda: len(one.script.asked) == 1)
    own_redis.flush()
    other.script.permit(9)
    assert (await other.ask(ask()).end()).reply.status == "miss"
    one.script.permit(9)
    assert (await leader.end()).text == "one two three"
    await until(lambda: not one.caching_service.generations)
    assert one.fault("lost_lease") == 1


async def test_a_full_redis(two: Two, own_redis: RedisServer) -> None:
    """A Redis that takes no more writes is one that is away."""
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
async def test_rubbish_is_no_answer(two: Two, own_redis: RedisServer, hasty: CacheConfig, harm: str) -> None:
    """An entry that is not what was kept is made anew; where it can only be rubbish, that is counted."""
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


async def test_rubbish_is_no_stale_answer(two: Two, own_redis: RedisServer, hasty: CacheConfig) -> None:
    """Nor does rubbish stand in for a refusal."""
    one, other = two
    one.script.permit(9)
    await one.ask(ask()).end()
    await until(lambda: not one.caching_service.generations)
    assert await other.cache.find_stale(ask(), "acme") is not None
    with redis.Redis.from_url(own_redis.url) as client:
        client.hset(entry_of(client, hasty), "value", b"rubbish")
    assert await other.cache.find_stale(ask(), "acme") is None
    assert other.fault("corrupt") == 1


async def test_rubbish_among_the_pieces(two: Two, own_redis: RedisServer, hasty: CacheConfig) -> None:
    """A follower that reads what no leader wrote makes the answer itself."""
    one, other = two
    leader = one.ask(ask(stream=True))
    one.script.permit(1)
    await until(lambda: leader.text == "one ")
    follower = other.ask(ask(stream=True))
    await until(lambda: follower.text == "one ")
    with redis.Redis.from_url(own_redis.url) as client:
        (flow,) = client.keys(f"{hasty.key_prefix}:*:flow:*")
        client.xadd(flow, {"kind": "chunks", "data": b"rubbish"})
    await until(lambda: other.fault("corrupt") >= 1)
    one.script.permit(9)
    other.script.permit(9)
    assert (await follower.end()).text == "one two three"
    await leader.end()


async def test_word_that_does_not_come_through(two: Two, own_redis: RedisServer) -> None:
    """Without pub/sub a leader hears of its followers when it renews its lease: later, and not never."""
    one, other = two
    with redis.Redis.from_url(own_redis.url) as client:
        client.client_kill_filter(_type="pubsub")
        client.acl_setuser("default", reset_channels=True, enabled=True)
        leader = one.ask(ask(stream=True))
        one.script.permit(1)
        await until(lambda: leader.text == "one " and one.fault("wakeups_unavailable") > 0)
        client.acl_setuser("default", channels=["*"], enabled=True)
    follower = other.ask(ask(stream=True))
    await until(lambda: follower.text == "one ")
    one.script.permit(9)
    assert (await follower.end()).text == "one two three"
    await leader.end()
