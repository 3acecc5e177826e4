"""A gateway and a whole worker in one process, which does what is due and prints what its runs saw.

    python -c "import time; …; from tests.cloud_pool.storage.wrong_clock_process import run; run()" CONFIG JOB…

CONFIG is a JobsConfig as JSON. The gateway accepts a job with an hour to live; then the worker works until this job,
each JOB and the batch `batch_1` have ended, and their webhooks are delivered. It prints as JSON the accepted job's id,
and the time in s that each run had left.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator

import aiohttp
import anyio
import msgspec
from prometheus_client import CollectorRegistry

from causeway_server.cloud_pool.app import JobsGateway
from causeway_server.cloud_pool.background import WorkerRuntime
from causeway_server.cloud_pool.jobs.http.job_api import JobCallers
from causeway_server.cloud_pool.jobs.worker.execution import WorkerSlots
from causeway_server.cloud_pool.jobs.worker.runner import JobRun
from causeway_server.cloud_pool.storage.batch_store import is_final
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.storage.stores import JobStores
from causeway_server.router.types import Chunk
from tests.cloud_pool.jobs.conftest import until
from tests.cloud_pool.jobs.gateway import identify, serving
from tests.cloud_pool.jobs.scripted_worker import ScriptedRunner, answers
from tests.cloud_pool.jobs.test_api import CHAT, TIER

TIERS = {"large": TIER, "big": TIER}
LEFT_MS = 3_600_000


async def submit(config: JobsConfig) -> str:
    """Submit a job to a gateway of this process. Returns its id."""
    gateway = JobsGateway(config, TIERS, JobCallers(identify), CollectorRegistry())
    headers, body = {"authorization": "Bearer acme"}, CHAT | {"deadline_ms": LEFT_MS}
    async with (
        serving(gateway.api.handler) as url,
        aiohttp.ClientSession(url, headers=headers) as http,
        http.post("/v1/jobs", json=body) as response,
    ):
        assert response.status == 202, await response.text()
        job = str((await response.json())["id"])
    await gateway.close()
    return job


async def work(config: JobsConfig, jobs: list[str]) -> dict[str, float]:
    """Run a worker until the jobs and the batch have ended. Returns the time that each run had left, s."""
    left_s: dict[str, float] = {}

    async def notes_and_answers(at: int, job_run: JobRun) -> AsyncGenerator[Chunk, None]:
        left_s[job_run.record.id] = job_run.deadline - time.monotonic()
        async for chunk in answers(at, job_run):
            yield chunk

    stores = JobStores.open(config)

    async def have_ended() -> bool:
        batch = await stores.batches.lookup("batch_1")
        records = [await stores.jobs.lookup(job) for job in jobs]
        return (
            batch is not None
            and is_final(batch.state)
            and all(record and record.ended for record in records)
            and all(not record.webhook or record.webhook_status == "delivered" for record in records if record)
        )

    runtime = WorkerRuntime(
        config, TIERS, ScriptedRunner(notes_and_answers), {"large": WorkerSlots("large", 4)}, CollectorRegistry()
    )
    stop = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(runtime.run, stop)
        await until(have_ended)
        await stores.jobs.promote_and_expire()
        stop.set()
    await runtime.close()
    await stores.close()
    return left_s


async def _main(config: JobsConfig, jobs: list[str]) -> None:
    job = await submit(config)
    print(json.dumps({"job": job, "left_s": await work(config, [job, *jobs])}))


def run() -> None:
    """The program."""
    asyncio.run(_main(msgspec.json.decode(sys.argv[1], type=JobsConfig), sys.argv[2:]))
