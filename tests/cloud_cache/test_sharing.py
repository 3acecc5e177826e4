"""Two gateways on one Redis: who makes an answer, who gets it, and what each of them pays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from cloud_pool.cache.config import CacheConfig
from cloud_pool.serving.request_context import AnswerHead
from router.errors import CausewayError, CloudFailed, DeadlineExceeded, InvalidRequest, QueueFull, StreamBroken
from router.types import Request, Usage
from tests.redis_server import RedisServer

from .gateways import TIERS, Clock, Gateway, Script, ask, gateway, until

Two = tuple[Gateway, Gateway]


@pytest.fixture
async def two(redis_server: RedisServer, config: CacheConfig, clock: Clock) -> AsyncIterator[Two]:
    async with gateway(redis_server.url, config, clock) as one, gateway(redis_server.url, config, clock) as other:
        yield one, other


async def test_answer_is_kept_for_all_gateways(two: Two, clock: Clock) -> None:
    """What one gateway has made another gives, with its age, its head and no cost."""
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
    assert not other.script.asked
    assert (one.outcome("miss"), other.outcome("hit")) == (1, 1)


@pytest.mark.parametrize("first", [True, False])
async def test_streamed_and_whole_share(two: Two, first: bool) -> None:
    """How an answer was delivered first does not matter to who gets it later."""
    one, other = two
    one.script.permit(9)
    made = await one.ask(ask(stream=first)).end()
    await until(lambda: not one.caching_service.generations)
    found = await other.ask(ask(stream=not first)).end()
    assert made.text == found.text
    assert found.reply.status == "hit"
    assert found.got[-2].finish_reason == "stop"


async def test_old_answers_are_made_anew(two: Two, clock: Clock, config: CacheConfig) -> None:
    """Past its time to live an answer is no hit; it may still stand in for a refusal, until that is over too."""
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
    """Whoever asks the same elsewhere gets the pieces that were said, and the next ones as they come."""
    one, other = two
    leader = one.ask(ask(stream=True))
    one.script.permit(1)
    await until(lambda: leader.text == "one ")
    follower = other.ask(ask(stream=True))
    await until(lambda: follower.text == "one ")
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
    assert not other.script.asked


async def test_one_gateway_asks_redis_once(two: Two) -> None:
    """Of many who ask the same on one gateway, one is made, and one call enters the cache."""
    one, _ = two
    asked = [one.ask(ask(stream=at % 2 == 0)) for at in range(20)]
    one.script.permit(9)
    for each in asked:
        await each.end()
    assert {each.text for each in asked} == {"one two three"}
    assert len(one.script.asked) == 1
    assert sorted(each.reply.status for each in asked) == ["coalesced"] * 19 + ["miss"]
    assert sum(each.reply.billable for each in asked) == 1


async def test_calls_to_redis(redis_server: RedisServer, config: CacheConfig, clock: Clock) -> None:
    """However many ask the same on a gateway, and however long the answer is, Redis is called twice: to enter and to
    keep; a hit is one call."""
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


async def test_pieces_cross_redis_only_where_somebody_waits(
    two: Two, redis_server: RedisServer, config: CacheConfig
) -> None:
    """An answer that nobody shares leaves an entry and a lease, and no stream of pieces."""
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


async def test_a_follower_that_leaves_leaves_the_leader_alone(two: Two) -> None:
    """A follower's client that goes away changes nothing for the leader, nor for another follower beside it."""
    one, other = two
    leader = one.ask(ask(stream=True))
    one.script.permit(1)
    await until(lambda: leader.text == "one ")
    gone, stays = other.ask(ask(stream=True)), other.ask(ask())
    await until(lambda: gone.text == "one ")
    await gone.leave()
    one.script.permit(3)
    assert (await leader.end()).text == (await stays.end()).text == "one two three"
    assert one.script.stopped == 0
    assert other.outcome("coalesced") == 2


async def test_a_leader_whose_client_leaves_goes_on_for_those_here(two: Two) -> None:
    """The answer is finished for who else listens on the same gateway, on the account of who asked first."""
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


async def test_a_leader_whose_client_leaves_goes_on_for_those_elsewhere(two: Two) -> None:
    """The answer is finished for a follower on another gateway, and kept."""
    one, other = two
    first = one.ask(ask(stream=True))
    one.script.permit(1)
    await until(lambda: first.text == "one ")
    follower = other.ask(ask(stream=True))
    await until(lambda: follower.text == "one ")
    await first.leave()
    one.script.permit(3)
    assert (await follower.end()).text == "one two three"
    assert (one.script.stopped, len(other.script.asked)) == (0, 0)
    await until(lambda: not one.caching_service.generations)
    assert (await other.ask(ask()).end()).reply.status == "hit"


