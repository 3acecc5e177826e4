"""A worker on a real Redis, with a runner that does what the test says."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable

import anyio
import msgspec
import pytest
from prometheus_client import CollectorRegistry

from cloud_pool.admission import Priority
from cloud_pool.jobs.config import JobsConfig
from cloud_pool.jobs.errors import JobStoreUnavailable
from cloud_pool.jobs.metrics import JobMetrics
from cloud_pool.jobs.record import NewJob
from cloud_pool.jobs.states import JobState
from cloud_pool.jobs.store.job_store import ClaimedJobs, JobStore
from cloud_pool.jobs.store.redis_client import RedisClient
from cloud_pool.jobs.worker.runner import JobRun
from cloud_pool.jobs.worker.worker import Worker
from router.errors import CausewayError, CloudFailed, CloudUnreachable, ContextLengthExceeded, QueueFull
from router.types import Chunk

from .conftest import Clock, until
from .scripted_worker import Scripted, Shift, answers

MakeOffer = Callable[..., NewJob]


def reached(store: JobStore, job: str, state: JobState) -> Callable[[], Awaitable[bool]]:
    async def is_so() -> bool:
        return (await store.get(job, "kiosk")).state is state

    return is_so


async def hangs(_at: int, _errand: JobRun) -> AsyncGenerator[Chunk, None]:
    await anyio.sleep_forever()
    yield Chunk()


def fails(error: Exception, times: int = 10**9) -> Callable[[int, JobRun], AsyncGenerator[Chunk, None]]:
    async def act(at: int, job_run: JobRun) -> AsyncGenerator[Chunk, None]:
        if at < times:
            raise error
        async for chunk in answers(at, job_run):
            yield chunk

    return act


@pytest.fixture
def ticking(config: JobsConfig, database, clock: Clock) -> JobStore:  # type: ignore[no-untyped-def]
    """A store whose wall clock goes on by a second with each look: what is postponed becomes due."""

    def tick() -> float:
        clock.now += 1.0
        return clock.now

    return JobStore(database, msgspec.structs.replace(config, default_deadline_s=1e6), clock=tick)


async def test_a_job_is_answered(store: JobStore, offer: MakeOffer, config: JobsConfig) -> None:
    """Its result is OpenAI's chat completion, and the runner was asked once, with what was stored."""
    job = (await store.accept(offer())).id
    runner = Scripted()
    async with Shift(store, runner, config) as shift:
        await until(reached(store, job, JobState.SUCCEEDED))
    body = json.loads(await store.read_result(job))
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"]["content"] == "an answer"
    assert body["usage"]["total_tokens"] == 7
    assert [(one.id, one.tier, one.request.hints.client) for one in runner.asked] == [(job, "large", "kiosk")]
    assert shift.count("succeeded") == 1


async def test_many_jobs_each_run_once(store: JobStore, offer: MakeOffer, config: JobsConfig) -> None:
    """Two workers share a queue: every job is answered, none is run twice."""
    jobs = [(await store.accept(offer())).id for _ in range(30)]
    first, second = Scripted(), Scripted()
    async with Shift(store, first, config), Shift(store, second, config):
        for job in jobs:
            await until(reached(store, job, JobState.SUCCEEDED))
    assert sorted(one.id for one in first.asked + second.asked) == sorted(jobs)


async def test_no_more_than_the_places_run(store: JobStore, offer: MakeOffer, config: JobsConfig) -> None:
    """A worker claims for its free places only; the rest stays for others."""
    for _ in range(5):
        await store.accept(offer())
    runner = Scripted(hangs)
    async with Shift(store, runner, msgspec.structs.replace(config, drain_s=0.0), places=2):

        async def busy() -> bool:
            return len(runner.asked) == 2

        await until(busy)
        (depth,) = (await store.depths()).queues
        assert (depth.queued, depth.running) == (3, 2)


