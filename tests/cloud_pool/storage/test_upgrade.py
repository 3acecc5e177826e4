"""This version reads what the version that introduced the layout wrote: from a file, and beside it while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from causeway_server.cloud_pool.app import JobsGateway
from causeway_server.cloud_pool.background import WorkerRuntime
from causeway_server.cloud_pool.jobs.http.job_api import JobCallers
from causeway_server.cloud_pool.jobs.worker.execution import WorkerSlots
from causeway_server.cloud_pool.redis.keys import JOBS_LAYOUT
from causeway_server.cloud_pool.storage.stores import JobStores
from causeway_server.router.jobs.job import JobState
from tests.cloud_pool.jobs.conftest import Clock, until
from tests.cloud_pool.jobs.gateway import identify, serving
from tests.cloud_pool.jobs.scripted_worker import ScriptedRunner
from tests.redis_server import RedisServer

from .layout_records import CHAT, FOLDER, LINES, NAMES, TIERS, commands_of, config_of

PATIENCE_S = 60.0


class Restored:
    """A Redis with the records of the file, and their ids by name."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server
        with server.client() as client:
            for command in commands_of((FOLDER / f"{JOBS_LAYOUT}.resp").read_bytes()):
                client.execute_command(*command)
            self.ids = {name.decode(): value.decode() for name, value in client.hgetall("test").items()}
        self.clock = Clock()
        self.clock.now = float(self.ids.pop("now"))
        self.config = config_of(server.url)


@pytest.fixture
def restored(tmp_path: Path) -> Iterator[Restored]:
    server = RedisServer(tmp_path)
    yield Restored(server)
    server.kill()


@pytest_asyncio.fixture
async def stores(restored: Restored) -> AsyncIterator[JobStores]:
    stores = JobStores.open(restored.config, restored.clock)
    yield stores
    await stores.close()


def test_the_layout_has_a_file_of_records() -> None:
    """A change that raises the layout adds it: `python -m tests.cloud_pool.storage.layout_records`."""
    assert (FOLDER / f"{JOBS_LAYOUT}.resp").is_file()


async def _has_ended(stores: JobStores, job: str) -> bool:
    record = await stores.jobs.lookup(job)
    return record is not None and record.ended


async def _is_complete(stores: JobStores, batch: str) -> bool:
    found = await stores.batches.lookup(batch)
    return found is not None and found.state == "completed"


@pytest.mark.redis
async def test_records_of_the_first_version_of_the_layout_are_read(restored: Restored, stores: JobStores) -> None:
    await stores.durability.wait()
    expected = dict.fromkeys(NAMES, JobState.QUEUED) | {
        "succeeded": JobState.SUCCEEDED,
        "dead": JobState.DEAD,
        "waiting": JobState.WAITING,
        "limited": JobState.WAITING,
        "running": JobState.RUNNING,
    }
    for name, state in expected.items():
        record = await stores.jobs.lookup(restored.ids[name])
        assert record is not None
        assert record.state in (state, JobState.QUEUED), name
    assert await stores.jobs.read_result(restored.ids["succeeded"], "acme/1") == b'{"answer":1}'
    assert [letter.id for letter in await stores.jobs.dead_letters()] == [restored.ids["dead"]]
    batch = await stores.batches.lookup(restored.ids["batch"])
    assert batch is not None
    assert (batch.state, batch.total) == ("in_progress", LINES)


@pytest.mark.redis
@pytest.mark.slow
async def test_work_of_the_first_version_of_the_layout_is_finished(restored: Restored, stores: JobStores) -> None:
    """Running, waiting and limited jobs succeed, a dead letter is retried, the batch completes, keys are known."""
    gateway = JobsGateway(restored.config, TIERS, JobCallers(identify), CollectorRegistry(), clock=restored.clock)
    assert await stores.jobs.retry(restored.ids["dead"])
    restored.clock.now += 120.0

    def tick() -> float:
        restored.clock.now += 0.01
        return restored.clock.now

    runtime = WorkerRuntime(
        restored.config, TIERS, ScriptedRunner(), {"large": WorkerSlots("large", 4)}, CollectorRegistry(), clock=tick
    )
    stop = asyncio.Event()
    assert await runtime.start(stop)
    running = asyncio.ensure_future(runtime.run(stop))
    async with asyncio.timeout(PATIENCE_S):
        for name in NAMES:
            job = restored.ids[name]
            await until(lambda job=job: _has_ended(stores, job))  # type: ignore[misc]
            record = await stores.jobs.lookup(job)
            assert record is not None
            assert record.state is JobState.SUCCEEDED, name
        await until(lambda: _is_complete(stores, restored.ids["batch"]))
    batch = await stores.batches.lookup(restored.ids["batch"])
    assert batch is not None
    assert (batch.completed, batch.failed) == (LINES, 0)
    async with serving(gateway.api.handler) as url, aiohttp.ClientSession(url) as http:
        headers = {"authorization": "Bearer acme", "idempotency-key": "queued"}
        body = CHAT | {"webhook": "http://127.0.0.1:9/"}
        async with http.post("/v1/jobs", json=body, headers=headers) as response:
            assert (response.status, (await response.json())["id"]) == (202, restored.ids["queued"])
    stop.set()
    await running
    await runtime.close()
    await gateway.close()
