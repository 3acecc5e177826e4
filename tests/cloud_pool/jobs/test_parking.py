"""Jobs of a tenant over its rate or budget, on a real Redis: they wait for the reset and cost no work until then."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

import pytest

from causeway_server.cloud_pool.jobs.worker.runner import JobRun
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.storage.job_store import JobStore
from causeway_server.cloud_pool.storage.record import NewJob
from causeway_server.cloud_pool.storage.redis_client import RedisClient, as_list, as_text
from causeway_server.router.errors import QueueFull, RateLimited
from causeway_server.router.jobs.job import JobState
from causeway_server.router.types import Chunk

from .conftest import Clock, until
from .scripted_worker import RunningWorker, ScriptedRunner, answers

MakeJob = Callable[..., NewJob]
JOBS = 250
SLOTS = 4
RESET_S = 3000.0


class Budget:
    """A tenant's budget, spent at first."""

    spent = True

    async def script(self, at: int, job_run: JobRun) -> AsyncGenerator[Chunk, None]:
        if self.spent and job_run.record.owner.startswith("acme/"):
            raise RateLimited("Your budget is spent.", retry_after_s=RESET_S)
        async for chunk in answers(at, job_run):
            yield chunk


async def park(store: JobStore, delay_s: float = RESET_S) -> str:
    """Refuse the next job for its tenant's limit. Returns its id."""
    (record,) = (await store.claim("w", "large", ["standard"])).records
    error = RateLimited("spent", retry_after_s=delay_s)
    assert await store.postpone(record.id, record.fence, error, delay_s, counts=False, park=True)
    return record.id


async def commands(database: RedisClient) -> int:
    """Return how many commands this Redis has run, those of scripts included."""
    stats = as_text(await database.command("INFO", "stats"))
    return int(stats.split("total_commands_processed:")[1].split()[0])


async def test_jobs_over_a_budget_wait_for_its_reset_without_runs(
    store: JobStore, new_job: MakeJob, config: JobsConfig, clock: Clock, database: RedisClient
) -> None:
    """The gauge of queued jobs, by which workers are scaled, does not count them."""
    parked = [(await store.accept(new_job(owner=f"acme/{number % 3}"))).id for number in range(JOBS)]
    other = (await store.accept(new_job())).id
    budget = Budget()
    runner = ScriptedRunner(budget.script)

    async def all_parked() -> bool:
        return (await store.depths()).parked == JOBS

    async def state_is(job: str, state: JobState) -> bool:
        record = await store.lookup(job)
        return record is not None and record.state is state

    async with RunningWorker(store, runner, config, slots=SLOTS):
        await until(lambda: state_is(other, JobState.SUCCEEDED))
        await until(all_parked)
        assert [(depth.queued, depth.oldest_ms) for depth in (await store.depths()).queues] == [(0, 0)]
        runs = len(runner.runs)
        assert runs <= 1 + SLOTS
        late = (await store.accept(new_job(owner="acme/9"))).id
        another = (await store.accept(new_job())).id
        await until(lambda: state_is(another, JobState.SUCCEEDED))
        assert len(runner.runs) == runs + 1
        await store.cancel(late, "acme/9")
        budget.spent = False
        clock.now += RESET_S + 1.0
        for job in parked:
            await until(lambda job=job: state_is(job, JobState.SUCCEEDED))  # type: ignore[misc]
    assert len(runner.runs) == runs + 1 + JOBS
    for name in ("blocked", "trials"):
        assert await database.command("EXISTS", database.key(name)) == 0


async def test_parked_jobs_cost_no_commands(
    store: JobStore, new_job: MakeJob, config: JobsConfig, database: RedisClient
) -> None:
    """Neither claims, nor upkeep, nor metrics, nor a reset cost more with 300 parked jobs than with one."""
    costs = []
    await store.accept(new_job(owner="acme/1"))
    for more in (0, 299):
        for _ in range(more):
            await store.accept(new_job(owner="acme/1"))
        if not more:
            await park(store)
        before = await commands(database)
        await store.claim("w", "large", ["standard"] * SLOTS)
        await store.promote_and_expire()
        await store.depths()
        costs.append(await commands(database) - before)
    assert costs[0] == costs[1]


async def test_a_worker_that_starts_lets_parked_jobs_try_again(
    store: JobStore, new_job: MakeJob, config: JobsConfig
) -> None:
    """Limits may have changed."""
    job = (await store.accept(new_job(owner="acme/1"))).id
    assert await park(store) == job

    async def succeeded() -> bool:
        return (await store.get(job, "acme/1")).state is JobState.SUCCEEDED

    async with RunningWorker(store, ScriptedRunner(), config):
        await until(succeeded)


