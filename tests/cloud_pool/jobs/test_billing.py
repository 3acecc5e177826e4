"""Jobs are billed once for each accepted report, and their budget is reserved before they run: on a real Redis, with
workers that are killed.

The load: workers that take over each other's jobs, a worker that is killed after its reports, and more jobs than a
budget pays for.
"""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path

import aiohttp
import anyio
import anyio.lowlevel
import msgspec
import pytest
from prometheus_client import CollectorRegistry
from redis.exceptions import RedisError

from causeway_server.cloud_pool.accounts.tenants.usage import UsageBatch, read_usage, tenant_key
from causeway_server.cloud_pool.app import JobsGateway
from causeway_server.cloud_pool.jobs.http.job_api import JobCallers
from causeway_server.cloud_pool.jobs.worker.runner import JobRun
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.storage.job_store import JobStore
from causeway_server.cloud_pool.storage.outboxes import UsageOutbox
from causeway_server.cloud_pool.storage.record import NewJob, RunBill
from causeway_server.cloud_pool.storage.redis_client import RedisClient
from causeway_server.router.errors import CloudFailed, InvalidRequest
from causeway_server.router.jobs.job import JobState
from causeway_server.router.types import Chunk, Usage

from .billing import MOST_PICO_USD, RUN_PICO_USD, Books
from .conftest import Clock, until
from .gateway import identify, serving
from .scripted_worker import RunningWorker, Script, answers
from .test_api import TIER
from .test_crashes import ROOT

MakeJob = Callable[..., NewJob]
DAY = "2027-01-15"
_tenants = itertools.count()


@pytest.fixture
def tenant() -> str:
    """A tenant without usage."""
    return f"billed{next(_tenants)}"


@pytest.fixture
def new_job(new_job: MakeJob, tenant: str) -> MakeJob:
    return lambda **changes: new_job(**{"owner": f"{tenant}/kiosk", "deadline_ms": 10**15, **changes})


@pytest.fixture
async def books(config: JobsConfig) -> AsyncIterator[Books]:
    made = Books(str(config.redis))
    yield made
    await made.client.aclose()


class Bills:
    """What the tenant has paid for."""

    def __init__(self, database: RedisClient, books: Books, tenant: str) -> None:
        self.outbox = UsageOutbox(database, books.usage.add)
        self._books = books
        self._tenant = tenant

    async def read(self) -> tuple[int, int]:
        """Move the bills; return runs and 1e-12 USD."""
        assert await self.outbox.flush()
        rows = await read_usage(self._books.client, self._tenant, DAY)
        return sum(row.requests for row in rows), round(sum(row.usd for row in rows) * 1e12)


@pytest.fixture
def bills(database: RedisClient, books: Books, tenant: str) -> Bills:
    return Bills(database, books, tenant)


def working(
    store: JobStore, books: Books, config: JobsConfig, script: Script = answers, slots: int = 4
) -> RunningWorker:
    return RunningWorker(store, books.runner(script), config, slots)


async def all_in(store: JobStore, jobs: list[str], state: JobState = JobState.SUCCEEDED) -> None:
    async def condition() -> bool:
        records = [await store.lookup(job) for job in jobs]
        return all(record is not None and record.state is state for record in records)

    await until(condition)


async def test_a_takeover_is_billed_once(
    store: JobStore,
    books: Books,
    bills: Bills,
    config: JobsConfig,
    new_job: MakeJob,
    tmp_path: Path,
    database: RedisClient,
) -> None:
    """Its audit records say which run was superseded, and only the other has a cost."""
    job = (await store.accept(new_job())).id
    begun, go_on = anyio.Event(), anyio.Event()
    audited = Books(str(config.redis), audit=str(tmp_path / "audit"))

    async def slow(at: int, job_run: JobRun) -> AsyncGenerator[Chunk, None]:
        begun.set()
        with anyio.CancelScope(shield=True):  # it does not notice that it has lost its lease
            await go_on.wait()
        async for chunk in answers(at, job_run):
            yield chunk

    short = msgspec.structs.replace(config, lease_s=0.05, lease_check_s=1000.0)
    impatient = JobStore(database, short)
    async with working(impatient, audited, short, slow, slots=1):
        await begun.wait()
        async with working(impatient, books, short):
            await all_in(store, [job])
        go_on.set()
    assert await bills.read() == (1, RUN_PICO_USD)
    (row,) = audited.audited(tmp_path / "audit")
    assert (row["outcome"], row["completion_tokens"], row["pico_usd"]) == ("superseded", 2, 0)
    await audited.client.aclose()


