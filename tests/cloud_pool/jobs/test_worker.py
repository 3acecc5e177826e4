"""A worker on a real Redis with a scripted runner."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable

import anyio
import msgspec
import pytest
from prometheus_client import CollectorRegistry

from causeway_server.cloud_pool.admission import Priority
from causeway_server.cloud_pool.jobs.metrics import JobMetrics
from causeway_server.cloud_pool.jobs.worker.execution import WorkerSlots
from causeway_server.cloud_pool.jobs.worker.runner import JobRun
from causeway_server.cloud_pool.jobs.worker.worker import Worker
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.storage.job_store import JobStore
from causeway_server.cloud_pool.storage.record import ClaimedJobs, NewJob
from causeway_server.cloud_pool.storage.redis_client import RedisClient
from causeway_server.router.errors import (
    CausewayError,
    CloudFailed,
    CloudUnreachable,
    ContextLengthExceeded,
    JobStoreUnavailable,
    QueueFull,
)
from causeway_server.router.jobs.job import JobState
from causeway_server.router.types import Chunk

from .conftest import Clock, until
from .scripted_worker import RunningWorker, ScriptedRunner, answers

MakeJob = Callable[..., NewJob]


def reached(store: JobStore, job: str, state: JobState) -> Callable[[], Awaitable[bool]]:
    async def condition() -> bool:
        return (await store.get(job, "kiosk")).state is state

    return condition


async def hangs(_at: int, _run: JobRun) -> AsyncGenerator[Chunk, None]:
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
    """A store whose clock advances by a second per reading, so that postponed jobs become due."""
    clock.step = 1.0
    return JobStore(database, msgspec.structs.replace(config, default_deadline_s=1e6))


async def test_a_job_runs_once_and_stores_a_chat_completion(
    store: JobStore, new_job: MakeJob, config: JobsConfig
) -> None:
    job = (await store.accept(new_job())).id
    runner = ScriptedRunner()
    async with RunningWorker(store, runner, config) as worker:
        await until(reached(store, job, JobState.SUCCEEDED))
    body = json.loads(await store.read_result(job, "kiosk"))
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"]["content"] == "an answer"
    assert body["usage"]["total_tokens"] == 7
    assert [(one.record.id, one.record.tier, one.request.hints.client) for one in runner.runs] == [
        (job, "large", "kiosk")
    ]
    assert worker.count("succeeded") == 1


async def test_two_workers_run_every_job_once(store: JobStore, new_job: MakeJob, config: JobsConfig) -> None:
    jobs = [(await store.accept(new_job())).id for _ in range(30)]
    first, second = ScriptedRunner(), ScriptedRunner()
    async with RunningWorker(store, first, config), RunningWorker(store, second, config):
        for job in jobs:
            await until(reached(store, job, JobState.SUCCEEDED))
    assert sorted(one.record.id for one in first.runs + second.runs) == sorted(jobs)


async def test_a_worker_claims_for_free_slots_only(store: JobStore, new_job: MakeJob, config: JobsConfig) -> None:
    for _ in range(5):
        await store.accept(new_job())
    runner = ScriptedRunner(hangs)
    async with RunningWorker(store, runner, msgspec.structs.replace(config, drain_s=0.0), slots=2):

        async def busy() -> bool:
            return len(runner.runs) == 2

        await until(busy)
        (depth,) = (await store.depths()).queues
        assert (depth.queued, depth.running) == (3, 2)


@pytest.mark.parametrize("error", [CloudFailed("broken"), CausewayError("odd"), RuntimeError("a secret question")])
async def test_a_failed_run_is_retried_without_content_in_the_log(
    ticking: JobStore, new_job: MakeJob, config: JobsConfig, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    job = (await ticking.accept(new_job(deadline_ms=10**15))).id
    async with RunningWorker(ticking, ScriptedRunner(fails(error, times=1)), config) as worker:
        await until(reached(ticking, job, JobState.SUCCEEDED))
    assert (await ticking.get(job, "kiosk")).attempts == 2
    assert (worker.count("retried"), worker.count("succeeded")) == (1, 1)
    assert "secret" not in caplog.text


async def test_a_job_that_always_fails_becomes_a_dead_letter(
    ticking: JobStore, new_job: MakeJob, config: JobsConfig
) -> None:
    job = (await ticking.accept(new_job(deadline_ms=10**15))).id
    runner = ScriptedRunner(fails(CloudFailed("broken")))
    async with RunningWorker(ticking, runner, config):
        await until(reached(ticking, job, JobState.DEAD))
    assert len(runner.runs) == config.max_attempts
    assert json.loads((await ticking.get(job, "kiosk")).error)["code"] == "cloud_failed"
    assert [letter.id for letter in await ticking.dead_letters()] == [job]


async def test_an_invalid_request_is_not_retried(store: JobStore, new_job: MakeJob, config: JobsConfig) -> None:
    job = (await store.accept(new_job())).id
    runner = ScriptedRunner(fails(ContextLengthExceeded("too long")))
    async with RunningWorker(store, runner, config):
        await until(reached(store, job, JobState.FAILED))
    assert len(runner.runs) == 1
    assert json.loads((await store.get(job, "kiosk")).error)["code"] == "context_length_exceeded"


async def test_a_full_tier_costs_no_attempt(ticking: JobStore, new_job: MakeJob, config: JobsConfig) -> None:
    job = (await ticking.accept(new_job(deadline_ms=10**15))).id
    runner = ScriptedRunner(fails(QueueFull("full"), times=config.max_attempts + 2))
    async with RunningWorker(ticking, runner, config):
        await until(reached(ticking, job, JobState.SUCCEEDED))
    assert (await ticking.get(job, "kiosk")).attempts == 1


async def test_nothing_is_claimed_for_an_unavailable_tier(
    ticking: JobStore, new_job: MakeJob, config: JobsConfig
) -> None:
    jobs = [(await ticking.accept(new_job(deadline_ms=10**15))).id for _ in range(3)]
    runner = ScriptedRunner(fails(CloudUnreachable("refused", phase="first_token"), times=1))
    runner.is_ready = False
    async with RunningWorker(ticking, runner, config, slots=1):

        async def probed() -> bool:
            return runner.probes > 0

        await until(probed)
        assert len(runner.runs) == 1
        runner.is_ready = True
        for job in jobs:
            await until(reached(ticking, job, JobState.SUCCEEDED))


async def test_cancelling_stops_the_run_and_frees_the_slot(
    store: JobStore, new_job: MakeJob, config: JobsConfig
) -> None:
    job = (await store.accept(new_job())).id
    runner = ScriptedRunner(hangs)
    async with RunningWorker(store, runner, msgspec.structs.replace(config, drain_s=0.0), slots=1) as worker:
        await until(reached(store, job, JobState.RUNNING))
        await store.cancel(job, "kiosk")

        async def stopped() -> bool:
            return runner.closed == [job]

        await until(stopped)
        second = (await store.accept(new_job())).id
        await until(reached(store, second, JobState.RUNNING))
    assert worker.count("superseded") == 1
    assert (await store.get(job, "kiosk")).state is JobState.CANCELLED
    assert await store.read_result(job, "kiosk") == b""


async def test_a_drained_worker_returns_unfinished_jobs(store: JobStore, new_job: MakeJob, config: JobsConfig) -> None:
    job = (await store.accept(new_job())).id
    async with RunningWorker(store, ScriptedRunner(hangs), msgspec.structs.replace(config, drain_s=0.0)) as worker:
        await until(reached(store, job, JobState.RUNNING))
    assert worker.count("released") == 1
    assert (await store.get(job, "kiosk")).state is JobState.QUEUED
    async with RunningWorker(store, ScriptedRunner(), config):
        await until(reached(store, job, JobState.SUCCEEDED))
    assert (await store.get(job, "kiosk")).attempts == 1


async def test_a_draining_worker_finishes_runs_and_claims_no_more(
    store: JobStore, new_job: MakeJob, config: JobsConfig
) -> None:
    go = anyio.Event()

    async def held_back(at: int, job_run: JobRun) -> AsyncGenerator[Chunk, None]:
        await go.wait()
        async for chunk in answers(at, job_run):
            yield chunk

    job = (await store.accept(new_job())).id
    async with RunningWorker(store, ScriptedRunner(held_back), config, slots=1) as worker:
        await until(reached(store, job, JobState.RUNNING))
        left = (await store.accept(new_job())).id
        worker.stop.set()
        go.set()
    assert (await store.get(job, "kiosk")).state is JobState.SUCCEEDED
    assert (await store.get(left, "kiosk")).state is JobState.QUEUED


async def test_a_run_stops_at_the_jobs_deadline(
    store: JobStore, new_job: MakeJob, config: JobsConfig, clock: Clock
) -> None:
    job = (await store.accept(new_job())).id
    runner = ScriptedRunner(hangs)
    async with RunningWorker(store, runner, config):
        await until(reached(store, job, JobState.RUNNING))
        clock.now += 3600.0

        async def stopped() -> bool:
            return runner.closed == [job]

        await until(stopped)
    assert (await store.get(job, "kiosk")).state is JobState.EXPIRED


async def test_a_run_ends_after_attempt_timeout_s(ticking: JobStore, new_job: MakeJob, config: JobsConfig) -> None:
    job = (await ticking.accept(new_job(deadline_ms=10**15))).id

    async def hangs_once(at: int, job_run: JobRun) -> AsyncGenerator[Chunk, None]:
        async for chunk in hangs(at, job_run) if at == 0 else answers(at, job_run):
            yield chunk

    async with RunningWorker(
        ticking, ScriptedRunner(hangs_once), msgspec.structs.replace(config, attempt_timeout_s=0.5)
    ):
        await until(reached(ticking, job, JobState.SUCCEEDED))
    assert (await ticking.get(job, "kiosk")).attempts == 2


async def test_an_answer_over_max_result_bytes_fails_the_job(
    store: JobStore, new_job: MakeJob, config: JobsConfig
) -> None:
    job = (await store.accept(new_job())).id
    async with RunningWorker(store, ScriptedRunner(), msgspec.structs.replace(config, max_result_bytes=10)):
        await until(reached(store, job, JobState.FAILED))
    assert json.loads((await store.get(job, "kiosk")).error)["code"] == "answer_too_large"


async def test_bulk_jobs_do_not_starve(store: JobStore, new_job: MakeJob, config: JobsConfig) -> None:
    for _ in range(24):
        await store.accept(new_job(priority="interactive"))
    bulk = (await store.accept(new_job(priority="bulk"))).id
    runner = ScriptedRunner()
    async with RunningWorker(store, runner, config, slots=1):
        await until(reached(store, bulk, JobState.SUCCEEDED))

        async def all_done() -> bool:
            return len(runner.runs) == 25

        await until(all_done)
    assert [one.record.id for one in runner.runs].index(bulk) < 24


class UnavailableAtFirst(JobStore):
    """Redis is unavailable for the first 20 claims."""

    tries = 0

    async def claim(self, consumer: str, tier: str, turns: Iterable[Priority]) -> ClaimedJobs:
        self.tries += 1
        if self.tries <= 20:
            raise JobStoreUnavailable("the job store does not answer")
        return await super().claim(consumer, tier, turns)


async def test_an_outage_of_redis_is_logged_once(
    database: RedisClient, config: JobsConfig, clock: Clock, new_job: MakeJob, caplog: pytest.LogCaptureFixture
) -> None:
    store = UnavailableAtFirst(database, config)
    job = (await store.accept(new_job())).id
    worker = Worker(
        store,
        ScriptedRunner(),
        {"large": WorkerSlots("large", 1)},
        config,
        JobMetrics(CollectorRegistry()),
        rng=lambda: -1.0,
    )  # no delay
    stop = anyio.Event()
    with caplog.at_level(logging.INFO, "causeway_server"):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(worker.run, stop)
            await until(reached(store, job, JobState.SUCCEEDED))
            stop.set()
    messages = [message for message in caplog.messages if "The worker claims" in message]
    assert messages == [
        "The worker claims no jobs of tier large: the job store does not answer",
        "The worker claims jobs of tier large again.",
    ]
