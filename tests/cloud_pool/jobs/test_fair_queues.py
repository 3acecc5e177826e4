"""Queues of many tenants on a real Redis: no tenant waits for another's backlog, or is refused because of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

import anyio
import msgspec
import pytest

from causeway_server.cloud_pool.accounts.tenants.config import TenantLimits
from causeway_server.cloud_pool.jobs.worker.runner import JobRun
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.storage.job_store import JobStore
from causeway_server.cloud_pool.storage.record import NewJob
from causeway_server.cloud_pool.storage.redis_client import RedisClient, as_int
from causeway_server.router.errors import CloudFailed, QueueFull, RateLimited
from causeway_server.router.types import Chunk

from .conftest import BODY, Clock, until
from .scripted_worker import RunningWorker, ScriptedRunner, answers

MakeJob = Callable[..., NewJob]
BACKLOG = 2_000
SLOTS = 4
QUIET = 10


async def fill(store: JobStore, new_job: MakeJob, count: int, **changes: object) -> None:
    jobs = iter([new_job(**changes) for _ in range(count)])

    async def accept_some() -> None:
        for job in jobs:
            await store.accept(job)

    async with anyio.create_task_group() as tasks:
        for _ in range(32):
            tasks.start_soon(accept_some)


class Rounds:
    """Runs that last until the test ends the round: all that run then end."""

    def __init__(self) -> None:
        self.runner = ScriptedRunner(self._script)
        self._over = anyio.Event()

    async def _script(self, at: int, job_run: JobRun) -> AsyncGenerator[Chunk, None]:
        await self._over.wait()
        async for chunk in answers(at, job_run):
            yield chunk

    async def end(self) -> None:
        """End the round, when all slots are busy, and wait until all are busy again."""
        started = len(self.runner.runs) + SLOTS
        over, self._over = self._over, anyio.Event()
        over.set()

        async def busy_again() -> bool:
            return len(self.runner.runs) >= started

        await until(busy_again)


@pytest.mark.slow
async def test_a_backlog_delays_another_tenants_jobs_by_one_service_time(
    store: JobStore, new_job: MakeJob, config: JobsConfig
) -> None:
    """Its jobs run in the rounds that they would take alone, after the one that had begun."""
    await fill(store, new_job, BACKLOG, owner="flood/1")
    rounds = Rounds()
    config = msgspec.structs.replace(config, drain_s=0.0)
    async with RunningWorker(store, rounds.runner, config, slots=SLOTS):

        async def busy() -> bool:
            return len(rounds.runner.runs) == SLOTS

        await until(busy)
        for _ in range(3):  # the flood uses the capacity alone for a while
            await rounds.end()
        before = len(rounds.runner.runs)
        await fill(store, new_job, QUIET, owner="quiet/1")
        for _ in range(-(-QUIET // SLOTS)):
            await rounds.end()
    owners = [one.record.owner for one in rounds.runner.runs[before:]]
    assert owners.count("quiet/1") == QUIET
    assert owners[:QUIET] == ["quiet/1"] * QUIET


async def shares(store: JobStore, claims: int) -> dict[str, int]:
    """Return how many of `claims` jobs were each tenant's."""
    counts: dict[str, int] = {}
    for _ in range(claims):
        (record,) = (await store.claim("w", "large", ["standard"])).records
        await store.succeed(record.id, record.fence, b"{}")
        tenant = record.owner.partition("/")[0]
        counts[tenant] = counts.get(tenant, 0) + 1
    return counts


async def test_backlogs_share_by_weight_and_tokens(store: JobStore, new_job: MakeJob) -> None:
    """Weight 3 gets three times as much; jobs of half the tokens run twice as often. Devices of a tenant share."""
    for number in range(120):
        await store.accept(new_job(owner=f"plain/{number % 7}", tokens=100.0))
        await store.accept(new_job(owner="heavy/1", tokens=100.0), TenantLimits(weight=3.0))
        await store.accept(new_job(owner="short/1", tokens=50.0))
    await shares(store, 60)  # credits of new tenants, which are in jobs, are used up
    counts = await shares(store, 120)
    assert counts["plain"] == pytest.approx(20, abs=2)
    assert counts["heavy"] == pytest.approx(60, abs=2)
    assert counts["short"] == pytest.approx(40, abs=2)


async def test_a_tenant_that_comes_again_and_again_gets_no_more_than_its_share(
    store: JobStore, new_job: MakeJob
) -> None:
    """A pause renews no credit before other tenants had as much."""
    for _ in range(100):
        await store.accept(new_job(owner="backlog/1"))
    await shares(store, 1)
    counts = {"backlog": 0, "returning": 0}
    for _ in range(80):  # its queue is empty after each of its runs
        await store.accept(new_job(owner="returning/1"))
        (tenant,) = await shares(store, 1)
        counts[tenant] += 1
        if tenant == "backlog":
            await shares(store, 1)
    credit = 16
    assert counts["backlog"] >= (80 - credit) / 2 - 1