async def killed_worker(config: JobsConfig, when: str, jobs: int) -> set[str]:
    """Run a worker process until it has printed so many jobs, then kill -9."""
    command = [sys.executable, "-m", "tests.cloud_pool.jobs.billing", str(config.redis), config.key_prefix, when]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    printed = {(await process.stdout.readline()).decode().strip() for _ in range(jobs)}
    process.kill()
    await process.wait()
    return printed


async def test_a_worker_that_is_killed_after_its_reports_loses_no_bill(
    store: JobStore, bills: Bills, config: JobsConfig, new_job: MakeJob
) -> None:
    jobs = {(await store.accept(new_job())).id for _ in range(20)}
    assert await killed_worker(config, "after", 20) == jobs
    assert await bills.read() == (20, 20 * RUN_PICO_USD)
    assert await bills.read() == (20, 20 * RUN_PICO_USD)


async def test_the_jobs_of_a_killed_worker_are_billed_once(
    store: JobStore, bills: Bills, config: JobsConfig, new_job: MakeJob, database: RedisClient, tenant: str
) -> None:
    """The run that ends a job takes over what the killed one had reserved: the budget is for just these jobs."""
    books = Books(str(config.redis), usd_per_day=4 * MOST_PICO_USD / 1e12)
    jobs = [(await store.accept(new_job())).id for _ in range(4)]
    assert await killed_worker(config, "during", 4) == set(jobs)
    short = msgspec.structs.replace(config, lease_s=2.0)
    async with working(JobStore(database, short), books, short):
        await all_in(store, jobs)
    assert await bills.read() == (4, 4 * RUN_PICO_USD)
    assert await books.client.exists(tenant_key(tenant, "budget")) == 0
    await books.client.aclose()


async def test_a_cancelled_run_costs_what_it_has_used(
    store: JobStore, bills: Bills, config: JobsConfig, new_job: MakeJob, tenant: str, tmp_path: Path
) -> None:
    """It gives back what it has reserved beyond that; its audit record says that its owner has left."""
    books = Books(str(config.redis), usd_per_day=MOST_PICO_USD / 1e12, audit=str(tmp_path / "audit"))
    job = (await store.accept(new_job())).id
    begun = anyio.Event()

    async def endless(_at: int, run: JobRun) -> AsyncGenerator[Chunk, None]:
        call = run.meter.sequence(0, 0).begin(5)
        yield Chunk(text="two", tokens=2)
        call.output_tokens = 2
        call.end()
        begun.set()
        await anyio.sleep_forever()

    async with working(store, books, config, endless):
        await begun.wait()
        assert await books.client.exists(tenant_key(tenant, "budget")) == 1
        await store.cancel(job, f"{tenant}/kiosk")
    await books.ledger.flush()
    assert await bills.read() == (1, RUN_PICO_USD)
    assert await books.client.exists(tenant_key(tenant, "budget")) == 0
    (row,) = books.audited(tmp_path / "audit")
    assert (row["outcome"], row["estimated"]) == ("client_gone", True)
    assert (row["prompt_tokens"], row["completion_tokens"], row["pico_usd"]) == (5, 2, RUN_PICO_USD)
    await books.client.aclose()


async def test_failed_runs_are_billed_too(
    store: JobStore, books: Books, bills: Bills, config: JobsConfig, new_job: MakeJob, clock: Clock
) -> None:
    """Each attempt that used the model; the dead letter's, too."""
    job = (await store.accept(new_job())).id

    async def breaks(_at: int, _run: JobRun) -> AsyncGenerator[Chunk, None]:
        yield Chunk(text="two", tokens=2)
        yield Chunk(usage=Usage(5, 2))
        raise CloudFailed("broken")

    async with working(store, books, config, breaks):

        async def dead() -> bool:
            clock.now += 1.0  # a retry is due
            record = await store.lookup(job)
            return record is not None and record.state is JobState.DEAD

        await until(dead)
    assert await bills.read() == (config.max_attempts, config.max_attempts * RUN_PICO_USD)


