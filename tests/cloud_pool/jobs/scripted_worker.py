"""A scripted runner, and a worker that uses it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Self

import anyio
from prometheus_client import CollectorRegistry

from causeway_server.cloud_pool.cache.caching_service import Billing
from causeway_server.cloud_pool.core.request_context import AnswerHead, RequestContext
from causeway_server.cloud_pool.jobs.metrics import JobMetrics
from causeway_server.cloud_pool.jobs.worker.execution import WorkerSlots
from causeway_server.cloud_pool.jobs.worker.runner import JobPiece, JobRun, JobRunner
from causeway_server.cloud_pool.jobs.worker.worker import Worker
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.storage.job_store import JobStore
from causeway_server.cloud_pool.storage.record import ExpiredJob, JobRecord
from causeway_server.router.jobs.job import JobState
from causeway_server.router.types import Chunk, Embeddings, Usage

Script = Callable[[int, JobRun], AsyncGenerator[JobPiece, None]]
ANSWER = (Chunk(text="an answer", tokens=2), Chunk(finish_reason="stop"), Chunk(usage=Usage(5, 2)))


async def answers(_at: int, _run: JobRun) -> AsyncGenerator[Chunk, None]:
    for chunk in ANSWER:
        yield chunk


async def no_vectors(context: RequestContext) -> tuple[AnswerHead, Embeddings]:
    """Stand in for `Service.embed` where no job asks for vectors."""
    raise AssertionError(f"{context.id} asks for vectors")


def running_record(name: str, owner: str, fence: int = 0) -> JobRecord:
    """Return the record of a job that runs, whose request the test has."""
    return JobRecord(
        id=name,
        owner=owner,
        tier="large",
        priority="bulk",
        endpoint="/v1/chat/completions",
        state=JobState.RUNNING,
        created=0,
        deadline=0,
        fence=fence,
    )


class ScriptedRunner:
    """Records its runs. `script` gets the number of the run, from 0."""

    def __init__(self, script: Script = answers) -> None:
        self.runs: list[JobRun] = []
        self.closed: list[str] = []
        self.is_ready = True
        self.probes = 0
        self.expired: list[ExpiredJob] = []
        self._script = script

    async def run(self, job_run: JobRun) -> AsyncGenerator[JobPiece, None]:
        self.runs.append(job_run)
        try:
            async for chunk in self._script(len(self.runs) - 1, job_run):
                yield chunk
        finally:
            self.closed.append(job_run.record.id)

    def reply(self, job_run: JobRun) -> tuple[Billing, AsyncGenerator[JobPiece, None]]:
        return Billing(lambda _: None, ""), self.run(job_run)

    def max_tokens(self, tier: str) -> int:
        return 100

    async def ready(self, tier: str) -> bool:
        self.probes += 1
        return self.is_ready

    def record_expired(self, job: ExpiredJob) -> None:
        self.expired.append(job)


class RunningWorker:
    """A worker at work for a `with` block; leaving it drains the worker."""

    def __init__(self, store: JobStore, runner: JobRunner, config: JobsConfig, slots: int = 4) -> None:
        self.registry = CollectorRegistry()
        metrics = JobMetrics(self.registry)
        self.worker = Worker(store, runner, {"large": WorkerSlots("large", slots)}, config, metrics, rng=lambda: 0.5)
        self.stop = anyio.Event()
        self._tasks = anyio.create_task_group()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._tasks.start_soon(self.worker.run, self.stop)
        return self

    async def __aexit__(self, *fault: object) -> None:
        self.stop.set()
        await self._tasks.__aexit__(None, None, None)

    def count(self, outcome: str) -> float:
        labels = {"tier": "large", "outcome": outcome}
        return self.registry.get_sample_value("causeway_jobs_runs_total", labels) or 0.0
