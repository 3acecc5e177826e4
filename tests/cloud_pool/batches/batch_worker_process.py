"""A worker with a batch processor, as a process that can be killed.

`python -m tests.cloud_pool.batches.batch_worker_process CONFIG`, where CONFIG is a JobsConfig as
JSON. Every job is answered at once. It prints a line for each answer.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator

import anyio
import msgspec
from prometheus_client import CollectorRegistry

from causeway_server.cloud_pool.background import WorkerRuntime
from causeway_server.cloud_pool.jobs.worker.execution import WorkerSlots
from causeway_server.cloud_pool.jobs.worker.runner import JobRun
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.router.types import Chunk
from tests.cloud_pool.jobs.scripted_worker import ScriptedRunner, answers
from tests.cloud_pool.jobs.test_api import TIER


async def prints_and_answers(at: int, job_run: JobRun) -> AsyncGenerator[Chunk, None]:
    print(job_run.record.id, flush=True)
    async for chunk in answers(at, job_run):
        yield chunk


async def main(config: JobsConfig) -> None:
    runner = ScriptedRunner(prints_and_answers)
    runtime = WorkerRuntime(config, {"large": TIER}, runner, {"large": WorkerSlots("large", 8)}, CollectorRegistry())
    stop = anyio.Event()
    await runtime.start(stop)
    await runtime.run(stop)


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=JobsConfig)))
