"""Receivers that hang or fail hold back no other: slots by tenant and receiver, and a breaker for each.

The load: three tenants with hundreds of deliveries each; one tenant's receiver accepts connections and never answers.
The clock stands still unless a test moves it, so that nothing here waits for a time.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import anyio
import msgspec
import pytest
from prometheus_client import CollectorRegistry

from causeway_server.cloud_pool.jobs.metrics import JobMetrics
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.storage.job_store import JobStore
from causeway_server.cloud_pool.storage.outboxes import BREAKER_FAILURES, BREAKER_PAUSE_S, WebhookDelivery
from causeway_server.cloud_pool.storage.redis_client import RedisClient, as_list, as_text
from causeway_server.router.serving.webhooks import WebhookSender

from .conftest import until
from .test_crashes import ROOT
from .test_webhooks import LOOPBACK, WebhookBed, url
from .test_webhooks import bed as bed  # a fixture
from .test_webhooks import receiver as receiver  # a fixture
from .webhook_receiver import Receiver, receiving

PATIENT = msgspec.structs.replace(LOOPBACK, timeout_s=600.0)
DELIVERIES = 120  # to each receiver; more than a worker has slots


@pytest.fixture
def hanging_port() -> Iterator[int]:
    """A port of every loopback address that accepts connections and never answers."""
    with socket.socket() as listening:
        listening.bind(("0.0.0.0", 0))
        listening.listen(1000)
        yield listening.getsockname()[1]


@asynccontextmanager
async def running(sender: WebhookSender[WebhookDelivery]) -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sender.run)
        yield
        tasks.cancel_scope.cancel()


async def got(receiver: Receiver, jobs: set[str]) -> None:
    async def all_arrived() -> bool:
        return receiver.ids_by_job.keys() >= jobs

    await until(all_arrived)


async def test_a_receiver_that_hangs_holds_back_no_other_tenant(
    bed: WebhookBed, receiver: Receiver, hanging_port: int
) -> None:
    for _ in range(DELIVERIES):
        await bed.ended_job(f"http://127.0.0.1:{hanging_port}/", "slow/1")
    async with receiving() as third:
        second_jobs = {await bed.ended_job(url(receiver), "second/1") for _ in range(DELIVERIES)}
        third_jobs = {await bed.ended_job(url(third), "third/1") for _ in range(DELIVERIES)}
        async with running(bed.sender(PATIENT)):
            await got(receiver, second_jobs)
            await got(third, third_jobs)


async def test_a_receiver_that_hangs_holds_back_no_other_of_its_tenant(
    bed: WebhookBed, receiver: Receiver, hanging_port: int
) -> None:
    for _ in range(DELIVERIES):
        await bed.ended_job(f"http://127.0.0.1:{hanging_port}/")
    jobs = {await bed.ended_job(url(receiver)) for _ in range(DELIVERIES)}
    async with running(bed.sender(PATIENT)):
        await got(receiver, jobs)


async def test_a_tenant_with_many_receivers_that_hang_holds_back_no_other(
    bed: WebhookBed, receiver: Receiver, hanging_port: int
) -> None:
    for number in range(DELIVERIES):
        await bed.ended_job(f"http://127.0.1.{number}:{hanging_port}/", "slow/1")
    jobs = {await bed.ended_job(url(receiver), "other/1") for _ in range(DELIVERIES)}
    async with running(bed.sender(PATIENT)):
        await got(receiver, jobs)


async def test_one_slot_is_enough_for_a_fast_receiver(
    bed: WebhookBed, receiver: Receiver, database: RedisClient
) -> None:
    """A released slot is used at once: the clock stands still, so no delivery waits for a time. Redis keeps nothing."""
    jobs = {await bed.ended_job(url(receiver)) for _ in range(DELIVERIES)}
    async with running(bed.sender(msgspec.structs.replace(PATIENT, concurrency_per_receiver=1))):
        await got(receiver, jobs)

        async def forgotten() -> bool:
            secret, count = database.key("webhook_secret", "kiosk"), database.key("webhooks_pending")
            return await webhook_keys(database) == {secret, count}

        await until(forgotten)
    assert receiver.deliveries == DELIVERIES


async def webhook_keys(database: RedisClient) -> set[str]:
    found: set[str] = set()
    cursor = "0"
    while True:
        reply = await database.command("SCAN", cursor, "MATCH", database.key("webhook*"), "COUNT", 1000)
        position, keys = as_list(reply)
        cursor = as_text(position)
        found |= {as_text(key) for key in as_list(keys)}
        if cursor == "0":
            return found


async def test_slots_are_bounded_over_all_workers(bed: WebhookBed, hanging_port: int) -> None:
    """By receiver and by tenant; a slot is released when the lease of its worker ends."""
    for number in range(2):
        for _ in range(40):
            await bed.ended_job(f"http://127.0.0.{number + 1}:{hanging_port}/", "acme/1")
    bed.sender(msgspec.structs.replace(LOOPBACK, concurrency_per_receiver=10, concurrency_per_tenant=15))
    claimed = [await bed.outbox.claim(6) for _ in range(8)]
    assert sum(len(each) for each in claimed) == 15
    by_receiver = [sum(f"127.0.0.{number}:" in one.url for each in claimed for one in each) for number in (1, 2)]
    assert max(by_receiver) <= 10
    bed.clock.now += 60.0
    assert len(await bed.outbox.claim(64)) == 15


class Gauges:
    """The metrics of webhook receivers, by the state of their breaker."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._registry = CollectorRegistry()
        self._metrics = JobMetrics(self._registry)

    async def read(self) -> dict[str, int]:
        self._metrics.set_depths(depths := await self._store.depths(), depths.now_ms)
        name = "causeway_jobs_webhook_receivers"
        states = ("closed", "open", "half_open")
        return {
            state: int(value) for state in states if (value := self._registry.get_sample_value(name, {"state": state}))
        }


