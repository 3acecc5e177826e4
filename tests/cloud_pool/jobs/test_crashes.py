"""kill -9 of real processes: accepted jobs end, exactly once."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from pathlib import Path

import anyio
import msgspec
import pytest

from causeway_server.cloud_pool.jobs.worker.runner import JobRun
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.storage.durability import DurabilityCheck
from causeway_server.cloud_pool.storage.job_store import JobStore
from causeway_server.cloud_pool.storage.record import NewJob
from causeway_server.cloud_pool.storage.redis_client import RedisClient, as_fields, as_list
from causeway_server.cloud_pool.storage.stores import SCRIPTS
from causeway_server.router.errors import CloudFailed, ConfigError, JobStoreUnavailable
from causeway_server.router.jobs.job import JobState
from causeway_server.router.types import Chunk

from .conftest import Clock, until
from .redis_server import RedisServer
from .scripted_worker import RunningWorker, ScriptedRunner, answers

ROOT = Path(__file__).parents[3]
MakeJob = Callable[..., NewJob]


@pytest.fixture
def killable_redis() -> Iterator[RedisServer]:
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        server = RedisServer(Path(folder))
        try:
            yield server
        finally:
            server.kill()


async def final_events(database: RedisClient, job: str) -> list[str]:
    """The final states in the job's events; exactly one effect is exactly one of them."""
    entries = as_list(await database.command("XRANGE", database.key("events", job), "-", "+"))
    events = [as_fields(as_list(entry)[1])["event"].decode() for entry in entries]
    return [event for event in events if event not in ("queued", "running", "waiting", "progress")]


def all_ended(store: JobStore, jobs: list[str]) -> Callable[[], Awaitable[bool]]:
    async def condition() -> bool:
        try:
            return all([(await store.get(job, "kiosk")).ended for job in jobs])
        except JobStoreUnavailable:
            return False

    return condition


async def test_another_worker_runs_the_jobs_of_a_killed_one(
    store: JobStore, database: RedisClient, config: JobsConfig, new_job: MakeJob
) -> None:
    """Both of its jobs are claimed when their leases end, and each ends once."""
    jobs = [(await store.accept(new_job())).id for _ in range(2)]
    command = [sys.executable, "-m", "tests.cloud_pool.jobs.worker_process", str(config.redis), config.key_prefix, "2"]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    begun = {(await process.stdout.readline()).decode().strip() for _ in jobs}
    process.kill()
    await process.wait()
    assert begun == set(jobs)
    runner = ScriptedRunner()
    short = msgspec.structs.replace(config, lease_s=2.0)  # its own run must not be taken for a dead one
    async with RunningWorker(JobStore(database, short), runner, short):
        await until(all_ended(store, jobs))
    assert sorted(one.record.id for one in runner.runs) == sorted(jobs)
    for job in jobs:
        assert await final_events(database, job) == ["succeeded"]
        assert (await store.get(job, "kiosk")).attempts == 2


async def test_accepted_jobs_survive_a_killed_redis(
    killable_redis: RedisServer, config: JobsConfig, clock: Clock, new_job: MakeJob
) -> None:
    config = msgspec.structs.replace(config, redis=killable_redis.url)
    database = RedisClient(config, SCRIPTS, clock=clock)
    store = JobStore(database, config)
    accepted: list[str] = []

    async def keep_offering() -> None:
        while True:
            try:
                accepted.append((await store.accept(new_job())).id)
            except JobStoreUnavailable:
                return

    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(keep_offering)

        async def busy() -> bool:
            return len(accepted) >= 200

        await until(busy)
        killable_redis.kill()
    killable_redis.start()
    async with RunningWorker(store, ScriptedRunner(), config, slots=32):
        await until(all_ended(store, accepted))
    for job in accepted:
        assert await final_events(database, job) == ["succeeded"]
    await database.close()


