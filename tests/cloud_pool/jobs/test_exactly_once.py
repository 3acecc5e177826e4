"""Jobs whose leases end too early, over and over: run more than once, effective once."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable

import anyio
import msgspec

from causeway_server.cloud_pool.jobs.worker.runner import JobRun
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.storage.job_store import JobStore
from causeway_server.cloud_pool.storage.record import NewJob
from causeway_server.cloud_pool.storage.redis_client import RedisClient, as_fields, as_list, as_text
from causeway_server.router.errors import CloudFailed
from causeway_server.router.types import Chunk

from .conftest import Clock, until
from .scripted_worker import RunningWorker, ScriptedRunner, answers


async def test_jobs_taken_over_have_one_effect(
    database: RedisClient, config: JobsConfig, clock: Clock, new_job: Callable[..., NewJob]
) -> None:
    """Three workers that never renew take over each other's jobs: each job ends once, with one webhook."""
    config = msgspec.structs.replace(
        config, lease_s=0.01, lease_check_s=60.0, max_attempts=1000, drain_s=1.0, backoff_max_s=0.01
    )

    clock.step = 0.01
    store = JobStore(database, config)
    chance = random.Random(7)

    async def stumbles(at: int, job_run: JobRun) -> AsyncGenerator[Chunk, None]:
        await anyio.sleep(chance.uniform(0.0, 0.03))
        if chance.random() < 0.2:
            raise CloudFailed("broken")
        async for chunk in answers(at, job_run):
            yield chunk

    jobs = [(await store.accept(new_job(deadline_ms=10**15, webhook="https://example.com/"))).id for _ in range(40)]
    runners = [ScriptedRunner(stumbles) for _ in range(3)]
    first, second, third = (RunningWorker(store, runner, config, slots=8) for runner in runners)
    async with first, second, third:

        async def all_ended() -> bool:
            return all([(await store.get(job, "kiosk")).ended for job in jobs])

        await until(all_ended)
    runs = Counter(job_run.record.id for runner in runners for job_run in runner.runs)
    assert sum(runs.values()) > len(jobs)  # some jobs ran more than once, or this proves nothing
    for job in jobs:
        entries = as_list(await database.command("XRANGE", database.key("events", job), "-", "+"))
        events = Counter(as_fields(as_list(entry)[1])["event"] for entry in entries)
        assert events[b"succeeded"] == 1
    deliveries = as_list(
        await database.command("ZRANGE", database.key("webhooks", "kiosk", "https://example.com"), 0, -1)
    )
    assert sorted(as_text(delivery).partition(".")[0] for delivery in deliveries) == sorted(jobs)
    (depth,) = (await store.depths()).queues
    assert (depth.queued, depth.running) == (0, 0)