@pytest.mark.parametrize("error", [CloudFailed("broken"), CausewayError("odd"), RuntimeError("a secret question")])
async def test_a_fault_is_tried_again(
    ticking: JobStore, offer: MakeOffer, config: JobsConfig, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that broke is repeated, and the second answer counts; what was asked stays out of the log."""
    caplog.set_level(logging.DEBUG)
    job = (await ticking.accept(offer(deadline_ms=10**15))).id
    async with Shift(ticking, Scripted(fails(error, times=1)), config) as shift:
        await until(reached(ticking, job, JobState.SUCCEEDED))
    assert (await ticking.get(job, "kiosk")).attempts == 2
    assert (shift.count("retried"), shift.count("succeeded")) == (1, 1)
    assert "secret" not in caplog.text


async def test_what_always_breaks_ends_in_the_dead_letters(
    ticking: JobStore, offer: MakeOffer, config: JobsConfig
) -> None:
    """After its attempts it is dead, with the last fault; the runner was asked no more often."""
    job = (await ticking.accept(offer(deadline_ms=10**15))).id
    runner = Scripted(fails(CloudFailed("broken")))
    async with Shift(ticking, runner, config):
        await until(reached(ticking, job, JobState.DEAD))
    assert len(runner.asked) == config.max_attempts
    assert json.loads((await ticking.get(job, "kiosk")).error)["code"] == "cloud_failed"
    assert [letter.id for letter in await ticking.dead_letters()] == [job]


async def test_a_request_at_fault_is_not_repeated(store: JobStore, offer: MakeOffer, config: JobsConfig) -> None:
    """It fails at once, with the fault's own code."""
    job = (await store.accept(offer())).id
    runner = Scripted(fails(ContextLengthExceeded("too long")))
    async with Shift(store, runner, config):
        await until(reached(store, job, JobState.FAILED))
    assert len(runner.asked) == 1
    assert json.loads((await store.get(job, "kiosk")).error)["code"] == "context_length_exceeded"


async def test_a_full_tier_costs_no_attempt(ticking: JobStore, offer: MakeOffer, config: JobsConfig) -> None:
    """However often it was full, the job is answered in its first attempt."""
    job = (await ticking.accept(offer(deadline_ms=10**15))).id
    runner = Scripted(fails(QueueFull("full"), times=config.max_attempts + 2))
    async with Shift(ticking, runner, config):
        await until(reached(ticking, job, JobState.SUCCEEDED))
    assert (await ticking.get(job, "kiosk")).attempts == 1


async def test_a_tier_that_is_away_is_left_alone(ticking: JobStore, offer: MakeOffer, config: JobsConfig) -> None:
    """After one refused connection nothing more is claimed until a real request was answered."""
    jobs = [(await ticking.accept(offer(deadline_ms=10**15))).id for _ in range(3)]
    runner = Scripted(fails(CloudUnreachable("refused", phase="first_token"), times=1))
    runner.is_ready = False
    async with Shift(ticking, runner, config, places=1):

        async def probed() -> bool:
            return runner.probes > 0

        await until(probed)
        assert len(runner.asked) == 1
        runner.is_ready = True
        for job in jobs:
            await until(reached(ticking, job, JobState.SUCCEEDED))


async def test_a_cancelled_job_is_stopped(store: JobStore, offer: MakeOffer, config: JobsConfig) -> None:
    """Cancelling a running job ends its run, frees its place, and leaves no result."""
    job = (await store.accept(offer())).id
    runner = Scripted(hangs)
    async with Shift(store, runner, msgspec.structs.replace(config, drain_s=0.0), places=1) as shift:
        await until(reached(store, job, JobState.RUNNING))
        await store.cancel(job, "kiosk")

        async def stopped() -> bool:
            return runner.closed == [job]

        await until(stopped)
        second = (await store.accept(offer())).id
        await until(reached(store, second, JobState.RUNNING))
    assert shift.count("superseded") == 1
    assert (await store.get(job, "kiosk")).state is JobState.CANCELLED
    assert await store.read_result(job) == b""


async def test_a_drained_worker_gives_back(store: JobStore, offer: MakeOffer, config: JobsConfig) -> None:
    """What does not end in time is queued again for another worker, and cost no attempt."""
    job = (await store.accept(offer())).id
    async with Shift(store, Scripted(hangs), msgspec.structs.replace(config, drain_s=0.0)) as shift:
        await until(reached(store, job, JobState.RUNNING))
    assert shift.count("released") == 1
    assert (await store.get(job, "kiosk")).state is JobState.QUEUED
    async with Shift(store, Scripted(), config):
        await until(reached(store, job, JobState.SUCCEEDED))
    assert (await store.get(job, "kiosk")).attempts == 1


async def test_a_drained_worker_lets_jobs_end(store: JobStore, offer: MakeOffer, config: JobsConfig) -> None:
    """A job that runs when the worker is stopped is finished by it, and no other is begun."""
    go = anyio.Event()

    async def held_back(at: int, job_run: JobRun) -> AsyncGenerator[Chunk, None]:
        await go.wait()
        async for chunk in answers(at, job_run):
            yield chunk

    job = (await store.accept(offer())).id
    async with Shift(store, Scripted(held_back), config, places=1) as shift:
        await until(reached(store, job, JobState.RUNNING))
        left = (await store.accept(offer())).id
        shift.stop.set()
        go.set()
    assert (await store.get(job, "kiosk")).state is JobState.SUCCEEDED
    assert (await store.get(left, "kiosk")).state is JobState.QUEUED


async def test_a_late_job_is_stopped(store: JobStore, offer: MakeOffer, config: JobsConfig, clock: Clock) -> None:
    """At its deadline a running job expires, and its run ends."""
    job = (await store.accept(offer())).id
    runner = Scripted(hangs)
    async with Shift(store, runner, config):
        await until(reached(store, job, JobState.RUNNING))
        clock.now += 3600.0

        async def stopped() -> bool:
            return runner.closed == [job]

        await until(stopped)
    assert (await store.get(job, "kiosk")).state is JobState.EXPIRED


async def test_a_run_has_its_own_limit(ticking: JobStore, offer: MakeOffer, config: JobsConfig) -> None:
    """A run that hangs is ended after `attempt_timeout_s`, as one attempt of several."""
    job = (await ticking.accept(offer(deadline_ms=10**15))).id

    async def hangs_once(at: int, job_run: JobRun) -> AsyncGenerator[Chunk, None]:
        async for chunk in hangs(at, job_run) if at == 0 else answers(at, job_run):
            yield chunk

    async with Shift(ticking, Scripted(hangs_once), msgspec.structs.replace(config, attempt_timeout_s=0.05)):
        await until(reached(ticking, job, JobState.SUCCEEDED))
    assert (await ticking.get(job, "kiosk")).attempts == 2


async def test_an_answer_beyond_the_bound_is_refused(store: JobStore, offer: MakeOffer, config: JobsConfig) -> None:
    """It is not kept, and not made again."""
    job = (await store.accept(offer())).id
    async with Shift(store, Scripted(), msgspec.structs.replace(config, max_result_bytes=10)):
        await until(reached(store, job, JobState.FAILED))
    assert json.loads((await store.get(job, "kiosk")).error)["code"] == "answer_too_large"


async def test_bulk_does_not_starve(store: JobStore, offer: MakeOffer, config: JobsConfig) -> None:
    """With one place and more urgent jobs than it can ever do first, bulk gets its turn before the last of them."""
    for _ in range(24):
        await store.accept(offer(priority="interactive"))
    bulk = (await store.accept(offer(priority="bulk"))).id
    runner = Scripted()
    async with Shift(store, runner, config, places=1):
        await until(reached(store, bulk, JobState.SUCCEEDED))

        async def all_done() -> bool:
            return len(runner.asked) == 25

        await until(all_done)
    assert [one.id for one in runner.asked].index(bulk) < 24


class Flaky(JobStore):
    """Redis is away for the first claims."""

    tries = 0

    async def claim(self, consumer: str, tier: str, turns: Iterable[Priority]) -> ClaimedJobs:
        self.tries += 1
        if self.tries <= 20:
            raise JobStoreUnavailable("the job store does not answer")
        return await super().claim(consumer, tier, turns)


async def test_a_redis_that_is_away_is_said_once(
    database: RedisClient, config: JobsConfig, clock: Clock, offer: MakeOffer, caplog: pytest.LogCaptureFixture
) -> None:
    """However often it is asked meanwhile; and so is that it is back."""
    store = Flaky(database, config, clock=clock)
    job = (await store.accept(offer())).id
    worker = Worker(
        store, Scripted(), {"large": 1}, config, JobMetrics(CollectorRegistry()), rng=lambda: -1.0
    )  # without a pause
    stop = anyio.Event()
    with caplog.at_level(logging.INFO, "causeway.cloud.worker"):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(worker.run, stop)
            await until(reached(store, job, JobState.SUCCEEDED))
            stop.set()
    said = [message for message in caplog.messages if "claimed" in message]
    assert said == ["no jobs of large are claimed: the job store does not answer", "jobs of large are claimed again"]
