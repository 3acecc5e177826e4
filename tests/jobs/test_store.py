"""Jobs in a real Redis: accepted once, ended once."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from cloud_pool.jobs.config import JobsConfig
from cloud_pool.jobs.errors import IdempotencyConflict, JobAlreadyEnded, JobStoreUnavailable
from cloud_pool.jobs.lua.scripts import SCRIPTS
from cloud_pool.jobs.record import JobRecord, NewJob
from cloud_pool.jobs.states import FINAL_STATES, JobState
from cloud_pool.jobs.store.job_store import JobStore
from cloud_pool.jobs.store.redis_client import RedisClient, as_list
from router.errors import CloudFailed, NotFound, QueueFull, RateLimited

from .conftest import BODY, Clock, until

MakeOffer = Callable[..., NewJob]
FAULT = CloudFailed("the model failed")


async def test_an_accepted_job_is_kept_whole(store: JobStore, offer: MakeOffer) -> None:
    """What was accepted can be read back, body and all."""
    accepted = await store.accept(offer(webhook="https://example.com/hook"))
    record = await store.get(accepted.id, "kiosk")
    assert not accepted.known
    assert (record.state, record.body, record.webhook) == (JobState.QUEUED, BODY, "https://example.com/hook")
    assert [found.id for found in await store.list_owned("kiosk")] == [accepted.id]


async def test_the_same_key_and_body_is_the_same_job(store: JobStore, offer: MakeOffer) -> None:
    """A repeated ask under one key gets the first one's id, and the queue holds one job."""
    first = await store.accept(offer(idempotency="k", digest="d"))
    again = await store.accept(offer(idempotency="k", digest="d"))
    assert (again.id, again.known) == (first.id, True)
    assert len((await store.claim("w", "large", ["standard"] * 5)).records) == 1


async def test_the_same_key_and_another_body_is_refused(store: JobStore, offer: MakeOffer) -> None:
    """Another body under a used key is a conflict, and nothing is queued for it."""
    await store.accept(offer(idempotency="k", digest="d"))
    with pytest.raises(IdempotencyConflict):
        await store.accept(offer(idempotency="k", digest="other"))
    assert (await store.depths()).queues[0].queued == 1


async def test_keys_are_an_owners_own(store: JobStore, offer: MakeOffer) -> None:
    """Two owners may use the same key for different jobs."""
    first = await store.accept(offer(idempotency="k", digest="d"))
    other = await store.accept(offer(idempotency="k", digest="other", owner="someone else"))
    assert first.id != other.id


async def test_an_accept_that_is_repeated_has_one_effect(store: JobStore, offer: MakeOffer) -> None:
    """The very same call, sent again because its answer was lost, queues nothing more."""
    one = offer()
    await store.accept(one)
    await store.accept(one)
    assert (await store.depths()).queues[0].queued == 1


async def test_another_owners_job_is_not_there(store: JobStore, offer: MakeOffer) -> None:
    """A job is neither shown to nor cancelled by anyone but its owner."""
    accepted = await store.accept(offer())
    with pytest.raises(NotFound):
        await store.get(accepted.id, "thief")
    with pytest.raises(NotFound):
        await store.cancel(accepted.id, "thief")
    assert await store.list_owned("thief") == []


async def test_queues_and_owners_are_bounded(
    database: RedisClient, config: JobsConfig, clock: Clock, offer: MakeOffer
) -> None:
    """Beyond the bounds a job is refused and leaves nothing behind."""
    store = JobStore(database, msgspec.structs.replace(config, max_queued=1, max_unfinished=2), clock=clock)
    await store.accept(offer())
    with pytest.raises(QueueFull):
        await store.accept(offer(id="job_refused"))
    await store.accept(offer(priority="bulk"))
    with pytest.raises(RateLimited):
        await store.accept(offer(priority="interactive"))
    assert await store.lookup("job_refused") is None