async def test_a_report_whose_reply_was_lost_is_billed_once(
    store: JobStore, bills: Bills, new_job: MakeJob, tenant: str
) -> None:
    """The worker repeats it, and it counts as accepted; an older run's report does not."""
    bill = RunBill(tenant, {"requests|large|job": 1, "pico_usd|large|job": 7, "pico_usd": 7}, "")
    jobs = [(await store.accept(new_job())).id for _ in range(3)]
    records = (await store.claim("w", "large", ["standard"] * 3)).records
    fences = {record.id: record.fence for record in records}
    for _ in range(2):
        assert await store.succeed(jobs[0], fences[jobs[0]], b"{}", bill=bill)
        assert await store.fail(jobs[1], fences[jobs[1]], InvalidRequest("no"), bill=bill)
        assert await store.postpone(jobs[2], fences[jobs[2]], CloudFailed("x"), 1.0, counts=True, bill=bill)
    assert not await store.succeed(jobs[2], fences[jobs[2]] - 1, b"{}", bill=bill)
    assert await bills.read() == (3, 21)


async def test_bills_reach_the_usage_once_whatever_happens_on_the_way(
    store: JobStore, books: Books, bills: Bills, database: RedisClient, new_job: MakeJob, tenant: str
) -> None:
    """Replies that get lost, a worker that is killed between two Redis, two workers at once, another tenant's day."""
    for number in range(30):
        job = (await store.accept(new_job(owner=f"{tenant}/kiosk" if number % 2 else "someone/1"))).id
        (record,) = (await store.claim("w", "large", ["standard"])).records
        bill = RunBill(record.owner.partition("/")[0], {"requests|large|job": 1, "pico_usd|large|job": 5}, "")
        assert await store.succeed(job, record.fence, b"{}", bill=bill)
        if number % 10 == 0:
            chance = itertools.cycle((True, False))

            async def lossy(batch: UsageBatch, chance: itertools.cycle[bool] = chance) -> None:
                await books.usage.add(batch)
                if next(chance):
                    raise RedisError("the reply was lost")

            assert not await UsageOutbox(database, lossy).flush()
    await asyncio.gather(*(UsageOutbox(database, books.usage.add).flush() for _ in range(5)))
    assert await bills.read() == (15, 75)


async def test_a_budget_for_one_job_lets_one_run(
    store: JobStore, bills: Bills, config: JobsConfig, new_job: MakeJob, database: RedisClient
) -> None:
    """Of 14 jobs on two workers: never two at once, and the budget is never overdrawn."""
    pays_for = MOST_PICO_USD + 3 * RUN_PICO_USD  # the first four
    books = [Books(str(config.redis), usd_per_day=pays_for / 1e12) for _ in range(2)]
    for _ in range(14):
        await store.accept(new_job())
    running, most, ended = 0, 0, 0

    async def counted(at: int, job_run: JobRun) -> AsyncGenerator[Chunk, None]:
        nonlocal running, most, ended
        running += 1
        most = max(most, running)
        await anyio.lowlevel.checkpoint()
        async for chunk in answers(at, job_run):
            yield chunk
        running -= 1
        ended += 1

    async with working(store, books[0], config, counted), working(store, books[1], config, counted):

        async def four_ended() -> bool:
            await bills.outbox.flush()
            await store.unblock_all()
            await store.promote_and_expire()
            return ended >= 4

        await until(four_ended)
    assert (most, ended) == (1, 4)
    assert await bills.read() == (4, 4 * RUN_PICO_USD)
    for each in books:
        await each.client.aclose()


async def test_a_job_that_could_never_run_within_the_budget_is_refused(config: JobsConfig, clock: Clock) -> None:
    """When it is submitted, with 400 that names both: not when it runs."""
    books = Books(str(config.redis), usd_per_day=MOST_PICO_USD / 1e12)
    tiers = {"large": TIER}
    gateway = JobsGateway(
        config, tiers, JobCallers(identify, check_cost=books.ledger.check_cost), CollectorRegistry(), clock=clock
    )
    body = {"model": "large", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 10**6}
    try:
        headers = {"authorization": "Bearer kiosk"}
        async with serving(gateway.api.handler) as url, aiohttp.ClientSession(url, headers=headers) as http:
            async with http.post("/v1/jobs", json=body) as response:
                fault = (await response.json())["error"]
                assert (response.status, fault["param"]) == (400, "max_tokens")
                assert "may cost up to 100 USD, and your budget is 0.01 USD a day" in fault["message"]
            async with http.post("/v1/jobs", json={**body, "max_tokens": 10}) as response:
                assert response.status == 202
    finally:
        await gateway.close()
        await books.client.aclose()