async def test_a_breaker_opens_half_opens_and_closes(bed: WebhookBed, receiver: Receiver, store: JobStore) -> None:
    """Deliveries that wait for it lose no attempt, and another tenant at the same receiver has its own breaker."""
    sender, gauges = (
        bed.sender(msgspec.structs.replace(LOOPBACK, concurrency_per_receiver=BREAKER_FAILURES)),
        Gauges(store),
    )
    receiver.status = 503
    jobs = [await bed.ended_job(url(receiver)) for _ in range(4 * BREAKER_FAILURES)]
    assert await gauges.read() == {"closed": 1}
    assert await sender.deliver_due() == BREAKER_FAILURES
    assert await gauges.read() == {"open": 1}
    bed.clock.now += BREAKER_PAUSE_S - 0.001
    assert await sender.deliver_due() == 0
    other = await bed.ended_job(url(receiver), "other/1")
    assert await gauges.read() == {"closed": 1, "open": 1}
    receiver.status = 200
    assert await sender.deliver_due() == 1
    assert await bed.status(other, "other/1") == "delivered"
    assert await sender.deliver_due() == 0
    receiver.status = 503
    bed.clock.now += 0.001
    assert await gauges.read() == {"half_open": 1}
    assert await sender.deliver_due() == 1
    assert await gauges.read() == {"open": 1}
    bed.clock.now += BREAKER_PAUSE_S
    receiver.status = 200
    assert await sender.deliver_due() == 1
    assert await gauges.read() == {"closed": 1}
    assert await sender.deliver_due() == BREAKER_FAILURES
    bed.clock.now += 600.0
    while await sender.deliver_due():
        pass
    assert {await bed.status(job) for job in jobs} == {"delivered"}
    assert await gauges.read() == {}


async def test_an_open_breaker_keeps_no_delivery_for_ever(bed: WebhookBed, receiver: Receiver, store: JobStore) -> None:
    """Of 300 deliveries to a dead receiver, most are never sent; after four days they have failed."""
    sender, gauges = bed.sender(), Gauges(store)
    receiver.status = 500
    jobs = [await bed.ended_job(url(receiver)) for _ in range(300)]
    await sender.deliver_due()
    bed.clock.now += 4 * 86_400 + 1.0
    assert await sender.deliver_due() == 0
    assert {await bed.status(job) for job in jobs} == {"failed"}
    assert receiver.deliveries == LOOPBACK.concurrency_per_receiver
    assert await gauges.read() == {}


async def test_a_killed_worker_loses_no_delivery(
    bed: WebhookBed, receiver: Receiver, hanging_port: int, config: JobsConfig
) -> None:
    """kill -9 amid deliveries of three tenants, one of whose receivers hangs: each arrives, always with the same id."""
    jobs = {await bed.ended_job(url(receiver), f"tenant{number % 2}/1") for number in range(4 * DELIVERIES)}
    hung = [await bed.ended_job(f"http://127.0.0.1:{hanging_port}/", "slow/1") for _ in range(DELIVERIES)]
    command = [sys.executable, "-m", "tests.cloud_pool.jobs.webhook_process", str(config.redis), config.key_prefix]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stderr=subprocess.DEVNULL)

    async def some_arrived() -> bool:
        return receiver.deliveries >= DELIVERIES

    await until(some_arrived)
    process.kill()
    await process.wait()
    bed.clock.now += PATIENT.timeout_s + 60.0  # the end of its leases
    async with running(bed.sender(PATIENT)):
        await got(receiver, jobs)
    assert {len(ids) for ids in receiver.ids_by_job.values()} == {1}
    assert {await bed.status(job, "slow/1") for job in hung} == {"pending"}
