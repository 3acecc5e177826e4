"""One tenant's huge batches beside other tenants, on a real Redis: intake and work of the others go on.

The user's load: a tenant with as many batches of thousands of lines as it may have, and others with a few jobs each.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import anyio
import msgspec
import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from causeway_server.cloud_pool.app import JobsGateway
from causeway_server.cloud_pool.batches.processor import BatchProcessor
from causeway_server.cloud_pool.jobs.http.job_api import JobCallers
from causeway_server.cloud_pool.jobs.submission import SubmissionParser
from causeway_server.cloud_pool.storage.batch_store import is_final
from causeway_server.cloud_pool.storage.config import BatchConfig, JobsConfig
from causeway_server.cloud_pool.storage.stores import JobStores
from tests.cloud_pool.jobs.conftest import Clock
from tests.cloud_pool.jobs.gateway import identify, serving
from tests.cloud_pool.jobs.test_api import TIER

from .batch_support import answer_jobs, create_from, custom_ids, input_file, upload

BATCHES = 20
LINES = 1000
OPEN_JOBS = 10


@pytest.fixture
def config(config: JobsConfig) -> JobsConfig:
    """The queue is too small for the lines, and large enough for what is open of them."""
    batches = BatchConfig(max_open_jobs=OPEN_JOBS)
    return msgspec.structs.replace(config, batches=batches, max_queued=500, min_queued_per_tenant=1)


@pytest_asyncio.fixture
async def flooded(stores: JobStores, config: JobsConfig, clock: Clock) -> AsyncIterator[BatchProcessor]:
    """A tenant has all the batches that it may have, and every one has as many jobs as it may have."""
    processor = BatchProcessor(stores, SubmissionParser(config, {"large": TIER}), config)
    file = await upload(stores, input_file(LINES), "greedy/1")
    for at in range(BATCHES):
        await create_from(stores, file, f"batch_{at}")
    for _ in range(3 * BATCHES):
        await processor.step()
        clock.now += 0.05
    yield processor


@pytest.mark.slow
async def test_huge_batches_leave_room_in_the_queue_for_other_tenants(
    flooded: BatchProcessor, stores: JobStores, config: JobsConfig, clock: Clock
) -> None:
    (depth,) = (await stores.jobs.depths()).queues
    assert depth.queued == BATCHES * OPEN_JOBS < config.max_queued
    gateway = JobsGateway(config, {"large": TIER}, JobCallers(identify), CollectorRegistry(), clock=clock)
    body = {"model": "large", "messages": [{"role": "user", "content": "hi"}], "priority": "bulk"}
    async with serving(gateway.api.handler) as url, aiohttp.ClientSession(url) as http:
        for at in range(100):
            headers = {"authorization": f"Bearer quiet-{at % 5}"}
            async with http.post("/v1/jobs", json=body, headers=headers) as response:
                assert response.status == 202, await response.text()
    await gateway.close()


@pytest.mark.slow
async def test_a_small_batch_ends_while_huge_ones_of_another_tenant_go_on(
    flooded: BatchProcessor, stores: JobStores, clock: Clock
) -> None:
    """Its ten lines take turns with the other tenant's lines, of which there are twenty thousand."""
    small = await create_from(stores, await upload(stores, input_file(10), "quiet/1"), "batch_small")
    greedy_runs = 0
    with anyio.fail_after(60.0):
        while not is_final(small.state):
            await flooded.step()
            clock.now += 0.1
            greedy_runs += sum("small" not in job for job in await answer_jobs(stores, 4))
            small = await stores.batches.get("batch_small", "quiet/1")
    assert len(await custom_ids(stores, small, "output")) == 10
    assert greedy_runs < BATCHES * LINES / 10
