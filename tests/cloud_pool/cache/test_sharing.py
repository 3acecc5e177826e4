"""Two gateways on one Redis: which one generates an answer, which clients get it, and which one is billed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from causeway_server.cloud_pool.cache.config import CacheConfig
from causeway_server.cloud_pool.core.request_context import AnswerHead
from causeway_server.router.errors import (
    CausewayError,
    CloudFailed,
    DeadlineExceeded,
    InvalidRequest,
    QueueFull,
    StreamBroken,
)
from causeway_server.router.types import Request, Usage
from tests.redis_server import RedisServer
from tests.waiting import until

from .gateways import TIERS, Clock, Gateway, Script, ask, begun, gateway, joined

Two = tuple[Gateway, Gateway]


@pytest.fixture
async def two(redis_server: RedisServer, config: CacheConfig, clock: Clock) -> AsyncIterator[Two]:
    async with gateway(redis_server.url, config, clock) as one, gateway(redis_server.url, config, clock) as other:
        yield one, other


async def test_stored_answer_is_a_hit_at_every_gateway(two: Two, clock: Clock) -> None:
    """With its age, its head and no cost."""
    one, other = two
    one.script.permit(9)
    made = await one.ask(ask()).end()
    await until(lambda: not one.caching_service.generations)
    clock.move(7.0)
    found = await other.ask(ask()).end()
    assert made.text == found.text == "one two three"
    assert (made.reply.status, found.reply.status) == ("miss", "hit")
    assert (made.reply.billable, found.reply.billable) == (True, False)
    assert found.headers == {"x-causeway-tier": "large", "x-causeway-cache": "hit", "age": "7"}
    assert made.usage == Usage(20, 3)
    assert found.usage == Usage(20, 3, cached_tokens=20)
    assert not other.script.requests
    assert (one.outcome("miss"), other.outcome("hit")) == (1, 1)


@pytest.mark.parametrize("first", [True, False])
async def test_streamed_and_whole_requests_share(two: Two, first: bool) -> None:
    one, other = two
    one.script.permit(9)
    made = await one.ask(ask(stream=first)).end()
    await until(lambda: not one.caching_service.generations)
    found = await other.ask(ask(stream=not first)).end()
    assert made.text == found.text
    assert found.reply.status == "hit"
    assert found.got[-2].finish_reason == "stop"


async def test_expired_answer_is_no_hit_but_stale(two: Two, clock: Clock, config: CacheConfig) -> None:
    """Until `stale_if_error_s` is over too."""
    one, other = two
    one.script.permit(99)
    await one.ask(ask()).end()
    await until(lambda: not one.caching_service.generations)
    clock.move(config.ttl_s)
    stale = await other.cache.find_stale(ask(), "acme")
    assert stale is not None
    assert stale.age_s == config.ttl_s
    assert await other.cache.find_stale(ask(), "emca") is None
    again = await one.ask(ask()).end()
    assert again.reply.status == "miss"
    await until(lambda: not one.caching_service.generations)
    clock.move(config.ttl_s + config.stale_if_error_s)
    assert await other.cache.find_stale(ask(), "acme") is None


async def test_followers_stream_while_the_leader_streams(two: Two) -> None:
    one, other = two
    leader = await begun(one)
    follower = await joined(other)
    one.script.permit(1)
    await until(lambda: follower.text == "one two ")
    assert not follower.done
    one.script.permit(2)
    await leader.end()
    await follower.end()
    assert follower.text == "one two three"
    assert (leader.reply.status, follower.reply.status) == ("miss", "coalesced")
    assert (leader.reply.billable, follower.reply.billable) == (True, False)
    assert follower.headers["x-causeway-tier"] == "large"
    assert follower.usage == Usage(20, 3, cached_tokens=20)
    assert not other.script.requests


async def test_identical_requests_on_a_gateway_share_one_generation(two: Two) -> None:
    one, _ = two
    clients = [one.ask(ask(stream=at % 2 == 0)) for at in range(20)]
    one.script.permit(9)
    for each in clients:
        await each.end()
    assert {each.text for each in clients} == {"one two three"}
    assert len(one.script.requests) == 1
    assert sorted(each.reply.status for each in clients) == ["coalesced"] * 19 + ["miss"]
    assert sum(each.reply.billable for each in clients) == 1


async def test_generation_costs_two_calls_to_redis(
    redis_server: RedisServer, config: CacheConfig, clock: Clock
) -> None:
    """However many subscribers and tokens it has: to enter and to keep."""
    import redis

    config = msgspec.structs.replace(config, lease_s=30.0)
    async with gateway(redis_server.url, config, clock, Script(*["word "] * 50)) as one:
        with redis.Redis.from_url(redis_server.url) as client:

            def calls() -> int:
                return int(client.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0))

            one.script.permit(999)
            await one.ask(ask("the scripts are loaded now")).end()
            await until(lambda: not one.caching_service.generations)
            before = calls()
            for each in [one.ask(ask(stream=True)) for _ in range(20)]:
                await each.end()
            await until(lambda: not one.caching_service.generations)
            made = calls()
            assert (await one.ask(ask()).end()).reply.status == "hit"
            assert (made - before, calls() - made) == (2, 1)


async def test_chunks_are_published_only_for_followers(
    two: Two, redis_server: RedisServer, config: CacheConfig
) -> None:
    """An answer without followers leaves an entry and a lease, and no stream."""
    import redis

    one, _ = two
    one.script.permit(9)
    await one.ask(ask(stream=True)).end()
    await until(lambda: not one.caching_service.generations)
    with redis.Redis.from_url(redis_server.url) as client:
        keys = [key.decode() for key in client.keys(f"{config.key_prefix}:*")]
        ttls = [client.pttl(key) for key in keys]
    assert sorted(key.rpartition("}:")[2] for key in keys) == ["entry", "lease:standard"]
    assert all(ttl > 0 for ttl in ttls)


async def test_leaving_follower_affects_no_other_request(two: Two) -> None:
    one, other = two
    leader = await begun(one)
    gone, stays = other.ask(ask(stream=True)), other.ask(ask())
    await until(lambda: gone.text == "one ")
    await gone.leave()
    one.script.permit(3)
    assert (await leader.end()).text == (await stays.end()).text == "one two three"
    assert one.script.stopped == 0
    assert other.outcome("coalesced") == 2


async def test_leader_without_its_client_goes_on_for_local_subscribers(two: Two) -> None:
    """The first client is billed."""
    one, _ = two
    first, second = one.ask(ask(stream=True)), one.ask(ask(stream=True))
    one.script.permit(1)
    await until(lambda: second.text == "one ")
    await first.leave()
    bills: list[Usage] = []
    assert first.reply.usage is not None
    first.reply.usage.on_end(bills.append)
    assert not bills
    one.script.permit(3)
    await second.end()
    assert second.text == "one two three"
    assert second.reply.usage is None
    assert bills == [Usage(20, 3)]
    assert one.script.stopped == 0


async def test_leader_without_its_client_goes_on_for_remote_followers(two: Two) -> None:
    """The answer is stored."""
    one, other = two
    first = await begun(one)
    follower = await joined(other)
    await first.leave()
    one.script.permit(3)
    assert (await follower.end()).text == "one two three"
    assert (one.script.stopped, len(other.script.requests)) == (0, 0)
    await until(lambda: not one.caching_service.generations)
    assert (await other.ask(ask()).end()).reply.status == "hit"


async def test_last_client_to_leave_stops_the_generation(two: Two) -> None:
    """The lease is released."""
    one, other = two
    client = await begun(one)
    await client.leave()
    await until(lambda: one.script.stopped == 1)
    await until(lambda: not one.caching_service.generations)
    other.script.permit(9)
    assert (await other.ask(ask()).end()).reply.status == "miss"
    assert other.fault("leader_takeover") == 0


async def test_generation_for_a_remote_follower_stops_when_its_interest_expires(
    two: Two, clock: Clock, config: CacheConfig
) -> None:
    one, other = two
    first = await begun(one)
    follower = await joined(other)
    await first.leave()
    await follower.leave()
    clock.move(2 * config.lease_s + 0.01)
    await until(lambda: one.script.stopped == 1)


async def test_client_that_leaves_during_the_lookup_leaves_no_lease(two: Two) -> None:
    one, other = two
    for turns in range(6):
        gone = one.ask(ask(str(turns)))
        for _ in range(turns):
            await asyncio.sleep(0)
        await gone.leave()
        other.script.permit(9)
        assert (await other.ask(ask(str(turns))).end()).reply.status == "miss"
    assert other.fault("leader_takeover") == 0


async def test_request_at_the_moment_the_last_client_leaves_is_answered(two: Two) -> None:
    """On the same gateway and on another."""
    one, other = two
    leader = await begun(one)
    gone = await joined(other)
    gone.cancel()
    came = await joined(other)
    leader.cancel()
    back = one.ask(ask(stream=True))
    one.script.permit(9)
    for each in (came, back):
        assert (await each.end()).text == "one two three"
        assert each.error is None


# --- sharing rules ---------------------------------------------------------------------------------------------------


async def test_tenants_share_nothing(two: Two) -> None:
    """Neither a stored answer nor one in progress."""
    one, other = two
    one.script.permit(9)
    await one.ask(ask(), tenant="acme").end()
    await until(lambda: not one.caching_service.generations)
    others = [other.ask(ask(), tenant="emca"), one.ask(ask(), tenant="emca2")]
    await until(lambda: len(other.script.requests) == 1 and len(one.script.requests) == 2)
    one.script.permit(9)
    other.script.permit(9)
    assert [(await each.end()).reply.status for each in others] == ["miss", "miss"]


async def test_priorities_do_not_wait_for_each_other(two: Two) -> None:
    """A request of another priority generates its own answer, and uses a stored one."""
    one, other = two
    bulk = one.ask(ask(), priority="bulk")
    await until(lambda: len(one.script.requests) == 1)
    urgent = other.ask(ask(), priority="interactive")
    await until(lambda: len(other.script.requests) == 1)
    other.script.permit(9)
    assert (await urgent.end()).reply.status == "miss"
    await until(lambda: not other.caching_service.generations)
    assert (await one.ask(ask(), priority="standard").end()).reply.status == "hit"
    one.script.permit(9)
    await bulk.end()


async def test_critical_requests_share_only_among_themselves(two: Two) -> None:
    one, other = two
    plain = one.ask(ask())
    await until(lambda: len(one.script.requests) == 1)
    critical = other.ask(ask(), critical=True)
    await until(lambda: len(other.script.requests) == 1)
    for each in two:
        each.script.permit(9)
    assert [(await each.end()).reply.status for each in (plain, critical)] == ["miss", "miss"]


@pytest.mark.parametrize(
    "request_",
    [
        ask(hints=msgspec.structs.replace(ask().hints, tags=("private",))),
        ask(hints=msgspec.structs.replace(ask().hints, tags=("no-store",))),
        ask(temperature=0.7),
        ask(temperature=None),
        ask(n=2),
        ask(echo=True),
    ],
    ids=["private", "no-store", "sampled", "sampled-by-default", "n", "echo"],
)
async def test_bypassing_requests_reach_no_redis_and_do_not_share(
    two: Two, request_: Request, redis_server: RedisServer, config: CacheConfig
) -> None:
    import redis

    one, _ = two
    one.script.permit(99)
    clients = [one.ask(request_), one.ask(request_)]
    for each in clients:
        assert (await each.end()).reply.status == "bypass"
        assert each.reply.billable
    assert len(one.script.requests) == 2
    assert await one.cache.find_stale(request_, "acme") is None
    with redis.Redis.from_url(redis_server.url) as client:
        assert not client.keys(f"{config.key_prefix}:*")


async def test_fallback_answer_is_shared_and_not_stored(two: Two) -> None:
    one, other = two
    one.script.head = AnswerHead((("x-causeway-degraded", "true"),), keep=False)
    _leader = await begun(one)
    follower = other.ask(ask())
    await until(lambda: any(leader.has_remote_followers for leader in one.caching_service.leaders.values()))
    one.script.permit(3)
    assert (await follower.end()).headers["x-causeway-degraded"] == "true"
    await until(lambda: not one.caching_service.generations)
    other.script.permit(9)
    assert (await other.ask(ask()).end()).reply.status == "miss"


# --- what breaks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [CloudFailed("boom", phase="stream"), QueueFull("full"), DeadlineExceeded("late")])
async def test_errors_are_not_shared(two: Two, error: CausewayError) -> None:
    """Followers on both gateways try again, one generation for all of them."""
    one, other = two
    one.script.error = error
    leader = one.ask(ask())
    await until(lambda: len(one.script.requests) == 1)
    beside, elsewhere = one.ask(ask()), other.ask(ask())
    await until(lambda: bool(other.caching_service.following))
    one.script.error = None
    one.script.permit(3 + 1)
    assert (await leader.end()).error is error
    one.script.permit(9)
    other.script.permit(9)
    for each in (beside, elsewhere):
        assert (await each.end()).text == "one two three"
    assert len(one.script.requests) + len(other.script.requests) == 2
    assert sorted([beside.reply.status, elsewhere.reply.status])[1] == "miss"


async def test_invalid_request_is_an_error_for_all_subscribers(two: Two) -> None:
    one, _ = two
    one.script.error = InvalidRequest("no")
    clients = [one.ask(ask()) for _ in range(5)]
    one.script.permit(99)
    for each in clients:
        assert (await each.end()).error is one.script.error
    assert len(one.script.requests) == 1


async def test_after_failed_rounds_each_request_generates_for_itself(two: Two) -> None:
    one, _ = two
    one.script.error = CloudFailed("boom")
    clients = [one.ask(ask()) for _ in range(6)]
    one.script.permit(999)
    for each in clients:
        assert isinstance((await each.end()).error, CloudFailed)
    assert len(one.script.requests) == 6
    assert not one.caching_service.generations


async def test_follower_of_a_failed_leader_resumes(two: Two) -> None:
    """Without a word twice."""
    one, other = two
    one.script.error = CloudFailed("boom", phase="stream")
    leader = one.ask(ask(stream=True))
    one.script.permit(2)
    await until(lambda: leader.text == "one two ")
    follower = other.ask(ask(stream=True))
    await until(lambda: follower.text == "one two ")
    one.script.permit(2)
    await leader.end()
    other.script.words = ("on", "e two th", "ree")
    other.script.permit(9)
    assert (await follower.end()).text == "one two three"
    assert follower.error is None
    assert follower.reply.billable


async def test_stream_breaks_if_the_restart_differs(two: Two) -> None:
    one, other = two
    one.script.words, one.script.error = ("one ", "two "), CloudFailed("boom", phase="stream")
    leader = one.ask(ask(stream=True))
    one.script.permit(2)
    await until(lambda: leader.text == "one two ")
    follower, whole = other.ask(ask(stream=True)), other.ask(ask())
    await until(lambda: follower.text == "one two ")
    one.script.permit(1)
    await leader.end()
    other.script.words = ("one ", "more")
    other.script.permit(9)
    assert isinstance((await follower.end()).error, StreamBroken)
    assert follower.text == "one two "
    assert (await whole.end()).text == "one more"


async def test_follower_ends_at_its_own_deadline(two: Two) -> None:
    """The leader goes on."""
    one, other = two
    leader = one.ask(ask())
    await until(lambda: len(one.script.requests) == 1)
    short = [one.ask(ask(), left_s=0.05), other.ask(ask(), left_s=0.05)]
    for each in short:
        assert isinstance((await each.end()).error, DeadlineExceeded)
    alone = one.ask(ask("another question"), left_s=0.05)
    for each, words in ((short[0], "while an identical request was being answered"), (alone, "before the answer")):
        assert words in str((await each.end()).error)
    one.script.permit(9)
    assert (await leader.end()).text == "one two three"


async def test_follower_generates_when_the_leaders_deadline_passes(two: Two) -> None:
    one, other = two
    leader = one.ask(ask(), left_s=0.3)
    await until(lambda: len(one.script.requests) == 1)
    follower = other.ask(ask())
    other.script.permit(9)
    assert isinstance((await leader.end()).error, DeadlineExceeded)
    assert (await follower.end()).text == "one two three"
    assert one.script.stopped == 1


async def test_follower_takes_over_from_a_dead_leader(two: Two, clock: Clock, config: CacheConfig) -> None:
    """Once the lease has expired; streams go on without a word twice."""
    one, other = two
    leader = await begun(one)
    follower = await joined(other)
    one.die()
    other.script.permit(9)
    await asyncio.sleep(2 * config.lease_s)
    assert not follower.done, "its lease has not run out by Redis's clock"
    clock.move(config.lease_s + 0.001)
    assert (await follower.end()).text == "one two three"
    assert other.fault("leader_takeover") == 1
    await leader.end()


async def test_leader_with_an_old_fence_changes_nothing(
    two: Two, clock: Clock, config: CacheConfig, redis_server: RedisServer
) -> None:
    """Its own client still gets the answer."""
    one, other = two
    slow = Script("stale ", "words")
    async with gateway(redis_server.url, msgspec.structs.replace(config, lease_s=3600.0), clock, slow) as late:
        first = late.ask(ask())
        await until(lambda: len(slow.requests) == 1)
        clock.move(3601.0)
        one.script.permit(9)
        assert (await one.ask(ask()).end()).reply.status == "miss"
        await until(lambda: not one.caching_service.generations)
        slow.permit(9)
        assert (await first.end()).text == "stale words"
        await until(lambda: not late.caching_service.generations)
        assert late.fault("lost_lease") == 1
    assert (await other.ask(ask()).end()).text == "one two three"


async def test_too_large_answer_is_not_stored(redis_server: RedisServer, config: CacheConfig, clock: Clock) -> None:
    """It is counted."""
    config = msgspec.structs.replace(config, max_entry_bytes=64)
    async with gateway(redis_server.url, config, clock) as one:
        one.script.permit(99)
        for count in (1, 2):
            assert (await one.ask(ask()).end()).reply.status == "miss"
            await until(lambda: not one.caching_service.generations)
            assert one.fault("not_stored") == count


async def test_long_answer_is_bounded_in_memory(redis_server: RedisServer, config: CacheConfig, clock: Clock) -> None:
    """Beyond the buffer it can be neither joined nor stored; its subscribers get all of it."""
    config = msgspec.structs.replace(config, max_buffer_bytes=2000)
    script = Script(*["word "] * 100)
    async with (
        gateway(redis_server.url, config, clock, script) as one,
        gateway(redis_server.url, config, clock) as other,
    ):
        leader = one.ask(ask(stream=True))
        script.permit(50)
        await until(lambda: leader.text == "word " * 50)
        assert one.caching_service.generations
        (generation,) = one.caching_service.generations.values()
        assert generation.buffered_bytes <= 2000
        other.script.permit(9)
        assert (await other.ask(ask()).end()).reply.status == "miss"
        script.permit(99)
        assert (await leader.end()).text == "word " * 100


async def test_follow_limit(redis_server: RedisServer, config: CacheConfig, clock: Clock) -> None:
    """Beyond `max_followed` a gateway generates the answer itself."""
    config = msgspec.structs.replace(config, max_followed=1)
    async with gateway(redis_server.url, config, clock) as one, gateway(redis_server.url, config, clock) as other:
        leaders = [one.ask(ask("a")), one.ask(ask("b"))]
        await until(lambda: len(one.script.requests) == 2)
        followers = [other.ask(ask("a"))]
        await until(lambda: other.caching_service.following == 1)
        other.script.permit(9)
        assert (await other.ask(ask("b")).end()).reply.status == "miss"
        assert other.fault("follow_limit") == 1
        one.script.permit(99)
        for each in (*leaders, *followers):
            assert (await each.end()).text == "one two three"


def test_scripted_tiers_are_as_expected() -> None:
    assert TIERS["big"].name == "large"
