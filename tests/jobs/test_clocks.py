"""A process whose clock is wrong by a day, on a real Redis: jobs follow Redis's clock."""

from __future__ import annotations

import asyncio
import sys
import time

import msgspec
import pytest

from cloud_pool.jobs.config import JobsConfig
from cloud_pool.jobs.record import NewJob
from cloud_pool.jobs.stores import JobStores
from router.jobs.states import JobState

from .conftest import BODY

# Runs as a process of its own, in which every module reads the wrong time.
WORKER = """
import asyncio, sys, time
right = time.time
time.time = lambda: right() + float(sys.argv[1])
import msgspec
from cloud_pool.jobs.config import JobsConfig
from cloud_pool.jobs.stores import JobStores

async def main():
    stores = JobStores.open(msgspec.json.decode(sys.argv[2], type=JobsConfig))
    await stores.jobs.promote_and_expire()
    for record in (await stores.jobs.claim("w", "large", ["standard"])).records:
        await stores.jobs.succeed(record.id, record.fence, b"{}")
    await stores.close()

asyncio.run(main())
"""


@pytest.mark.parametrize("wrong_by_s", [86_400, -86_400])
async def test_a_worker_with_a_wrong_clock_expires_no_job(config: JobsConfig, wrong_by_s: int) -> None:
    stores = JobStores.open(config)
    now_ms = int(time.time() * 1000)
    job = NewJob(
        id="job_1",
        owner="kiosk",
        tier="large",
        priority="standard",
        endpoint="/v1/chat/completions",
        body=BODY,
        deadline_ms=now_ms + 3_600_000,
    )
    await stores.jobs.accept(job)
    arguments = (str(wrong_by_s), msgspec.json.encode(config).decode())
    worker = await asyncio.create_subprocess_exec(sys.executable, "-c", WORKER, *arguments)
    assert await worker.wait() == 0
    record = await stores.jobs.get("job_1", "kiosk")
    await stores.close()
    assert record.state is JobState.SUCCEEDED
    assert record.started is not None
    assert record.finished is not None
    assert now_ms - 60_000 < record.created <= record.started <= record.finished < now_ms + 600_000