async def test_success_stores_the_result_once(store: JobStore, offer: MakeOffer) -> None:
    """The holder's report ends the job; a second report under the same fence changes nothing."""
    await store.accept(offer())
    (record,) = (await store.claim("w", "large", ["standard"])).records
    assert await store.succeed(record.id, record.fence, b"{}")
    assert await store.succeed(record.id, record.fence, b'{"second":1}')  # its answer was lost: done is done
    assert await store.read_result(record.id) == b"{}"
    assert (await store.get(record.id, "kiosk")).state is JobState.SUCCEEDED
    assert (await store.claim("w", "large", ["standard"])).records == ()


async def test_an_old_fence_has_no_effect(
    database: RedisClient, config: JobsConfig, clock: Clock, offer: MakeOffer
) -> None:
    """A worker that was thought dead reports in vain, whatever it reports."""
    store = JobStore(database, msgspec.structs.replace(config, lease_s=0.001), clock=clock)
    await store.accept(offer())
    (old,) = (await store.claim("first", "large", ["standard"])).records
    new: list[JobRecord] = []

    async def adopted() -> bool:
        new.extend((await store.claim("second", "large", ["standard"])).records)
        return bool(new)

    await until(adopted)
    assert (new[0].id, new[0].fence) == (old.id, old.fence + 1)
    assert await store.renew_leases("first", [(old.id, old.fence)], renew=True) == {old.id}
    assert not await store.succeed(old.id, old.fence, b"{}")
    assert not await store.fail(old.id, old.fence, FAULT)
    assert not await store.postpone(old.id, old.fence, FAULT, 0, counts=True)
    assert not await store.release(old.id, old.fence)
    assert (await store.get(old.id, "kiosk")).state is JobState.RUNNING


async def test_a_renewed_lease_is_kept(
    database: RedisClient, config: JobsConfig, clock: Clock, offer: MakeOffer
) -> None:
    """While its lease is renewed, nobody else gets the job."""
    store = JobStore(database, msgspec.structs.replace(config, lease_s=600.0), clock=clock)
    await store.accept(offer())
    (held,) = (await store.claim("first", "large", ["standard"])).records
    assert await store.renew_leases("first", [(held.id, held.fence)], renew=True) == set()
    assert (await store.claim("second", "large", ["standard"])).records == ()


async def test_attempts_end_in_a_dead_letter(store: JobStore, offer: MakeOffer, config: JobsConfig) -> None:
    """After its last attempt a job is dead and listed; retried it runs again, purged it is gone."""
    await store.accept(offer())
    for _ in range(config.max_attempts):
        (record,) = (await store.claim("w", "large", ["standard"])).records
        assert await store.postpone(record.id, record.fence, FAULT, store.now_ms, counts=True)
        await store.promote_and_expire()
    assert (await store.get(record.id, "kiosk")).state is JobState.DEAD
    assert (await store.get(record.id, "kiosk")).body == BODY  # for the retry
    (letter,) = await store.dead_letters()
    assert (letter.id, letter.attempts, letter.code) == (record.id, config.max_attempts, "cloud_failed")
    assert await store.retry(record.id)
    assert await store.dead_letters() == []
    (again,) = (await store.claim("w", "large", ["standard"])).records
    assert (again.id, again.attempts, again.fence) == (record.id, 1, config.max_attempts + 1)
    assert await store.succeed(again.id, again.fence, b"{}")
    assert not await store.retry(record.id)
    assert not await store.purge(record.id)


async def test_a_purged_letter_is_gone(
    database: RedisClient, config: JobsConfig, clock: Clock, offer: MakeOffer
) -> None:
    """Purging removes the letter, its record and what the caller asked."""
    store = JobStore(database, msgspec.structs.replace(config, max_attempts=1), clock=clock)
    await store.accept(offer(idempotency="k", digest="d"))
    (record,) = (await store.claim("w", "large", ["standard"])).records
    await store.postpone(record.id, record.fence, FAULT, 0, counts=True)
    assert await store.purge(record.id)
    assert await store.dead_letters() == []
    assert await store.lookup(record.id) is None
    assert not (await store.accept(offer(idempotency="k", digest="d"))).known