async def test_nobody_left_stops_the_work(two: Two) -> None:
    """When the last listener leaves and nobody waits elsewhere, the work is cancelled and the lease given back."""
    one, other = two
    asked = one.ask(ask(stream=True))
    one.script.permit(1)
    await until(lambda: asked.text == "one ")
    await asked.leave()
    await until(lambda: one.script.stopped == 1)
    await until(lambda: not one.caching_service.generations)
    other.script.permit(9)
    assert (await other.ask(ask()).end()).reply.status == "miss"
    assert other.fault("leader_takeover") == 0


async def test_the_last_follower_leaves_after_the_leaders_client(two: Two, clock: Clock, config: CacheConfig) -> None:
    """Work that went on for a follower elsewhere stops once that follower has not been heard of for a while."""
    one, other = two
    first = one.ask(ask(stream=True))
    one.script.permit(1)
    await until(lambda: first.text == "one ")
    follower = other.ask(ask(stream=True))
    await until(lambda: follower.text == "one ")
    await first.leave()
    await follower.leave()
    clock.move(2 * config.lease_s + 0.01)
    await until(lambda: one.script.stopped == 1)


async def test_who_leaves_while_redis_is_asked_leaves_no_lease(two: Two) -> None:
    """A client that goes before Redis has answered leaves nothing that another gateway would wait for."""
    one, other = two
    for turns in range(6):
        gone = one.ask(ask(str(turns)))
        for _ in range(turns):
            await asyncio.sleep(0)
        await gone.leave()
        other.script.permit(9)
        assert (await other.ask(ask(str(turns))).end()).reply.status == "miss"
    assert other.fault("leader_takeover") == 0


async def test_who_comes_as_the_last_one_goes(two: Two) -> None:
    """Whoever asks in the very moment in which the last listener leaves gets an answer, here or elsewhere."""
    one, other = two
    leader = one.ask(ask(stream=True))
    one.script.permit(1)
    await until(lambda: leader.text == "one ")
    gone = other.ask(ask(stream=True))
    await until(lambda: gone.text == "one ")
    gone.cancel()
    came = other.ask(ask(stream=True))
    await until(lambda: came.text == "one ")
    leader.cancel()
    back = one.ask(ask(stream=True))
    one.script.permit(9)
    for each in (came, back):
        assert (await each.end()).text == "one two three"
        assert each.error is None


# --- who may share what ----------------------------------------------------------------------------------------------


async def test_tenants_are_apart(two: Two) -> None:
    """No answer crosses tenants: neither a kept one nor one in the making."""
    one, other = two
    one.script.permit(9)
    await one.ask(ask(), tenant="acme").end()
    await until(lambda: not one.caching_service.generations)
    strangers = [other.ask(ask(), tenant="emca"), one.ask(ask(), tenant="emca2")]
    await until(lambda: len(other.script.asked) == 1 and len(one.script.asked) == 2)
    one.script.permit(9)
    other.script.permit(9)
    assert [(await each.end()).reply.status for each in strangers] == ["miss", "miss"]


async def test_the_urgent_do_not_wait_for_the_rest(two: Two) -> None:
    """A request of another priority makes its own answer while it is in the making, and takes it once it is kept."""
    one, other = two
    bulk = one.ask(ask(), priority="bulk")
    await until(lambda: len(one.script.asked) == 1)
    urgent = other.ask(ask(), priority="interactive")
    await until(lambda: len(other.script.asked) == 1)
    other.script.permit(9)
    assert (await urgent.end()).reply.status == "miss"
    await until(lambda: not other.caching_service.generations)
    assert (await one.ask(ask(), priority="standard").end()).reply.status == "hit"
    one.script.permit(9)
    await bulk.end()


async def test_whoever_takes_no_less_waits_for_no_less(two: Two) -> None:
    """A request that takes its tier's whole answer or none does not share the answer of one that may get another."""
    one, other = two
    humble = one.ask(ask())
    await until(lambda: len(one.script.asked) == 1)
    proud = other.ask(ask(), critical=True)
    await until(lambda: len(other.script.asked) == 1)
    for each in two:
        each.script.permit(9)
    assert [(await each.end()).reply.status for each in (humble, proud)] == ["miss", "miss"]


