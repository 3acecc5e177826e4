"""Records that this version cannot read, on a real Redis: they stop no worker and no other job."""

from __future__ import annotations

from collections.abc import Callable

import aiohttp
import anyio
import msgspec
import pytest
from prometheus_client import CollectorRegistry

from causeway_server.cloud_pool.app import JobsGateway
from causeway_server.cloud_pool.background import WorkerRuntime
from causeway_server.cloud_pool.jobs.http.job_api import JobCallers
from causeway_server.cloud_pool.jobs.worker.execution import WorkerSlots
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.storage.job_store import JobStore
from causeway_server.cloud_pool.storage.record import NewJob
from causeway_server.cloud_pool.storage.redis_client import RedisClient
from causeway_server.cloud_pool.storage.stores import JobStores
from causeway_server.router.errors import CloudFailed, RecordUnreadable
from causeway_server.router.jobs.job import JobState
from tests.cloud_pool.jobs.conftest import Clock, until
from tests.cloud_pool.jobs.gateway import identify, serving
from tests.cloud_pool.jobs.scripted_worker import RunningWorker, ScriptedRunner
from tests.cloud_pool.jobs.test_api import TIER

MakeJob = Callable[..., NewJob]


async def succeeded(store: JobStore, job: str) -> bool:
    return (await store.get(job, "kiosk")).state is JobState.SUCCEEDED


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("endpoint", "/v1/images/generations"),
        ("state", "paused"),
        ("attempts", "many"),
        ("deadline", ""),
        ("webhook_status", b"\xff"),
        ("tier", None),
    ],
)
async def test_an_unreadable_job_is_a_dead_letter_and_the_worker_goes_on(
    store: JobStore, database: RedisClient, new_job: MakeJob, config: JobsConfig, field: str, value: str | bytes | None
) -> None:
    poison, other = (await store.accept(new_job())).id, (await store.accept(new_job())).id
    if value is None:
        await database.command("HDEL", database.key("job", poison), field)
    else:
        await database.command("HSET", database.key("job", poison), field, value)
    runner = ScriptedRunner()
    async with RunningWorker(store, runner, config) as worker:
        await until(lambda: succeeded(store, other))

        async def set_aside() -> bool:
            return worker.count("quarantined") == 1

        await until(set_aside)
    assert [one.record.id for one in runner.runs] == [other]
    (letter,) = await store.dead_letters()
    assert (letter.id, letter.code) == (poison, "record_unreadable")
    assert (await store.claim("w", "large", ["standard"])).records == ()


async def test_an_unreadable_job_runs_after_an_upgrade_and_retry(
    store: JobStore, database: RedisClient, new_job: MakeJob, config: JobsConfig
) -> None:
    job = (await store.accept(new_job())).id
    await database.command("HSET", database.key("job", job), "endpoint", "/v1/images/generations")
    assert (await store.claim("w", "large", ["standard"])).unreadable == (job,)
    await database.command("HSET", database.key("job", job), "endpoint", "/v1/chat/completions")  # readable now
    assert await store.retry(job)
    async with RunningWorker(store, ScriptedRunner(), config):
        await until(lambda: succeeded(store, job))


async def test_unreadable_batches_and_deliveries_stop_no_worker(
    stores: JobStores, config: JobsConfig, new_job: MakeJob, clock: Clock
) -> None:
    database, store = stores.database, stores.jobs
    delivered = (await store.accept(new_job(webhook="https://example.com/"))).id
    (record,) = (await store.claim("w", "large", ["standard"])).records
    await store.succeed(delivered, record.fence, b"{}")
    await database.command("HSET", database.key("webhook", f"{delivered}.1"), "finished", "soon")
    await database.command("HSET", database.key("batch", "batch_1"), "id", "batch_1", "state", "paused")
    await database.command("ZADD", database.key("batches"), 0, "batch_1")
    runtime = WorkerRuntime(
        config, {"large": TIER}, ScriptedRunner(), {"large": WorkerSlots("large", 4)}, CollectorRegistry(), clock=clock
    )
    stop = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(runtime.run, stop)

        async def tried() -> bool:
            due = int(str(await database.command("ZCOUNT", database.key("batches"), 0, 0)))
            return due == 0 and (await store.get(delivered, "kiosk")).webhook_status == "failed"

        await until(tried)
        job = (await store.accept(new_job())).id
        await until(lambda: succeeded(store, job))
        stop.set()
    await runtime.close()


