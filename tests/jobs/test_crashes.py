"""kill -9 of real processes: what was accepted is done, and done once."""

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

from cloud_pool.jobs.config import JobsConfig
from cloud_pool.jobs.errors import JobStoreUnavailable
from cloud_pool.jobs.lua.scripts import SCRIPTS
from cloud_pool.jobs.record import NewJob
from cloud_pool.jobs.states import JobState
from cloud_pool.jobs.store.durability import DurabilityCheck
from cloud_pool.jobs.store.job_store import JobStore
from cloud_pool.jobs.store.redis_client import RedisClient, as_fields, as_list
from cloud_pool.jobs.worker.runner import JobRun
from router.errors import CloudFailed, ConfigError
from router.types import Chunk

from .conftest import Clock, until
from .redis_server import RedisServer
from .scripted_worker import Scripted, Shift, answers

ROOT = Path(__file__).parents[2]
MakeOffer = Callable[..., NewJob]


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """One that a test may kill."""
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        server = RedisServer(Path(folder))
        try:
            yield server
        finally:
            server.kill()


async def ends(database: RedisClient, job: str) -> list[str]:
    """How the job's events say that it ended: exactly one effect is exactly one of these."""
    entries = as_list(await database.command("XRANGE", database.key("events", job), "-", "+"))
    told = [as_fields(as_list(entry)[1])["event"].decode() for entry in entries]
    return [what for what in told if what not in ("queued", "running", "waiting", "progress")]


def all_ended(store: JobStore, jobs: list[str]) -> Callable[[], Awaitable[bool]]:
    async def is_so() -> bool:
        try:
            return all([(await store.get(job, "kiosk")).ended for job in jobs])
        except JobStoreUnavailable:
            return False

    return is_so


async def test_a_killed_workers_job_is_done_by_another(
    store: JobStore, database: RedisClient, config: JobsConfig, offer: MakeOffer
) -> None:
    """kill -9 in the middle of two jobs: another worker claims both when the lease ends, and each ends once."""
    jobs = [(await store.accept(offer())).id for _ in range(2)]
    command = [sys.executable, "-m", "tests.jobs.worker_process", config.redis, config.key_prefix]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    begun = {(await process.stdout.readline()).decode().strip() for _ in jobs}
    process.kill()
    await process.wait()
    assert begun == set(jobs)
    runner = Scripted()
    short = msgspec.structs.replace(config, lease_s=0.2)
    async with Shift(JobStore(database, short, clock=lambda: 1_800_000_000.0), runner, short):
        await until(all_ended(store, jobs))
    assert sorted(one.id for one in runner.asked) == sorted(jobs)
    for job in jobs:
        assert await ends(database, job) == ["succeeded"]
        assert (await store.get(job, "kiosk")).attempts == 2


async def test_nothing_accepted_is_lost_with_redis(
    own_redis: RedisServer, config: JobsConfig, clock: Clock, offer: MakeOffer
) -> None:
    """kill -9 of Redis while jobs are being accepted: each that was acknowledged is there after the restart."""
    config = msgspec.structs.replace(config, redis=own_redis.url)
    database = RedisClient(config.redis, config.key_prefix, SCRIPTS)
    store = JobStore(database, config, clock=clock)
    accepted: list[str] = []

    async def keep_offering() -> None:
        while True:
            try:
                accepted.append((await store.accept(offer())).id)
            except JobStoreUnavailable:
                return

    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(keep_offering)

        async def busy() -> bool:
            return len(accepted) >= 200

        await until(busy)
        own_redis.kill()
    own_redis.start()
    async with Shift(store, Scripted(), config, places=32):
        await until(all_ended(store, accepted))
    for job in accepted:
        assert await ends(database, job) == ["succeeded"]
    await database.close()