@pytest.mark.parametrize(
    "request_",
    [
        ask(hints=msgspec.structs.replace(ask().hints, tags=("private",))),
        ask(hints=msgspec.structs.replace(ask().hints, tags=("no-store",))),
        ask(temperature=0.7),
        ask(temperature=None),
        ask(n=2),
        ask(echo=True),
        ask(resume="token"),
    ],
    ids=["private", "no-store", "sampled", "sampled-by-default", "n", "echo", "rest"],
)
async def test_what_is_kept_out_stays_out(
    two: Two, request_: Request, redis_server: RedisServer, config: CacheConfig
) -> None:
    """Nothing of a request that may not be kept reaches Redis, and two of them at once are made twice."""
    import redis

    one, _ = two
    one.script.permit(99)
    asked = [one.ask(request_), one.ask(request_)]
    for each in asked:
        assert (await each.end()).reply.status == "bypass"
        assert each.reply.billable
    assert len(one.script.asked) == 2
    assert await one.cache.find_stale(request_, "acme") is None
    with redis.Redis.from_url(redis_server.url) as client:
        assert not client.keys(f"{config.key_prefix}:*")


async def test_second_choice_is_shared_and_not_kept(two: Two) -> None:
    """Those who wait get an answer of second choice; later ones are asked anew."""
    one, other = two
    one.script.head = AnswerHead((("x-causeway-degraded", "true"),), keep=False)
    leader = one.ask(ask(stream=True))
    one.script.permit(1)
    await until(lambda: leader.text == "one ")
    follower = other.ask(ask())
    await until(lambda: any(leader.has_remote_followers for leader in one.caching_service.leaders))
    one.script.permit(3)
    assert (await follower.end()).headers["x-causeway-degraded"] == "true"
    await until(lambda: not one.caching_service.generations)
    other.script.permit(9)
    assert (await other.ask(ask()).end()).reply.status == "miss"


# --- what breaks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [CloudFailed("boom", phase="stream"), QueueFull("full"), DeadlineExceeded("late")])
async def test_errors_are_not_shared(two: Two, error: CausewayError) -> None:
    """What breaks for the leader breaks for it alone: followers on both gateways ask again, one for all of them."""
    one, other = two
    one.script.error = error
    leader = one.ask(ask())
    await until(lambda: len(one.script.asked) == 1)
    beside, elsewhere = one.ask(ask()), other.ask(ask())
    await until(lambda: bool(other.caching_service.following))
    one.script.error = None
    one.script.permit(3 + 1)
    assert (await leader.end()).error is error
    one.script.permit(9)
    other.script.permit(9)
    for each in (beside, elsewhere):
        assert (await each.end()).text == "one two three"
    assert len(one.script.asked) + len(other.script.asked) == 2
    assert sorted([beside.reply.status, elsewhere.reply.status])[1] == "miss"


async def test_a_faulty_question_is_faulty_for_all_here(two: Two) -> None:
    """A fault of the question itself is shared with those who asked the same: it would only come again."""
    one, _ = two
    one.script.error = InvalidRequest("no")
    asked = [one.ask(ask()) for _ in range(5)]
    one.script.permit(99)
    for each in asked:
        assert (await each.end()).error is one.script.error
    assert len(one.script.asked) == 1


async def test_after_some_rounds_each_asks_for_itself(two: Two) -> None:
    """Whoever followed leaders that fail one after the other goes alone in the end, and is not kept waiting."""
    one, _ = two
    one.script.error = CloudFailed("boom")
    asked = [one.ask(ask()) for _ in range(6)]
    one.script.permit(999)
    for each in asked:
        assert isinstance((await each.end()).error, CloudFailed)
    assert len(one.script.asked) == 6
    assert not one.caching_service.generations


async def test_a_broken_stream_goes_on_where_it_was(two: Two) -> None:
    """A streaming follower whose leader broke gets the rest from the next try, without a word twice."""
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


async def test_two_answers_never_become_one(two: Two) -> None:
    """Where the next try says something else, the stream that had begun is broken."""
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


async def test_nobody_waits_beyond_their_own_deadline(two: Two) -> None:
    """A follower with less time than the leader stops at its own deadline, and the leader goes on."""
    one, other = two
    leader = one.ask(ask())
    await until(lambda: len(one.script.asked) == 1)
    short = [one.ask(ask(), left_s=0.05), other.ask(ask(), left_s=0.05)]
    for each in short:
        assert isinstance((await each.end()).error, DeadlineExceeded)
    one.script.permit(9)
    assert (await leader.end()).text == "one two three"