async def test_a_job_that_kills_its_workers_dies(
    database: RedisClient, config: JobsConfig, clock: Clock, offer: MakeOffer
) -> None:
    """Nobody reported on any attempt: the claim after the last one buries the job."""
    store = JobStore(database, msgspec.structs.replace(config, max_attempts=2, lease_s=0.001), clock=clock)
    await store.accept(offer())
    claims: list[str] = []

    async def buried() -> bool:
        claims.extend(record.id for record in (await store.claim("w", "large", ["standard"])).records)
        return bool(await store.dead_letters()) or len(claims) > 2

    await until(buried)
    assert len(claims) == 2


async def test_what_was_not_its_fault_does_not_count(store: JobStore, offer: MakeOffer, config: JobsConfig) -> None:
    """A job that could not be run for want of a Triton is postponed as often as it takes."""
    await store.accept(offer())
    for _ in range(config.max_attempts + 3):
        (record,) = (await store.claim("w", "large", ["standard"])).records
        await store.postpone(record.id, record.fence, FAULT, store.now_ms, counts=False)
        await store.promote_and_expire()
    assert (await store.get(record.id, "kiosk")).state is JobState.QUEUED


async def test_a_postponed_job_waits_its_time(store: JobStore, offer: MakeOffer, clock: Clock) -> None:
    """It is queued when it is due and not before."""
    await store.accept(offer())
    (record,) = (await store.claim("w", "large", ["standard"])).records
    await store.postpone(record.id, record.fence, FAULT, store.now_ms + 1000, counts=True)
    assert await store.promote_and_expire() == 0
    clock.now += 1.0
    assert await store.promote_and_expire() == 1
    assert (await store.claim("w", "large", ["standard"])).records[0].id == record.id


@pytest.mark.parametrize("state", ["queued", "running", "waiting"])
async def test_a_late_job_expires(store: JobStore, offer: MakeOffer, clock: Clock, state: str) -> None:
    """Whatever it is doing, at its deadline it is over, and its worker learns that."""
    accepted = await store.accept(offer())
    if state != "queued":
        (record,) = (await store.claim("w", "large", ["standard"])).records
        if state == "waiting":
            await store.postpone(record.id, record.fence, FAULT, store.now_ms + 10**9, counts=True)
    clock.now += 3600.0
    assert await store.promote_and_expire() == 1
    assert (await store.get(accepted.id, "kiosk")).state is JobState.EXPIRED
    assert (await store.claim("w", "large", ["standard"])).records == ()
    if state == "running":
        assert await store.renew_leases("w", [(record.id, record.fence)], renew=False) == {record.id}


@pytest.mark.parametrize("claimed", [False, True])
async def test_cancel_wins(store: JobStore, offer: MakeOffer, claimed: bool) -> None:
    """A cancelled job is over at once; its worker's result is refused; cancelling twice is no error."""
    accepted = await store.accept(offer())
    held = (await store.claim("w", "large", ["standard"])).records if claimed else ()
    await store.cancel(accepted.id, "kiosk")
    await store.cancel(accepted.id, "kiosk")
    for record in held:
        assert not await store.succeed(record.id, record.fence, b"{}")
    assert (await store.get(accepted.id, "kiosk")).state is JobState.CANCELLED
    assert (await store.claim("w", "large", ["standard"])).records == ()


async def test_what_ended_cannot_be_cancelled(store: JobStore, offer: MakeOffer) -> None:
    """The caller is told, and the result stays."""
    accepted = await store.accept(offer())
    (record,) = (await store.claim("w", "large", ["standard"])).records
    await store.succeed(record.id, record.fence, b"{}")
    with pytest.raises(JobAlreadyEnded):
        await store.cancel(accepted.id, "kiosk")