async def test_work_survives_redis(own_redis: RedisServer, config: JobsConfig, clock: Clock, offer: MakeOffer) -> None:
    """kill -9 of Redis while jobs run: their results are kept until it is back, and each job ends once."""
    config = msgspec.structs.replace(config, redis=own_redis.url)
    database = RedisClient(config.redis, config.key_prefix, SCRIPTS)
    store = JobStore(database, config, clock=clock)
    jobs = [(await store.accept(offer())).id for _ in range(12)]
    go = anyio.Event()

    async def held_back(at: int, job_run: JobRun) -> AsyncGenerator[Chunk, None]:
        await go.wait()
        async for chunk in answers(at, job_run):
            yield chunk

    runner = Scripted(held_back)
    async with Shift(store, runner, config, places=4):

        async def busy() -> bool:
            return len(runner.asked) == 4

        await until(busy)
        own_redis.kill()
        go.set()

        async def answered() -> bool:
            return len(runner.closed) == 4

        await until(answered)
        own_redis.start()
        await until(all_ended(store, jobs))
    for job in jobs:
        assert await ends(database, job) == ["succeeded"]
        assert (await store.get(job, "kiosk")).state is JobState.SUCCEEDED
    assert len(runner.asked) == len(jobs)
    await database.close()


async def test_a_key_outlives_redis(own_redis: RedisServer, config: JobsConfig, clock: Clock, offer: MakeOffer) -> None:
    """A caller that got no answer because Redis died sends the same again, and there is one job."""
    config = msgspec.structs.replace(config, redis=own_redis.url)
    database = RedisClient(config.redis, config.key_prefix, SCRIPTS)
    store = JobStore(database, config, clock=clock)
    first = await store.accept(offer(idempotency="k", digest="d"))
    own_redis.kill()
    with pytest.raises(JobStoreUnavailable):
        await store.accept(offer(idempotency="k", digest="d"))
    own_redis.start()
    assert (await store.accept(offer(idempotency="k", digest="d"))).id == first.id
    assert (await store.depths()).queues[0].queued == 1
    await database.close()


async def test_a_redis_that_forgets_is_refused(database: RedisClient) -> None:
    """At start: with `require` it is an error that names the setting, with `warn` a line in the log."""
    await DurabilityCheck(database, "require").wait()
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        server = RedisServer(Path(folder), "--appendfsync", "everysec")
        forgetful = RedisClient(server.url, "p", SCRIPTS)
        try:
            with pytest.raises(ConfigError, match="appendfsync is everysec"):
                await DurabilityCheck(forgetful, "require").wait()
            await DurabilityCheck(forgetful, "warn").wait()
        finally:
            await forgetful.close()
            server.kill()


def test_a_url_that_is_none_is_said(config: JobsConfig) -> None:
    """An error of the configuration, not a trace."""
    with pytest.raises(ConfigError):
        RedisClient("nonsense://", config.key_prefix, SCRIPTS)


async def test_a_full_redis_takes_nothing_and_lets_jobs_end(
    own_redis: RedisServer, config: JobsConfig, clock: Clock, offer: MakeOffer
) -> None:
    """Without memory a job is refused whole, and those that run can still be reported, cancelled and retried."""
    config = msgspec.structs.replace(config, redis=own_redis.url)
    database = RedisClient(config.redis, config.key_prefix, SCRIPTS)
    store = JobStore(database, config, clock=clock)
    for _ in range(3):
        await store.accept(offer())
    first, second, third = (await store.claim("w", "large", ["standard"] * 3)).records
    await database.command("CONFIG", "SET", "maxmemory", "1")
    with pytest.raises(JobStoreUnavailable):
        await store.accept(offer(id="job_refused"))
    assert await store.lookup("job_refused") is None
    assert await store.succeed(first.id, first.fence, b"{}")
    await store.cancel(second.id, "kiosk")
    assert await store.postpone(third.id, third.fence, CloudFailed("broken"), store.now_ms, counts=True)
    assert await store.promote_and_expire() == 1
    assert [record.id for record in (await store.claim("w", "large", ["standard"])).records] == [third.id]
    await database.close()
