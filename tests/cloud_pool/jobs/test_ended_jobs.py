"""Ended jobs of a tenant are bounded in number and bytes: a flood forgets its own, and no other tenant's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import msgspec
import pytest
import pytest_asyncio

from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.storage.job_store import JobStore
from causeway_server.cloud_pool.storage.record import JobRecord, NewJob
from causeway_server.cloud_pool.storage.redis_client import RedisClient
from causeway_server.cloud_pool.storage.stores import JobStores
from causeway_server.router.errors import CloudFailed, NotFound

from .conftest import Clock

MakeJob = Callable[..., NewJob]
MOST = 8
FAULT = CloudFailed("the model failed")


@pytest_asyncio.fixture
async def small(config: JobsConfig, clock: Clock) -> AsyncIterator[JobStores]:
    """Eight ended jobs of each tenant, or about 20 kB."""
    stores = JobStores.open(msgspec.structs.replace(config, max_ended=MOST, max_ended_bytes=20_000), clock)
    yield stores
    await stores.close()


async def keys(database: RedisClient) -> set[str]:
    found = await database.command("KEYS", database.key("*"))
    assert isinstance(found, list)
    return {str(name, "utf-8") for name in found if isinstance(name, bytes)}


async def cancelled(store: JobStore, job: NewJob) -> str:
    await store.accept(job)
    await store.cancel(job.id, job.owner)
    return job.id


async def run(store: JobStore, job: NewJob) -> JobRecord:
    await store.accept(job)
    return (await store.claim("w", job.tier, [job.priority])).records[0]


async def exists(store: JobStore, job: str, owner: str) -> bool:
    try:
        await store.get(job, owner)
    except NotFound:
        return False
    return True


async def test_submissions_that_are_cancelled_leave_no_more_keys(small: JobStores, new_job: MakeJob) -> None:
    store = small.jobs
    quiet = await cancelled(store, new_job(owner="quiet/1", idempotency="k", digest="d"))
    counts = []
    for number in range(6 * MOST):
        await cancelled(store, new_job(owner=f"flood/{number % 3}", idempotency=f"k{number}", digest="d"))
        counts.append(len(await keys(small.database)))
    assert max(counts[2 * MOST :]) == max(counts[: 2 * MOST])
    assert await exists(store, quiet, "quiet/1")
    assert (await store.accept(new_job(owner="quiet/1", idempotency="k", digest="d"))).known
    assert len(await store.list_owned("flood/0", limit=50)) <= MOST


async def test_answers_are_bounded_in_bytes(small: JobStores, new_job: MakeJob) -> None:
    """The oldest goes, with its answer."""
    store, jobs = small.jobs, []
    for _ in range(5):
        record = await run(store, new_job(owner="flood/1"))
        await store.succeed(record.id, record.fence, b"x" * 8000)
        jobs.append(record.id)
    assert [await exists(store, job, "flood/1") for job in jobs] == [False, False, False, True, True]
    assert await store.read_result(jobs[0], "flood/1") == b""


async def test_jobs_that_never_ran_go_first_and_are_kept_for_minutes(
    small: JobStores, new_job: MakeJob, clock: Clock
) -> None:
    store, database = small.jobs, small.database
    record = await run(store, new_job(owner="one/1"))
    await store.fail(record.id, record.fence, FAULT)
    never_ran = await cancelled(store, new_job(owner="one/1"))
    expired = new_job(owner="one/1", deadline_ms=int(clock.now * 1000) + 1)
    await store.accept(expired)
    clock.now += 1.0
    await store.promote_and_expire()
    for job in (never_ran, expired.id):
        assert 0 < int(str(await database.command("PTTL", database.key("job", job)))) <= 600_000
    assert int(str(await database.command("PTTL", database.key("job", record.id)))) > 600_000
    for _ in range(3 * MOST):
        await cancelled(store, new_job(owner="one/1"))
    assert await exists(store, record.id, "one/1")
    assert not await exists(store, never_ran, "one/1")


async def test_expired_records_do_not_count(small: JobStores, new_job: MakeJob, clock: Clock) -> None:
    store, database = small.jobs, small.database
    for _ in range(MOST - 1):
        await cancelled(store, new_job(owner="one/1"))
    clock.now += 601.0
    await store.accept(new_job(owner="one/1"))
    assert await database.command("EXISTS", database.key("ended", "one"), database.key("ended_bytes", "one")) == 0


async def test_deliveries_of_forgotten_jobs_are_forgotten(small: JobStores, new_job: MakeJob) -> None:
    """A receiver that never answers: no delivery of the flood outlives its job."""
    for _ in range(4 * MOST):
        await cancelled(small.jobs, new_job(owner="flood/1", webhook="https://example.com/hook"))
    assert (await small.jobs.depths()).pending_deliveries <= MOST
    assert len([key for key in await keys(small.database) if ":webhook:" in key]) <= MOST


@pytest.mark.parametrize("ends", ["purged", "erased", "retried"])
async def test_dead_letter_that_leaves_is_not_counted(small: JobStores, new_job: MakeJob, ends: str) -> None:
    """One that runs again is not forgotten while it does."""
    store, database = small.jobs, small.database
    record = await run(store, new_job(owner="one/1"))
    for _ in range(5):
        await store.postpone(record.id, record.fence, FAULT, 0.0, counts=True)
        await store.promote_and_expire()
        claimed = (await store.claim("w", "large", ["standard"])).records
        record = claimed[0] if claimed else record
    assert (await store.get(record.id, "one/1")).state.value == "dead"
    if ends == "purged":
        assert await store.purge(record.id)
    elif ends == "erased":
        await database.run("erase_job", record.id)
    else:
        assert await store.retry(record.id)
    assert await database.command("EXISTS", database.key("ended", "one"), database.key("ended_bytes", "one")) == 0
    for _ in range(3 * MOST):
        await cancelled(store, new_job(owner="one/1"))
    assert await exists(store, record.id, "one/1") is (ends == "retried")