async def test_a_raised_budget_is_noticed_within_limit_retry_s(
    store: JobStore, new_job: MakeJob, config: JobsConfig, clock: Clock
) -> None:
    """Although the reset is much later: a worker with the new limits may run beside one that still has the old ones."""
    jobs = [(await store.accept(new_job(owner="acme/1"))).id for _ in range(JOBS)]
    budget = Budget()
    runner = ScriptedRunner(budget.script)

    async def all_parked() -> bool:
        return (await store.depths()).parked == JOBS

    async def all_ended() -> bool:
        return all([(await store.get(job, "acme/1")).ended for job in jobs])

    async with RunningWorker(store, runner, config, slots=SLOTS):
        await until(all_parked)
        budget.spent = False
        clock.now += config.limit_retry_s + 1.0
        await until(all_ended)


async def test_after_a_reset_one_job_of_the_tenant_starts_at_a_time(
    store: JobStore, new_job: MakeJob, clock: Clock
) -> None:
    """Its limit may still be reached. Five seconds later it is a tenant like any other."""

    async def claimed() -> list[str]:
        return sorted(record.owner for record in (await store.claim("w", "large", ["standard"] * SLOTS)).records)

    for _ in range(20):
        await store.accept(new_job(owner="acme/1"))
    await park(store, 10.0)
    clock.now += 10.0
    await store.promote_and_expire()
    assert await claimed() == ["acme/1"]
    await store.accept(new_job())
    assert await claimed() == ["kiosk"]
    await store.promote_and_expire()
    assert await claimed() == ["acme/1"]
    clock.now += 6.0
    await store.promote_and_expire()
    assert await claimed() == ["acme/1"] * SLOTS


async def test_a_rate_that_resets_soon_is_used_at_once(store: JobStore, new_job: MakeJob, clock: Clock) -> None:
    for _ in range(20):
        await store.accept(new_job(owner="acme/1"))
    await park(store, 0.5)
    clock.now += 0.5
    await store.promote_and_expire()
    assert len((await store.claim("w", "large", ["standard"] * SLOTS)).records) == SLOTS


@pytest.mark.parametrize("state", ["parked", "queued", "waiting", "running"])
async def test_a_job_that_expires_without_running_is_reported_for_audit(
    store: JobStore, new_job: MakeJob, config: JobsConfig, clock: Clock, database: RedisClient, state: str
) -> None:
    """It has its event, too. A run that is cut off writes its own record."""
    job = (await store.accept(new_job(owner="acme/1"))).id
    if state == "parked":
        await park(store)
    elif state != "queued":
        (record,) = (await store.claim("w", "large", ["standard"])).records
        if state == "waiting":
            await store.postpone(job, record.fence, QueueFull("full"), 1e6, counts=False)
    clock.now += 3600.0
    due = await store.promote_and_expire()
    assert due.changed == 1
    expected = [] if state == "running" else [(job, "acme/1", "large")]
    assert [(one.id, one.owner, one.tier) for one in due.expired] == expected
    assert (await names(database, job))[-1] == "expired"


async def test_a_worker_records_expired_jobs(
    store: JobStore, new_job: MakeJob, config: JobsConfig, clock: Clock
) -> None:
    jobs = [(await store.accept(new_job(owner="acme/1"))).id for _ in range(JOBS)]
    runner = ScriptedRunner(Budget().script)

    async def all_parked() -> bool:
        return (await store.depths()).parked == JOBS

    async def all_recorded() -> bool:
        return len(runner.expired) >= JOBS

    async with RunningWorker(store, runner, config, slots=SLOTS) as worker:
        await until(all_parked)
        clock.now += 3600.0
        await until(all_recorded)
    assert sorted(one.id for one in runner.expired) == sorted(jobs)
    assert worker.count("expired") == JOBS


async def names(database: RedisClient, job: str) -> list[str]:
    entries = as_list(await database.command("XRANGE", database.key("events", job), "-", "+"))
    return [as_text(as_list(as_list(entry)[1])[1]) for entry in entries]


@pytest.mark.parametrize("error", [QueueFull("full"), RateLimited("spent", retry_after_s=1.0)])
async def test_repeated_events_are_merged(
    store: JobStore, new_job: MakeJob, clock: Clock, database: RedisClient, error: RateLimited | QueueFull
) -> None:
    job = (await store.accept(new_job())).id
    park = isinstance(error, RateLimited)
    for _ in range(50):
        (record,) = (await store.claim("w", "large", ["standard"])).records
        await store.postpone(job, record.fence, error, 1.0, counts=False, park=park)
        clock.now += 2.0
        await store.promote_and_expire()
    (record,) = (await store.claim("w", "large", ["standard"])).records
    for tokens in range(50):
        await store.publish_progress(job, record.fence, b"%d" % tokens)
    await store.succeed(job, record.fence, b"{}")
    waits = [] if park else ["running", "waiting", "queued"]
    assert await names(database, job) == ["queued", *waits, "running", "progress", "succeeded"]
    entries = as_list(await database.command("XREVRANGE", database.key("events", job), "+", "-", "COUNT", 2))
    assert as_list(as_list(entries[1])[1])[3] == b"49"