async def test_the_api_lists_the_other_jobs_and_explains_an_unreadable_one(
    store: JobStore, database: RedisClient, new_job: MakeJob, config: JobsConfig, clock: Clock
) -> None:
    poison, other = (await store.accept(new_job())).id, (await store.accept(new_job())).id
    await database.command("HSET", database.key("job", poison), "priority", "urgent")
    assert [record.id for record in await store.list_owned("kiosk")] == [other]
    with pytest.raises(RecordUnreadable, match="priority"):
        await store.get(poison, "kiosk")
    gateway = JobsGateway(config, {"large": TIER}, JobCallers(identify), CollectorRegistry(), clock=clock)
    headers = {"authorization": "Bearer kiosk"}
    async with (
        serving(gateway.api.handler) as url,
        aiohttp.ClientSession(url, headers=headers) as http,
        http.get(f"/v1/jobs/{poison}") as response,
    ):
        assert (response.status, (await response.json())["error"]["code"]) == (500, "record_unreadable")
    await gateway.close()


async def test_the_api_lists_the_other_batches_when_one_is_unreadable(stores: JobStores) -> None:
    database = stores.database
    fields: dict[str, str | int] = {
        "owner": "kiosk",
        "input": "file-1",
        "endpoint": "/v1/chat/completions",
        "created": 0,
        "expires": 1,
    }
    for place, (name, state) in enumerate([("batch_1", "in_progress"), ("batch_2", "paused"), ("batch_4", "failed")]):
        values = [part for field in (fields | {"id": name, "state": state}).items() for part in field]
        await database.command("HSET", database.key("batch", name), *values)
        await database.command("ZADD", database.key("batches", "kiosk"), place, name)
    await database.command("ZADD", database.key("batches", "kiosk"), 9, "batch_3")  # its record has expired
    batches = await stores.batches.list_owned("kiosk", after="", limit=2)
    assert [batch.id for batch in batches] == ["batch_4", "batch_1"]
    assert [batch.id for batch in await stores.batches.list_owned("kiosk", after="batch_4", limit=2)] == ["batch_1"]
    assert await database.command("ZSCORE", database.key("batches", "kiosk"), "batch_3") is None


async def test_purge_leaves_the_error_file_of_a_batch_whole(
    stores: JobStores, config: JobsConfig, new_job: MakeJob, clock: Clock
) -> None:
    database = stores.database
    await database.command("HSET", database.key("batch", "batch_1"), "state", "in_progress", "submitted", 0)
    store = JobStore(database, msgspec.structs.replace(config, max_attempts=1))
    job = (await store.accept(new_job(id="job_1-1", batch="batch_1", line=1))).id
    (record,) = (await store.claim("w", "large", ["standard"])).records
    await store.postpone(job, record.fence, CloudFailed("the model failed"), 0, counts=True)
    before = await stores.batches.line_outcomes("batch_1", "kiosk", range(1, 2), 1000)
    assert await store.purge(job)
    assert await stores.batches.line_outcomes("batch_1", "kiosk", range(1, 2), 1000) == before
    assert before[0].state is JobState.DEAD
    assert await database.command("HEXISTS", database.key("job", job), "body") == 0
    assert await store.dead_letters() == []
    assert not await store.purge(job)


async def test_listing_reads_no_bodies(store: JobStore, database: RedisClient, new_job: MakeJob) -> None:
    await store.accept(new_job(body=b" " * 1_000_000))
    sent = await _bytes_sent(database)
    assert len(await store.list_owned("kiosk")) == 1
    assert await _bytes_sent(database) - sent < 100_000


async def _bytes_sent(database: RedisClient) -> int:
    stats = await database.command("INFO", "stats")
    assert isinstance(stats, bytes)
    return int(stats.partition(b"total_net_output_bytes:")[2].split()[0])
