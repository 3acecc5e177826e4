"""The job store on a real Redis."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.storage.job_store import JobStore
from causeway_server.cloud_pool.storage.record import JobRecord, LeaseStates, NewJob
from causeway_server.cloud_pool.storage.redis_client import RedisClient, as_list, as_text
from causeway_server.cloud_pool.storage.stores import SCRIPTS
from causeway_server.router.errors import (
    CloudFailed,
    IdempotencyConflict,
    JobAlreadyEnded,
    JobStoreUnavailable,
    NotFound,
)
from causeway_server.router.jobs.job import FINAL_STATES, JobState
from tests.cloud_pool.jobs.conftest import BODY, Clock, until

MakeJob = Callable[..., NewJob]
FAULT = CloudFailed("the model failed")


async def test_an_accepted_job_is_stored_completely(store: JobStore, new_job: MakeJob) -> None:
    accepted = await store.accept(new_job(webhook="https://example.com/hook"))
    record = await store.get(accepted.id, "kiosk")
    assert not accepted.known
    assert (record.state, record.webhook) == (JobState.QUEUED, "https://example.com/hook")
    assert (await store.claim("w", "large", ["standard"])).records[0].body == BODY
    assert [found.id for found in await store.list_owned("kiosk")] == [accepted.id]


async def test_the_same_key_and_body_is_the_same_job(store: JobStore, new_job: MakeJob) -> None:
    first = await store.accept(new_job(idempotency="k", digest="d"))
    again = await store.accept(new_job(idempotency="k", digest="d"))
    assert (again.id, again.known) == (first.id, True)
    assert len((await store.claim("w", "large", ["standard"] * 5)).records) == 1


async def test_the_same_key_with_another_body_is_a_conflict(store: JobStore, new_job: MakeJob) -> None:
    await store.accept(new_job(idempotency="k", digest="d"))
    with pytest.raises(IdempotencyConflict):
        await store.accept(new_job(idempotency="k", digest="other"))
    assert (await store.depths()).queues[0].queued == 1


async def test_owners_do_not_share_idempotency_keys(store: JobStore, new_job: MakeJob) -> None:
    first = await store.accept(new_job(idempotency="k", digest="d"))
    other = await store.accept(new_job(idempotency="k", digest="other", owner="someone else"))
    assert first.id != other.id


async def test_a_repeated_accept_has_one_effect(store: JobStore, new_job: MakeJob) -> None:
    """The first reply was lost."""
    one = new_job()
    await store.accept(one)
    await store.accept(one)
    assert (await store.depths()).queues[0].queued == 1


async def test_another_owners_job_is_not_found(store: JobStore, new_job: MakeJob) -> None:
    accepted = await store.accept(new_job())
    with pytest.raises(NotFound):
        await store.get(accepted.id, "thief")
    with pytest.raises(NotFound):
        await store.cancel(accepted.id, "thief")
    assert await store.list_owned("thief") == []


async def test_success_stores_the_result_once(store: JobStore, new_job: MakeJob) -> None:
    await store.accept(new_job())
    (record,) = (await store.claim("w", "large", ["standard"])).records
    assert await store.succeed(record.id, record.fence, b"{}")
    assert await store.succeed(record.id, record.fence, b'{"second":1}')  # a repeated call, whose first reply was lost
    assert await store.read_result(record.id, record.owner) == b"{}"
    assert (await store.get(record.id, "kiosk")).state is JobState.SUCCEEDED
    assert (await store.claim("w", "large", ["standard"])).records == ()


async def test_reports_with_an_old_fence_have_no_effect(
    database: RedisClient, config: JobsConfig, clock: Clock, new_job: MakeJob
) -> None:
    store = JobStore(database, msgspec.structs.replace(config, lease_s=0.001))
    await store.accept(new_job())
    (old,) = (await store.claim("first", "large", ["standard"])).records
    new: list[JobRecord] = []

    async def adopted() -> bool:
        await store.promote_and_expire()
        new.extend((await store.claim("second", "large", ["standard"])).records)
        return bool(new)

    await until(adopted)
    assert (new[0].id, new[0].fence) == (old.id, old.fence + 1)
    assert await store.renew_leases([(old.id, old.fence)], renew=True) == LeaseStates(lost=frozenset({old.id}))
    assert not await store.succeed(old.id, old.fence, b"{}")
    assert not await store.fail(old.id, old.fence, FAULT)
    assert not await store.postpone(old.id, old.fence, FAULT, 0, counts=True)
    assert not await store.release(old.id, old.fence)
    assert (await store.get(old.id, "kiosk")).state is JobState.RUNNING


async def test_a_renewed_lease_keeps_the_job(
    database: RedisClient, config: JobsConfig, clock: Clock, new_job: MakeJob
) -> None:
    store = JobStore(database, msgspec.structs.replace(config, lease_s=600.0))
    await store.accept(new_job())
    (held,) = (await store.claim("first", "large", ["standard"])).records
    assert await store.renew_leases([(held.id, held.fence)], renew=True) == LeaseStates()
    assert (await store.claim("second", "large", ["standard"])).records == ()


async def test_a_job_without_attempts_is_a_dead_letter_that_can_be_retried(
    store: JobStore, new_job: MakeJob, config: JobsConfig, database: RedisClient
) -> None:
    await store.accept(new_job())
    for _ in range(config.max_attempts):
        (record,) = (await store.claim("w", "large", ["standard"])).records
        assert await store.postpone(record.id, record.fence, FAULT, 0.0, counts=True)
        await store.promote_and_expire()
    assert (await store.get(record.id, "kiosk")).state is JobState.DEAD
    assert await database.command("HGET", database.key("job", record.id), "body") == BODY  # kept for a retry
    (letter,) = await store.dead_letters()
    assert (letter.id, letter.attempts, letter.code) == (record.id, config.max_attempts, "cloud_failed")
    assert await store.retry(record.id)
    assert await store.dead_letters() == []
    (again,) = (await store.claim("w", "large", ["standard"])).records
    assert (again.id, again.attempts, again.fence) == (record.id, 1, config.max_attempts + 1)
    assert await store.succeed(again.id, again.fence, b"{}")
    assert not await store.retry(record.id)
    assert not await store.purge(record.id)


async def test_purge_deletes_a_dead_letter_and_its_idempotency_key(
    database: RedisClient, config: JobsConfig, clock: Clock, new_job: MakeJob
) -> None:
    store = JobStore(database, msgspec.structs.replace(config, max_attempts=1))
    await store.accept(new_job(idempotency="k", digest="d"))
    (record,) = (await store.claim("w", "large", ["standard"])).records
    await store.postpone(record.id, record.fence, FAULT, 0, counts=True)
    assert await store.purge(record.id)
    assert await store.dead_letters() == []
    assert await store.lookup(record.id) is None
    assert not (await store.accept(new_job(idempotency="k", digest="d"))).known


async def test_a_job_that_kills_its_workers_becomes_a_dead_letter(
    database: RedisClient, config: JobsConfig, clock: Clock, new_job: MakeJob
) -> None:
    store = JobStore(database, msgspec.structs.replace(config, max_attempts=2, lease_s=0.001))
    await store.accept(new_job())
    claims: list[str] = []

    async def buried() -> bool:
        await store.promote_and_expire()
        claims.extend(record.id for record in (await store.claim("w", "large", ["standard"])).records)
        return bool(await store.dead_letters()) or len(claims) > 2

    await until(buried)
    assert len(claims) == 2


async def test_a_run_that_never_started_uses_no_attempt(store: JobStore, new_job: MakeJob, config: JobsConfig) -> None:
    await store.accept(new_job())
    for _ in range(config.max_attempts + 3):
        (record,) = (await store.claim("w", "large", ["standard"])).records
        await store.postpone(record.id, record.fence, FAULT, 0.0, counts=False)
        await store.promote_and_expire()
    assert (await store.get(record.id, "kiosk")).state is JobState.QUEUED


async def test_a_postponed_job_is_queued_when_due(store: JobStore, new_job: MakeJob, clock: Clock) -> None:
    await store.accept(new_job())
    (record,) = (await store.claim("w", "large", ["standard"])).records
    await store.postpone(record.id, record.fence, FAULT, 1.0, counts=True)
    assert (await store.promote_and_expire()).changed == 0
    clock.now += 1.0
    assert (await store.promote_and_expire()).changed == 1
    assert (await store.claim("w", "large", ["standard"])).records[0].id == record.id


@pytest.mark.parametrize("state", ["queued", "running", "waiting"])
async def test_a_job_expires_at_its_deadline_in_any_state(
    store: JobStore, new_job: MakeJob, clock: Clock, state: str
) -> None:
    accepted = await store.accept(new_job())
    if state != "queued":
        (record,) = (await store.claim("w", "large", ["standard"])).records
        if state == "waiting":
            await store.postpone(record.id, record.fence, FAULT, 1e6, counts=True)
    clock.now += 3600.0
    assert (await store.promote_and_expire()).changed == 1
    assert (await store.get(accepted.id, "kiosk")).state is JobState.EXPIRED
    assert (await store.claim("w", "large", ["standard"])).records == ()
    if state == "running":
        assert await store.renew_leases([(record.id, record.fence)], renew=False) == LeaseStates(frozenset({record.id}))


@pytest.mark.parametrize("claimed", [False, True])
async def test_a_result_after_cancel_is_refused(store: JobStore, new_job: MakeJob, claimed: bool) -> None:
    """Cancelling twice is no error."""
    accepted = await store.accept(new_job())
    held = (await store.claim("w", "large", ["standard"])).records if claimed else ()
    await store.cancel(accepted.id, "kiosk")
    await store.cancel(accepted.id, "kiosk")
    for record in held:
        assert not await store.succeed(record.id, record.fence, b"{}")
    assert (await store.get(accepted.id, "kiosk")).state is JobState.CANCELLED
    assert (await store.claim("w", "large", ["standard"])).records == ()


async def test_a_job_that_ended_cannot_be_cancelled(store: JobStore, new_job: MakeJob) -> None:
    accepted = await store.accept(new_job())
    (record,) = (await store.claim("w", "large", ["standard"])).records
    await store.succeed(record.id, record.fence, b"{}")
    with pytest.raises(JobAlreadyEnded):
        await store.cancel(accepted.id, "kiosk")


async def test_a_released_job_is_claimed_at_once_without_losing_an_attempt(store: JobStore, new_job: MakeJob) -> None:
    await store.accept(new_job())
    (record,) = (await store.claim("w", "large", ["standard"])).records
    assert await store.release(record.id, record.fence)
    (again,) = (await store.claim("w2", "large", ["standard"])).records
    assert (again.attempts, again.fence > record.fence) == (1, True)


async def test_slots_of_an_empty_priority_go_to_others(store: JobStore, new_job: MakeJob) -> None:
    """And no priority gets more than its slots while others wait."""
    for priority in ("bulk", "bulk", "interactive", "standard"):
        await store.accept(new_job(priority=priority))
    claimed = await store.claim("w", "large", ["bulk", "interactive", "interactive"])
    assert [record.priority for record in claimed.records] == ["bulk", "interactive", "standard"]
    assert (await store.claim("w", "other", ["bulk"])).records == ()


async def test_keys_of_an_ended_job_expire(store: JobStore, database: RedisClient, new_job: MakeJob) -> None:
    accepted = await store.accept(new_job(idempotency="k", digest="d"))
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
    assert (
        await database.command("HGET", database.key("job", accepted.id), "body") is None
    )  # deleted at the end, unlike the record
    assert await database.command("ZCARD", database.key("open", "kiosk")) == 0
    assert await database.command("ZCARD", database.key("deadlines")) == 0
    assert await database.command("ZCARD", database.key("leases", "large", "standard")) == 0


async def test_jobs_are_listed_in_pages_without_expired_ones(
    store: JobStore, new_job: MakeJob, clock: Clock, database: RedisClient
) -> None:
    names = []
    for _ in range(5):
        clock.now += 1
        names.append((await store.accept(new_job())).id)
    await database.command("DEL", database.key("job", names[3]))
    first = [record.id for record in await store.list_owned("kiosk", limit=2)]
    assert first == [names[4], names[2]]
    assert [record.id for record in await store.list_owned("kiosk", after=first[-1], limit=9)] == [names[1], names[0]]
    with pytest.raises(NotFound):
        await store.list_owned("kiosk", after="job_nowhere")


async def test_each_transition_appends_an_event(store: JobStore, database: RedisClient, new_job: MakeJob) -> None:
    accepted = await store.accept(new_job())
    (record,) = (await store.claim("w", "large", ["standard"])).records
    await store.publish_progress(record.id, record.fence, b'{"tokens":3}')
    await store.succeed(record.id, record.fence, b"{}")
    entries = as_list(await database.command("XRANGE", database.key("events", accepted.id), "-", "+"))
    assert [as_list(as_list(entry)[1])[1] for entry in entries] == [b"queued", b"running", b"progress", b"succeeded"]
    assert JobState(as_text(as_list(as_list(entries[-1])[1])[1])) in FINAL_STATES


async def test_an_unreachable_redis_is_a_503(config: JobsConfig, clock: Clock, new_job: MakeJob) -> None:
    """The message holds nothing of the request."""
    database = RedisClient(
        JobsConfig(redis="unix:///nonexistent/redis.sock", key_prefix=config.key_prefix), SCRIPTS, clock=clock
    )
    with pytest.raises(JobStoreUnavailable) as caught:
        await JobStore(database, config).accept(new_job())
    assert caught.value.status == 503
    assert "secret" not in caught.value.message
    await database.close()
