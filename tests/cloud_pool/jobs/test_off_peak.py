"""Off-peak hours: by a wall clock whose time is Redis's, also in the nights in which it is changed."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from datetime import datetime
from functools import partial

import aiohttp
import anyio
import msgspec
import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from causeway_server.cloud_pool.accounts.tenants.config import TenantLimits
from causeway_server.cloud_pool.app import JobsGateway
from causeway_server.cloud_pool.batches.processor import BatchProcessor
from causeway_server.cloud_pool.jobs.http.job_api import JobCallers
from causeway_server.cloud_pool.jobs.submission import SubmissionParser
from causeway_server.cloud_pool.jobs.worker.runner import JobRun
from causeway_server.cloud_pool.storage.config import JobsConfig, OffPeakConfig, OffPeakHours
from causeway_server.cloud_pool.storage.job_store import JobStore
from causeway_server.cloud_pool.storage.stores import JobStores
from causeway_server.cloud_pool.tiers.config import TierConfig
from causeway_server.cloud_pool.tiers.tier import ChatFormat, Tier
from causeway_server.router.errors import ConfigError
from causeway_server.router.jobs.job import JobState
from causeway_server.router.openai.chat import parse_chat
from causeway_server.router.types import Chunk, RoutingHints
from tests.cloud_pool.batches.batch_support import upload

from .billing import RUN_PICO_USD, Books
from .conftest import BODY, Clock, until
from .gateway import identify, serving
from .redis_server import RedisServer
from .scripted_worker import RunningWorker, ScriptedRunner, answers, running_record

BERLIN = OffPeakConfig(hours="22:00-06:00", timezone="Europe/Berlin", price_share=0.25)
TIERS = {"large": Tier(TierConfig(name="large"), ChatFormat("{{ messages }}"))}
CHAT = {"model": "large", "messages": [{"role": "user", "content": "hi"}]}
OWNER = "acme/1"
NIGHTLY = "sleeper"
HOUR_MS = 3_600_000


def unix_ms(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp() * 1000)


@pytest.mark.parametrize(
    ("hours", "zone", "now", "start", "end"),
    [
        ("22:00-06:00", "UTC", "2027-05-01T12:00Z", "2027-05-01T22:00Z", "2027-05-02T06:00Z"),
        ("22:00-06:00", "UTC", "2027-05-01T05:59:59Z", "2027-04-30T22:00Z", "2027-05-01T06:00Z"),
        ("22:00-06:00", "UTC", "2027-05-01T06:00Z", "2027-05-01T22:00Z", "2027-05-02T06:00Z"),
        ("01:00-05:30", "Asia/Kolkata", "2027-05-01T12:00Z", "2027-05-01T19:30Z", "2027-05-02T00:00Z"),
        # The night to summer time has seven hours, the one to winter time nine.
        ("22:00-06:00", "Europe/Berlin", "2027-03-27T12:00Z", "2027-03-27T21:00Z", "2027-03-28T04:00Z"),
        ("22:00-06:00", "Europe/Berlin", "2027-10-30T12:00Z", "2027-10-30T20:00Z", "2027-10-31T05:00Z"),
        # 02:30 does not exist in one of them, and comes twice in the other.
        ("02:30-05:00", "Europe/Berlin", "2027-03-27T23:30Z", "2027-03-28T01:30Z", "2027-03-28T03:00Z"),
        ("02:30-05:00", "Europe/Berlin", "2027-10-30T23:30Z", "2027-10-31T00:30Z", "2027-10-31T04:00Z"),
    ],
)
def test_the_hours_are_a_wall_clocks(hours: str, zone: str, now: str, start: str, end: str) -> None:
    off_peak = OffPeakHours(OffPeakConfig(hours=hours, timezone=zone))
    first, second, *_ = off_peak.windows(unix_ms(now))
    assert (first.start, first.end) == (unix_ms(start), unix_ms(end))
    assert first.end < second.start <= first.start + 25 * HOUR_MS
    assert off_peak.wait_ms(unix_ms(now)) == max(0, unix_ms(start) - unix_ms(now))


@pytest.mark.parametrize(
    ("config", "where"),
    [
        (OffPeakConfig(hours="22-6"), "jobs.off_peak.hours"),
        (OffPeakConfig(hours="24:00-06:00"), "jobs.off_peak.hours"),
        (OffPeakConfig(hours="06:00-06:00"), "jobs.off_peak.hours"),
        (OffPeakConfig(hours="22:00-06:00", timezone="Mars/Olympus"), "jobs.off_peak.timezone"),
        (OffPeakConfig(hours="22:00-06:00", timezone="../etc/passwd"), "jobs.off_peak.timezone"),
    ],
)
def test_unusable_hours_are_a_config_error(config: OffPeakConfig, where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        OffPeakHours(config)
    assert caught.value.where == where


# --- jobs -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def night(config: JobsConfig, clock: Clock) -> JobsConfig:
    """A configuration with off-peak hours; it is noon."""
    clock.now = unix_ms("2027-05-01T12:00+02:00") / 1000.0
    return msgspec.structs.replace(config, off_peak=BERLIN)


@pytest_asyncio.fixture
async def nightly(night: JobsConfig, clock: Clock) -> AsyncIterator[JobStores]:
    stores = JobStores.open(night, clock)
    yield stores
    await stores.close()


@pytest_asyncio.fixture
async def http(night: JobsConfig, clock: Clock) -> AsyncIterator[aiohttp.ClientSession]:
    gateway = JobsGateway(
        night,
        TIERS,
        JobCallers(identify, limits=lambda principal: TenantLimits(off_peak=principal.tenant == NIGHTLY)),
        CollectorRegistry(),
        clock=clock,
    )
    async with (
        serving(gateway.api.handler) as url,
        aiohttp.ClientSession(url, headers={"authorization": "Bearer acme"}) as session,
    ):
        yield session
    await gateway.close()


async def submit(
    http: aiohttp.ClientSession, *, tenant: str = "acme", **fields: object
) -> tuple[int, dict[str, object]]:
    headers = {"authorization": f"Bearer {tenant}"}
    async with http.post("/v1/jobs", json=CHAT | fields, headers=headers) as response:
        return response.status, await response.json()


async def test_a_job_waits_for_the_off_peak_hours_and_runs_in_them(
    http: aiohttp.ClientSession, nightly: JobStores, night: JobsConfig, clock: Clock
) -> None:
    """Also one of a tenant that has all its jobs there; others run at once. No attempt is lost."""
    jobs = [(await submit(http, window="off_peak"))[1], (await submit(http, tenant=NIGHTLY))[1]]
    plain = (await submit(http))[1]
    runner, store = ScriptedRunner(), nightly.jobs
    async with RunningWorker(store, runner, night):
        for job in jobs:
            await until(partial(_is, store, str(job["id"]), JobState.WAITING))
        await until(lambda: _is(store, str(plain["id"]), JobState.SUCCEEDED))
        clock.now = unix_ms("2027-05-01T21:59:59+02:00") / 1000.0
        await store.promote_and_expire()
        assert await _is(store, str(jobs[0]["id"]), JobState.WAITING)
        clock.now += 1.0
        for job in jobs:
            await until(partial(_is, store, str(job["id"]), JobState.SUCCEEDED))
    assert [run.price_share for run in runner.runs] == [1.0, 0.25, 0.25]
    record = await store.lookup(str(jobs[0]["id"]))
    assert record is not None
    assert (record.attempts, record.postponed) == (1, 0)


async def test_a_job_that_runs_when_the_hours_end_goes_on_and_queued_ones_wait(
    http: aiohttp.ClientSession, nightly: JobStores, night: JobsConfig, clock: Clock
) -> None:
    clock.now = unix_ms("2027-05-02T05:59+02:00") / 1000.0
    running, queued = [str((await submit(http, window="off_peak"))[1]["id"]) for _ in range(2)]
    go, store = anyio.Event(), nightly.jobs

    async def held_back(at: int, run: JobRun) -> AsyncGenerator[Chunk, None]:
        await go.wait()
        async for chunk in answers(at, run):
            yield chunk

    runner = ScriptedRunner(held_back)
    async with RunningWorker(store, runner, night, slots=1):
        await until(lambda: _is(store, running, JobState.RUNNING))
        clock.now += 120.0
        go.set()
        await until(lambda: _is(store, running, JobState.SUCCEEDED))
        await until(lambda: _is(store, queued, JobState.WAITING))
        assert [run.price_share for run in runner.runs] == [0.25]
        clock.now = unix_ms("2027-05-02T22:00+02:00") / 1000.0
        await until(lambda: _is(store, queued, JobState.SUCCEEDED))


async def test_the_deadline_of_an_off_peak_job_leaves_time_for_it(http: aiohttp.ClientSession, clock: Clock) -> None:
    status, job = await submit(http, window="off_peak")
    assert (status, int(str(job["deadline_at"])) - int(clock.now)) == (202, (10 + 24) * 3600)
    status, refused = await submit(http, window="off_peak", deadline_ms=10 * HOUR_MS)
    assert (status, "before the off-peak hours" in str(refused)) == (400, True)
    status, refused = await submit(http, window="weekend")
    assert (status, "window" in str(refused)) == (400, True)


async def test_a_job_is_queued_at_its_not_before(
    http: aiohttp.ClientSession, nightly: JobStores, night: JobsConfig, clock: Clock
) -> None:
    """Off-peak hours count as well. Without a deadline of its own it has the default one from then on."""
    status, job = await submit(http, not_before_ms=HOUR_MS)
    hour, start = 3600, int(clock.now)
    assert (status, job["status"], job["not_before_at"]) == (202, "waiting", start + hour)
    assert job["deadline_at"] == start + 25 * hour
    late = (await submit(http, not_before_ms=HOUR_MS, window="off_peak"))[1]
    assert late["deadline_at"] == start + (10 + 24) * hour
    runner, store = ScriptedRunner(), nightly.jobs
    async with RunningWorker(store, runner, night):
        at_once = (await submit(http))[1]
        await until(lambda: _is(store, str(at_once["id"]), JobState.SUCCEEDED))
        assert await _is(store, str(job["id"]), JobState.WAITING)
        clock.now += float(hour)
        await until(lambda: _is(store, str(job["id"]), JobState.SUCCEEDED))
        clock.now = unix_ms("2027-05-01T22:00+02:00") / 1000.0
        await until(lambda: _is(store, str(late["id"]), JobState.SUCCEEDED))
    assert [run.price_share for run in runner.runs] == [1.0, 1.0, 0.25]


async def test_without_off_peak_hours_nothing_may_ask_for_them(config: JobsConfig, clock: Clock) -> None:
    gateway = JobsGateway(config, TIERS, JobCallers(identify), CollectorRegistry(), clock=clock)
    async with serving(gateway.api.handler) as url, aiohttp.ClientSession(url) as session:
        status, refused = await submit(session, window="off_peak")
        batch = {"input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        headers = {"authorization": "Bearer acme"}
        async with session.post("/v1/batches", json=batch | {"window": "off_peak"}, headers=headers) as response:
            assert (status, response.status) == (400, 400)
            assert "jobs.off_peak.hours" in await response.text()
    assert "jobs.off_peak.hours" in str(refused)
    await gateway.close()


async def test_the_lines_of_an_off_peak_batch_wait(
    http: aiohttp.ClientSession, nightly: JobStores, night: JobsConfig, clock: Clock
) -> None:
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}
    file = await upload(nightly, json.dumps(line).encode())
    batch = {"input_file_id": file.id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    async with http.post("/v1/batches", json=batch | {"window": "off_peak"}) as response:
        assert response.status == 200, await response.text()
    processor = BatchProcessor(nightly, SubmissionParser(night, TIERS), night)
    for _ in range(3):
        await processor.step()
        clock.now += 1.0
    assert (await nightly.jobs.claim("w", "large", ["bulk"])).records == ()
    assert (await nightly.jobs.depths()).waiting == 1
    clock.now = unix_ms("2027-05-01T22:00+02:00") / 1000.0
    await nightly.jobs.promote_and_expire()
    (record,) = (await nightly.jobs.claim("w", "large", ["bulk"])).records
    assert record.window == "off_peak"


async def test_a_run_in_off_peak_hours_costs_its_share(redis_server: RedisServer, nightly: JobStores) -> None:
    books = Books(redis_server.url)
    run = JobRun(
        record=running_record("job_1", "offpeak/1", fence=1),
        request=parse_chat(BODY, RoutingHints(client="offpeak/1")),
        body_bytes=10,
        deadline=float("inf"),
        price_share=0.25,
    )
    async for _ in books.runner().run(run):
        pass
    assert run.receipt.bill is not None
    assert run.receipt.bill.amounts["pico_usd"] == RUN_PICO_USD // 4
    run.receipt.close(accepted=True)
    books.audit.close()
    await books.client.aclose()


async def _is(store: JobStore, job: str, state: JobState) -> bool:
    record = await store.lookup(job)
    return record is not None and record.state is state
