"""A worker's part of a tier's permits bounds how many jobs it runs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable

import anyio
import anyio.lowlevel
from prometheus_client import CollectorRegistry

from causeway_server.cloud_pool.jobs.metrics import JobMetrics
from causeway_server.cloud_pool.jobs.worker.execution import WorkerSlots
from causeway_server.cloud_pool.jobs.worker.runner import JobRun
from causeway_server.cloud_pool.jobs.worker.worker import Worker
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.storage.job_store import JobStore
from causeway_server.cloud_pool.storage.record import NewJob
from causeway_server.router.types import Chunk

from .conftest import until
from .scripted_worker import ANSWER, ScriptedRunner


class SharedLimit:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.demand = 0
        self.wants_more = False


async def test_a_worker_runs_as_many_jobs_as_its_part_allows(
    store: JobStore, new_job: Callable[..., NewJob], config: JobsConfig
) -> None:
    for _ in range(6):
        await store.accept(new_job())
    goes_on = anyio.Event()

    async def held(_at: int, _run: JobRun) -> AsyncGenerator[Chunk, None]:
        await goes_on.wait()
        for chunk in ANSWER:
            yield chunk

    part, stop, runner = SharedLimit(0), anyio.Event(), ScriptedRunner(held)
    metrics = JobMetrics(CollectorRegistry())
    worker = Worker(store, runner, {"large": WorkerSlots("large", 100, part)}, config, metrics)

    def running(count: int) -> Callable[[], Awaitable[bool]]:
        async def condition() -> bool:
            return len(runner.runs) - len(runner.closed) == count

        return condition

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(worker.run, stop)
        await anyio.lowlevel.checkpoint()
        assert not runner.runs
        part.limit = 2
        await until(running(2))
        assert part.wants_more
        part.limit, part.demand = 8, 8  # The two jobs are of four sequences each.
        await anyio.wait_all_tasks_blocked()
        assert len(runner.runs) == 2
        part.limit, part.demand = 5, 0
        await until(running(5))
        part.limit = 1  # The five go on, and none is started in their place.
        goes_on.set()
        await until(running(0))

        async def learned() -> bool:
            return not part.wants_more

        await until(learned)
        assert len(runner.runs) == 6
        stop.set()