async def test_a_leader_with_little_time_fails_alone(two: Two) -> None:
    """When the leader's time is over, a follower with more of it makes the answer."""
    one, other = two
    leader = one.ask(ask(), left_s=0.3)
    await until(lambda: len(one.script.asked) == 1)
    follower = other.ask(ask())
    other.script.permit(9)
    assert isinstance((await leader.end()).error, DeadlineExceeded)
    assert (await follower.end()).text == "one two three"
    assert one.script.stopped == 1


async def test_a_dead_leader_is_followed_by_another(two: Two, clock: Clock, config: CacheConfig) -> None:
    """Once a silent leader's lease has run out, a follower makes the answer; streams go on without a word twice."""
    one, other = two
    leader = one.ask(ask(stream=True))
    one.script.permit(1)
    await until(lambda: leader.text == "one ")
    follower = other.ask(ask(stream=True))
    await until(lambda: follower.text == "one ")
    one.die()
    other.script.permit(9)
    await asyncio.sleep(2 * config.lease_s)
    assert not follower.done, "its lease has not run out by Redis's clock"
    clock.move(config.lease_s + 0.001)
    assert (await follower.end()).text == "one two three"
    assert other.fault("leader_takeover") == 1
    await leader.end()


async def test_a_leader_that_was_taken_for_dead_changes_nothing(
    two: Two, clock: Clock, config: CacheConfig, redis_server: RedisServer
) -> None:
    """Its fence is old: what it says afterwards is neither kept nor heard, and its own client still gets it."""
    one, other = two
    slow = Script("stale ", "words")
    async with gateway(redis_server.url, msgspec.structs.replace(config, lease_s=3600.0), clock, slow) as late:
        first = late.ask(ask())
        await until(lambda: len(slow.asked) == 1)
        clock.move(3601.0)
        one.script.permit(9)
        assert (await one.ask(ask()).end()).reply.status == "miss"
        await until(lambda: not one.caching_service.generations)
        slow.permit(9)
        assert (await first.end()).text == "stale words"
        await until(lambda: not late.caching_service.generations)
        assert late.fault("lost_lease") == 1
    assert (await other.ask(ask()).end()).text == "one two three"


async def test_too_large_is_not_kept(redis_server: RedisServer, config: CacheConfig, clock: Clock) -> None:
    """An answer beyond the bound is given and not kept; counted."""
    config = msgspec.structs.replace(config, max_entry_bytes=64)
    async with gateway(redis_server.url, config, clock) as one:
        one.script.permit(99)
        for count in (1, 2):
            assert (await one.ask(ask()).end()).reply.status == "miss"
            await until(lambda: not one.caching_service.generations)
            assert one.fault("not_stored") == count


async def test_a_long_answer_is_bounded_in_memory(redis_server: RedisServer, config: CacheConfig, clock: Clock) -> None:
    """Past the buffer an answer is shared with nobody new and not kept, and those who listen get all of it."""
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
        (generation,) = one.caching_service.generations
        assert generation.buffered_bytes <= 2000
        other.script.permit(9)
        assert (await other.ask(ask()).end()).reply.status == "miss"
        script.permit(99)
        assert (await leader.end()).text == "word " * 100


async def test_too_many_followed_at_once(redis_server: RedisServer, config: CacheConfig, clock: Clock) -> None:
    """Beyond `max_followed` a gateway makes an answer itself rather than hold one more connection."""
    config = msgspec.structs.replace(config, max_followed=1)
    async with gateway(redis_server.url, config, clock) as one, gateway(redis_server.url, config, clock) as other:
        leaders = [one.ask(ask("a")), one.ask(ask("b"))]
        await until(lambda: len(one.script.asked) == 2)
        followers = [other.ask(ask("a"))]
        await until(lambda: other.caching_service.following == 1)
        other.script.permit(9)
        assert (await other.ask(ask("b")).end()).reply.status == "miss"
        assert other.fault("follow_limit") == 1
        one.script.permit(99)
        for each in (*leaders, *followers):
            assert (await each.end()).text == "one two three"


def test_tier_names() -> None:
    """The script's tiers are what the tests think they are."""
    assert TIERS["big"].name == "large"