async def test_a_job_given_back_is_as_new(store: JobStore, offer: MakeOffer) -> None:
    """What a draining worker gives back is claimed at once, and its attempt does not count."""
    await store.accept(offer())
    (record,) = (await store.claim("w", "large", ["standard"])).records
    assert await store.release(record.id, record.fence)
    (again,) = (await store.claim("w2", "large", ["standard"])).records
    assert (again.attempts, again.fence > record.fence) == (1, True)


async def test_turns_go_to_who_has_jobs(store: JobStore, offer: MakeOffer) -> None:
    """A turn of a priority without jobs is not lost, and no priority takes more than it is given while others wait."""
    for priority in ("bulk", "bulk", "interactive", "standard"):
        await store.accept(offer(priority=priority))
    claimed = await store.claim("w", "large", ["bulk", "interactive", "interactive"])
    assert [record.priority for record in claimed.records] == ["bulk", "interactive", "standard"]
    assert (await store.claim("w", "other", ["bulk"])).records == ()


async def test_what_an_ended_job_leaves_dies_with_it(store: JobStore, database: RedisClient, offer: MakeOffer) -> None:
    """Record, result, events and idempotency key all get a time to live; the lists of what is open are empty."""
    accepted = await store.accept(offer(idempotency="k", digest="d"))
    (record,) = (await store.claim("w", "large", ["standard"])).records
    await store.succeed(record.id, record.fence, b"{}")
    keys = (
        database.key("job", accepted.id),
        database.key("result", accepted.id),
        database.key("events", accepted.id),
        database.key("idempotency", "kiosk", "k"),
    )
    for key in keys:
        assert 0 < int(str(await database.command("PTTL", key))) <= 86_400_000, key
    assert (await store.get(accepted.id, "kiosk")).body == b""  # what was asked is forgotten first
    assert await database.command("ZCARD", database.key("open", "kiosk")) == 0
    assert await database.command("ZCARD", database.key("deadlines")) == 0
    assert await database.command("XLEN", database.key("queue", "large", "standard")) == 0


async def test_listing_goes_page_by_page(
    store: JobStore, offer: MakeOffer, clock: Clock, database: RedisClient
) -> None:
    """Newest first, from behind a job; what has expired is skipped."""
    names = []
    for _ in range(5):
        clock.now += 1
        names.append((await store.accept(offer())).id)
    await database.command("DEL", database.key("job", names[3]))
    first = [record.id for record in await store.list_owned("kiosk", limit=2)]
    assert first == [names[4], names[2]]
    assert [record.id for record in await store.list_owned("kiosk", after=first[-1], limit=9)] == [names[1], names[0]]
    with pytest.raises(NotFound):
        await store.list_owned("kiosk", after="job_nowhere")


async def test_events_tell_the_life_of_a_job(store: JobStore, database: RedisClient, offer: MakeOffer) -> None:
    """Each move leaves one event, in order."""
    accepted = await store.accept(offer())
    (record,) = (await store.claim("w", "large", ["standard"])).records
    await store.publish_progress(record.id, record.fence, b'{"tokens":3}')
    await store.succeed(record.id, record.fence, b"{}")
    entries = as_list(await database.command("XRANGE", database.key("events", accepted.id), "-", "+"))
    assert [as_list(as_list(entry)[1])[1] for entry in entries] == [b"queued", b"running", b"progress", b"succeeded"]
    assert JobState(as_list(as_list(entries[-1])[1])[1].decode()) in FINAL_STATES


async def test_an_unreachable_redis_is_a_503(config: JobsConfig, clock: Clock, offer: MakeOffer) -> None:
    """Nothing is said to be accepted, and the message holds nothing of the caller's."""
    database = RedisClient("unix:///nonexistent/redis.sock", config.key_prefix, SCRIPTS)
    with pytest.raises(JobStoreUnavailable) as caught:
        await JobStore(database, config, clock=clock).accept(offer())
    assert caught.value.status == 503
    assert "secret" not in caught.value.message
    await database.close()