async def test_a_tenants_jobs_run_in_order_of_acceptance_also_after_a_retry(
    store: JobStore, new_job: MakeJob, clock: Clock
) -> None:
    jobs = [(await store.accept(new_job(owner="acme/1"))).id for _ in range(12)]
    (first,) = (await store.claim("w", "large", ["standard"])).records
    await store.postpone(first.id, first.fence, CloudFailed("broken"), 1.0, counts=True)
    clock.now += 1.0
    await store.promote_and_expire()
    claimed = (await store.claim("w", "large", ["standard"] * 20)).records
    assert [record.id for record in claimed] == jobs


async def test_a_full_queue_takes_jobs_of_tenants_with_few(
    database: RedisClient, config: JobsConfig, clock: Clock, new_job: MakeJob
) -> None:
    limits = {"max_queued": 20, "min_queued_per_tenant": 5}
    store = JobStore(database, msgspec.structs.replace(config, **limits))
    for _ in range(20):
        await store.accept(new_job(owner="flood/1"))
    with pytest.raises(QueueFull, match=r"jobs\.max_queued") as caught:
        await store.accept(new_job(id="job_refused", owner="flood/2"))
    assert caught.value.retry_after_s
    assert await store.lookup("job_refused") is None
    for _ in range(5):
        await store.accept(new_job(owner="quiet/1"))
    with pytest.raises(QueueFull, match=r"jobs\.min_queued_per_tenant"):
        await store.accept(new_job(owner="quiet/1"))
    await store.accept(new_job(owner="flood/1", priority="bulk"))  # a queue of its own


@pytest.mark.parametrize("ends", ["cancelled", "succeeded", "dead"])
async def test_a_tenants_unfinished_jobs_are_bounded_by_number_and_bytes(
    database: RedisClient, config: JobsConfig, clock: Clock, new_job: MakeJob, ends: str
) -> None:
    """Whichever device sends them, and until they end."""
    bounds = {"max_unfinished": 2, "max_unfinished_bytes": 3 * len(BODY), "max_attempts": 1}
    store = JobStore(database, msgspec.structs.replace(config, **bounds))
    first = await store.accept(new_job(owner="acme/1"))
    await store.accept(new_job(owner="acme/2"))
    with pytest.raises(RateLimited, match=r"2 unfinished jobs.*jobs\.max_unfinished") as caught:
        await store.accept(new_job(owner="acme/3"))
    assert caught.value.retry_after_s
    more = TenantLimits(max_jobs=5)
    await store.accept(new_job(owner="acme/3"), more)
    with pytest.raises(RateLimited, match=r"jobs\.max_unfinished_bytes"):
        await store.accept(new_job(owner="acme/3"), more)
    await store.accept(new_job(owner="other/1"))
    if ends == "cancelled":
        await store.cancel(first.id, "acme/1")
    else:
        (record,) = (await store.claim("w", "large", ["standard"])).records
        if ends == "succeeded":
            await store.succeed(record.id, record.fence, b"{}")
        else:
            await store.postpone(record.id, record.fence, CloudFailed("broken"), 0.0, counts=True)
    await store.accept(new_job(owner="acme/3"), more)
    if ends == "dead":
        assert await store.retry(record.id)
        with pytest.raises(RateLimited, match="unfinished jobs"):
            await store.accept(new_job(owner="acme/3"), TenantLimits(max_jobs=4))


async def test_keys_of_queues_go_with_their_jobs(store: JobStore, new_job: MakeJob, database: RedisClient) -> None:
    for number in range(50):
        await store.accept(new_job(owner=f"tenant{number}/1"))
    for record in (await store.claim("w", "large", ["standard"] * 50)).records:
        await store.succeed(record.id, record.fence, b"{}")
    await store.claim("w", "large", ["standard"])
    queue = ("large", "standard")
    for name in (
        ("turns", *queue),
        ("leases", *queue),
        ("queue", *queue, "tenant7"),
        ("open_bytes",),
        ("wake", "large"),
    ):
        assert await database.command("EXISTS", database.key(*name)) == 0, name
    assert as_int(await database.command("PTTL", database.key("tags", *queue))) > 0


async def test_an_accepted_job_wakes_one_waiting_worker(store: JobStore, new_job: MakeJob) -> None:
    """Each of three waiting workers, for three jobs."""
    woken: list[int] = []

    async def wait(number: int) -> None:
        while not (await store.claim(f"w{number}", "large", ["standard"])).records:
            await store.wait("large")
        woken.append(number)

    async with anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(wait, number)
        for _ in range(3):
            await store.accept(new_job())
    assert sorted(woken) == [0, 1, 2]
