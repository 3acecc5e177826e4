"""Jobs of a tenant over its rate or budget, on a real Redis: they wait for the reset and cost no work until then."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

import pytest

from cloud_pool.jobs.config import JobsConfig
from cloud_pool.jobs.record import NewJob
from cloud_pool.jobs.states import JobState
from cloud_pool.jobs.store.job_store import JobStore
from cloud_pool.jobs.store.redis_client import RedisClient, as_list
from cloud_pool.jobs.worker.runner import JobRun
from router.errors import QueueFull, RateLimited
from router.types import Chunk

from .conftest import Clock, until
from .scripted_worker import RunningWorker, ScriptedRunner, answers

MakeJob = Callable[..., NewJob]
JOBS = 250  # more than one claim parks
SLOTS = 4


class Budget:
    """A tenant's budget, spent at first."""

    spent = True

    async def script(self, at: int, job_run: JobRun) -> AsyncGenerator[Chunk, None]:
        if self.spent and job_run.owner.startswith("acme/"):
            raise RateLimited("Your budget is spent.", retry_after_s=3000.0)
        async for chunk in answers(at, job_run):
            yield chunk


async def test_jobs_over_a_budget_wait_for_its_reset_without_runs(
    store: JobStore, new_job: MakeJob, config: JobsConfig, clock: Clock, database: RedisClient
) -> None:
    parked = [(await store.accept(new_job(owner=f"acme/{number % 3}"))).id for number in range(JOBS)]
    other = (await store.accept(new_job())).id
    budget = Budget()
    runner = ScriptedRunner(budget.script)

    async def all_parked() -> bool:
        return (await store.depths()).waiting == JOBS

    async def state_is(job: str, state: JobState) -> bool:
        record = await store.lookup(job)
        return record is not None and record.state is state

    async with RunningWorker(store, runner, config, slots=SLOTS):
        await until(lambda: state_is(other, JobState.SUCCEEDED))
        await until(all_parked)
        runs = len(runner.runs)
        assert runs <= 1 + SLOTS
        late = (await store.accept(new_job(owner="acme/9"))).id
        await until(lambda: state_is(late, JobState.WAITING))
        await store.cancel(late, "acme/9")
        assert len(runner.runs) == runs
        budget.spent = False
        clock.now += 3001.0

        async def all_done() -> bool:
            clock.now += 1.0
            return len(runner.runs) == runs + JOBS

        await until(all_done)
        for job in parked:
            await until(lambda job=job: state_is(job, JobState.SUCCEEDED))  # type: ignore[misc]
    for name in ("parked", "blocked"):
        assert await database.command("EXISTS", database.key(name)) == 0


async def test_a_worker_that_starts_lets_parked_jobs_try_again(
    store: JobStore, new_job: MakeJob, config: JobsConfig
) -> None:
    """Limits may have changed."""
    job = (await store.accept(new_job(owner="acme/1"))).id
    (record,) = (await store.claim("w", "large", ["standard"])).records
    await store.postpone(job, record.fence, RateLimited("spent", retry_after_s=3000.0), 3000.0, counts=False, park=True)

    async def succeeded() -> bool:
        return (await store.get(job, "acme/1")).state is JobState.SUCCEEDED

    async with RunningWorker(store, ScriptedRunner(), config):
        await until(succeeded)


@pytest.mark.parametrize("error", [QueueFull("full"), RateLimited("spent", retry_after_s=1.0)])
async def test_repeated_events_are_merged(
    store: JobStore, new_job: MakeJob, clock: Clock, database: RedisClient, error: RateLimited | QueueFull
) -> None:
    job = (await store.accept(new_job())).id
    for _ in range(50):
        (record,) = (await store.claim("w", "large", ["standard"])).records
        park = isinstance(error, RateLimited)
        await store.postpone(job, record.fence, error, 1.0, counts=False, park=park)
        clock.now += 2.0
        await store.promote_and_expire()
    (record,) = (await store.claim("w", "large", ["standard"])).records
    for tokens in range(50):
        await store.publish_progress(job, record.fence, b"%d" % tokens)
    await store.succeed(job, record.fence, b"{}")
    entries = [
        as_list(as_list(entry)[1])
        for entry in as_list(await database.command("XRANGE", database.key("events", job), "-", "+"))
    ]
    names = [entry[1] for entry in entries]
    assert names == [b"queued", b"running", b"waiting", b"queued", b"running", b"progress", b"succeeded"]
    assert entries[5][3] == b"49"
