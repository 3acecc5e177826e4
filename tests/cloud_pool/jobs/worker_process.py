"""A worker as a process that can be killed: `python -m tests.cloud_pool.jobs.worker_process URL PREFIX LEASE_S`.

It prints the id of each job that it runs. Its runs make half an answer and never end.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator

import anyio
from prometheus_client import CollectorRegistry

from causeway_server.cloud_pool.jobs.metrics import JobMetrics
from causeway_server.cloud_pool.jobs.worker.execution import WorkerSlots
from causeway_server.cloud_pool.jobs.worker.runner import JobRun
from causeway_server.cloud_pool.jobs.worker.worker import Worker
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.storage.job_store import JobStore
from causeway_server.cloud_pool.storage.redis_client import RedisClient
from causeway_server.cloud_pool.storage.stores import SCRIPTS
from causeway_server.router.types import Chunk

from .scripted_worker import ScriptedRunner


async def half_answers(_at: int, job_run: JobRun) -> AsyncGenerator[Chunk, None]:
    print(job_run.record.id, flush=True)
    yield Chunk(text="half an", tokens=2)
    await anyio.sleep_forever()


async def main(url: str, prefix: str, lease_s: str) -> None:
    config = JobsConfig(redis=url, key_prefix=prefix, lease_s=float(lease_s))
    store = JobStore(RedisClient(config, SCRIPTS, clock=lambda: 1_800_000_000.0), config)
    worker = Worker(
        store, ScriptedRunner(half_answers), {"large": WorkerSlots("large", 2)}, config, JobMetrics(CollectorRegistry())
    )
    await worker.run(anyio.Event())


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
