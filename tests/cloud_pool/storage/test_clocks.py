"""A gateway and a worker whose clock is wrong by a day, on a real Redis: jobs follow Redis's clock."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.storage.record import JobRecord, NewJob
from causeway_server.cloud_pool.storage.stores import JobStores
from causeway_server.router.errors import BackendError
from causeway_server.router.jobs.job import JobState
from tests.cloud_pool.batches.batch_support import create_batch
from tests.cloud_pool.jobs.conftest import BODY
from tests.cloud_pool.jobs.test_webhooks import LOOPBACK
from tests.cloud_pool.jobs.webhook_receiver import Receiver, receiving

from .wrong_clock_process import LEFT_MS

pytestmark = [pytest.mark.redis, pytest.mark.slow]
ROOT = Path(__file__).parents[3]
LATER_S = 1800.0
SLACK_S = 600.0  # what a test may take on a busy machine
# Every module that reads the time is imported after it is wrong.
PROGRAM = """
import sys, time
right, wrong_by_s = time.time, float(sys.argv.pop(1))
time.time = lambda: right() + wrong_by_s
from tests.cloud_pool.storage.wrong_clock_process import run
run()
"""


@pytest.fixture
async def punctual(config: JobsConfig) -> AsyncIterator[JobStores]:
    """The stores of a process whose clock is right."""
    stores = JobStores.open(config)
    yield stores
    await stores.close()


@pytest.fixture
def config(config: JobsConfig) -> JobsConfig:
    """Leases and runs may take longer than any test, so that only a wrong clock can end them."""
    return msgspec.structs.replace(config, lease_s=LATER_S, attempt_timeout_s=1e6, webhooks=LOOPBACK)


async def accept(stores: JobStores, name: str, receiver: Receiver) -> None:
    job = NewJob(
        id=name,
        owner="acme/1",
        tier="large",
        priority="standard",
        endpoint="/v1/chat/completions",
        body=BODY,
        deadline_ms=await stores.database.now_ms() + LEFT_MS,
        webhook=f"http://127.0.0.1:{receiver.port}/",
    )
    await stores.jobs.accept(job)


async def claim(stores: JobStores, name: str, receiver: Receiver) -> JobRecord:
    await accept(stores, name, receiver)
    (record,) = (await stores.jobs.claim("another", "large", ["standard"])).records
    assert record.id == name
    return record


@pytest.mark.parametrize("wrong_by_s", [86_400, -86_400])
async def test_a_wrong_clock_expires_no_job_and_does_nothing_early(
    config: JobsConfig, punctual: JobStores, wrong_by_s: int
) -> None:
    """Neither of this process nor of others: jobs, retries, leases, a batch and webhooks."""
    stores = punctual
    async with receiving() as receiver:
        leased = await claim(stores, "job_leased", receiver)
        waiting = await claim(stores, "job_waiting", receiver)
        await stores.jobs.postpone("job_waiting", waiting.fence, BackendError("later"), LATER_S, counts=True)
        ended = await claim(stores, "job_ended", receiver)
        await stores.jobs.succeed("job_ended", ended.fence, b"{}")
        (delivery,) = await stores.outbox.claim(10)
        await stores.outbox.finish(delivery, "retried", LATER_S)
        await accept(stores, "job_queued", receiver)
        await create_batch(stores, 2)
        now_ms = await stores.database.now_ms()
        command = [sys.executable, "-c", PROGRAM, str(wrong_by_s), msgspec.json.encode(config).decode(), "job_queued"]
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
        printed, _ = await process.communicate()
        assert process.returncode == 0
    found = json.loads(printed)
    states = {JobState.RUNNING: "job_leased", JobState.WAITING: "job_waiting", JobState.SUCCEEDED: "job_queued"}
    for state, name in states.items():
        assert (await stores.jobs.get(name, "acme/1")).state is state
    assert (await stores.jobs.get("job_leased", "acme/1")).fence == leased.fence
    accepted = await stores.jobs.get(found["job"], "acme/1")
    assert 0 <= LEFT_MS - (accepted.deadline - accepted.created) < SLACK_S * 1000
    assert accepted.started is not None
    assert accepted.finished is not None
    assert now_ms <= accepted.created <= accepted.started <= accepted.finished < now_ms + SLACK_S * 1000
    for name in ("job_queued", found["job"]):
        assert 0 <= LEFT_MS / 1000 - found["left_s"][name] < SLACK_S
    batch = await stores.batches.lookup("batch_1")
    assert batch is not None
    assert (batch.state, batch.completed) == ("completed", 2)
    assert set(receiver.ids_by_job) == {"job_queued"}
    for headers, _ in receiver.arrived:
        assert abs(int(headers["webhook-timestamp"]) - now_ms / 1000) < SLACK_S