async def test_runs_survive_a_killed_redis(
    killable_redis: RedisServer, config: JobsConfig, clock: Clock, new_job: MakeJob
) -> None:
    """Workers keep results until Redis is back, and each job ends once."""
    config = msgspec.structs.replace(config, redis=killable_redis.url)
    database = RedisClient(config, SCRIPTS, clock=clock)
    store = JobStore(database, config)
    jobs = [(await store.accept(new_job())).id for _ in range(12)]
    go = anyio.Event()

    async def held_back(at: int, job_run: JobRun) -> AsyncGenerator[Chunk, None]:
        await go.wait()
        async for chunk in answers(at, job_run):
            yield chunk

    runner = ScriptedRunner(held_back)
    async with RunningWorker(store, runner, config, slots=4):

        async def busy() -> bool:
            return len(runner.runs) == 4

        await until(busy)
        killable_redis.kill()
        go.set()

        async def answered() -> bool:
            return len(runner.closed) == 4

        await until(answered)
        killable_redis.start()
        await until(all_ended(store, jobs))
    for job in jobs:
        assert await final_events(database, job) == ["succeeded"]
        assert (await store.get(job, "kiosk")).state is JobState.SUCCEEDED
    assert len(runner.runs) == len(jobs)
    await database.close()


async def test_an_idempotency_key_survives_a_killed_redis(
    killable_redis: RedisServer, config: JobsConfig, clock: Clock, new_job: MakeJob
) -> None:
    """A caller without a reply repeats its request: one job."""
    config = msgspec.structs.replace(config, redis=killable_redis.url)
    database = RedisClient(config, SCRIPTS, clock=clock)
    store = JobStore(database, config)
    first = await store.accept(new_job(idempotency="k", digest="d"))
    killable_redis.kill()
    with pytest.raises(JobStoreUnavailable):
        await store.accept(new_job(idempotency="k", digest="d"))
    killable_redis.start()
    assert (await store.accept(new_job(idempotency="k", digest="d"))).id == first.id
    assert (await store.depths()).queues[0].queued == 1
    await database.close()


async def test_a_redis_that_is_not_durable_is_refused_or_logged(database: RedisClient) -> None:
    await DurabilityCheck(database, "require").wait()
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        server = RedisServer(Path(folder), "--appendfsync", "everysec")
        forgetful = RedisClient(JobsConfig(redis=server.url, key_prefix="p"), SCRIPTS)
        try:
            with pytest.raises(ConfigError, match="appendfsync is everysec"):
                await DurabilityCheck(forgetful, "require").wait()
            await DurabilityCheck(forgetful, "warn").wait()
        finally:
            await forgetful.close()
            server.kill()


def test_an_invalid_redis_url_is_a_config_error(config: JobsConfig) -> None:
    with pytest.raises(ConfigError):
        RedisClient(JobsConfig(redis="nonsense://", key_prefix=config.key_prefix), SCRIPTS)


async def test_a_full_redis_refuses_new_jobs_and_lets_running_ones_end(
    killable_redis: RedisServer, config: JobsConfig, clock: Clock, new_job: MakeJob
) -> None:
    """Running jobs can still be reported, cancelled and retried."""
    config = msgspec.structs.replace(config, redis=killable_redis.url)
    database = RedisClient(config, SCRIPTS, clock=clock)
    store = JobStore(database, config)
    for _ in range(3):
        await store.accept(new_job())
    first, second, third = (await store.claim("w", "large", ["standard"] * 3)).records
    await database.command("CONFIG", "SET", "maxmemory", "1")
    with pytest.raises(JobStoreUnavailable):
        await store.accept(new_job(id="job_refused"))
    assert await store.lookup("job_refused") is None
    assert await store.succeed(first.id, first.fence, b"{}")
    await store.cancel(second.id, "kiosk")
    assert await store.postpone(third.id, third.fence, CloudFailed("broken"), 0.0, counts=True)
    assert (await store.promote_and_expire()).changed == 1
    assert [record.id for record in (await store.claim("w", "large", ["standard"])).records] == [third.id]
    await database.close()
