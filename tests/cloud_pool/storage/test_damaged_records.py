"""One damaged or lost record holds back no other: webhooks, batches, usage, limits, on a real Redis."""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator

import anyio
import msgspec
import pytest
import pytest_asyncio
import redis.asyncio
from aiohttp.abc import ResolveResult

from causeway_server.cloud_pool.accounts.tenants.config import TenantLimits, TenantsConfig
from causeway_server.cloud_pool.accounts.tenants.rate_limiter import TenantRateLimiter
from causeway_server.cloud_pool.accounts.tenants.usage import (
    Charge,
    Demand,
    Reservation,
    UsageBatch,
    UsageRecorder,
    read_usage,
    tenant_key,
)
from causeway_server.cloud_pool.batches.processor import BatchProcessor
from causeway_server.cloud_pool.jobs.submission import SubmissionParser
from causeway_server.cloud_pool.lifetime import RESTART_S, keep_running
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.storage.job_store import JobStore
from causeway_server.cloud_pool.storage.outboxes import UsageOutbox
from causeway_server.cloud_pool.storage.redis_client import RedisClient
from causeway_server.cloud_pool.storage.stores import JobStores
from causeway_server.router.types import Usage
from tests.cloud_pool.batches.batch_support import create_from, input_file, upload
from tests.cloud_pool.jobs.conftest import Clock
from tests.cloud_pool.jobs.redis_server import RedisServer
from tests.cloud_pool.jobs.test_api import TIER
from tests.cloud_pool.jobs.test_webhooks import LOOPBACK, MakeJob, ScriptedResolver, WebhookBed, url
from tests.cloud_pool.jobs.webhook_receiver import Receiver, receiving
from tests.waiting import until

LEASE_S = 60.0
NARROW = msgspec.structs.replace(LOOPBACK, concurrency_per_receiver=1)


@pytest_asyncio.fixture
async def bed(store: JobStore, database: RedisClient, clock: Clock, new_job: MakeJob) -> AsyncIterator[WebhookBed]:
    bed = WebhookBed(store, database, clock, new_job)
    yield bed
    await bed.close()


@pytest_asyncio.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as found:
        yield found


# --- webhooks ---------------------------------------------------------------------------------------------------------


async def test_a_lost_delivery_holds_back_no_other(
    bed: WebhookBed, receiver: Receiver, database: RedisClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither other tenants nor the receiver of its own, which gets its slot back; the log and the job say so."""
    sender = bed.sender(NARROW)
    job = await bed.ended_job(url(receiver), "acme/device")
    (lost,) = await bed.outbox.claim(10)
    await database.command("DEL", database.key("webhook", lost.id))
    own, other = await bed.ended_job(url(receiver), "acme/device"), await bed.ended_job(url(receiver), "other/device")
    bed.clock.now += LEASE_S
    assert await sender.deliver_due() == 2
    assert [await bed.status(each, owner) for each, owner in ((own, "acme/device"), (other, "other/device"))] == [
        "delivered",
        "delivered",
    ]
    assert await bed.status(job, "acme/device") == "failed"
    assert bed.unreadable == 1
    assert [record.message for record in caplog.records if record.levelno == logging.ERROR] == [
        f"The webhook delivery {lost.id} has failed, because its record is lost."
    ]
    assert await database.command("GET", database.key("webhooks_pending")) == b"0"


async def test_a_lost_delivery_of_an_older_worker_is_dropped(
    bed: WebhookBed, receiver: Receiver, database: RedisClient
) -> None:
    """It left no note of the receiver."""
    sender = bed.sender()
    await bed.ended_job(url(receiver), "acme/device")
    (lost,) = await bed.outbox.claim(10)
    await database.command("DEL", database.key("webhook", lost.id), database.key("webhook_sending", "acme"))
    await bed.ended_job(url(receiver), "other/device")
    bed.clock.now += LEASE_S
    assert await sender.deliver_due() == 1
    assert bed.unreadable == 1


async def test_a_tenant_whose_data_is_damaged_is_set_aside(
    bed: WebhookBed, receiver: Receiver, database: RedisClient, caplog: pytest.LogCaptureFixture
) -> None:
    sender = bed.sender()
    await bed.ended_job(url(receiver), "acme/device")
    leases = database.key("webhook_leases", "acme")
    await database.command("SET", leases, "not a sorted set")
    other = await bed.ended_job(url(receiver), "other/device")
    assert await sender.deliver_due() == 1
    assert await bed.status(other, "other/device") == "delivered"
    assert "Webhooks of tenant acme wait for a minute" in caplog.text
    await database.command("DEL", leases)
    assert await sender.deliver_due() == 0
    bed.clock.now += 60.0
    assert await sender.deliver_due() == 1


class FaultyResolver(ScriptedResolver):
    """Fails for one name in a way that no caller expects."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        if host == "faulty.example.com":
            raise RuntimeError("secret")
        return await super().resolve(host, port, family)


async def test_an_unexpected_fault_of_one_delivery_leaves_the_others(
    bed: WebhookBed, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    """It is retried, and the sender goes on."""
    sender = bed.sender(names=FaultyResolver("127.0.0.1"))
    job = await bed.ended_job(url(receiver, "faulty.example.com"), "acme/device")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sender.run)
        await until(lambda: f"{job}.1 was not delivered, because of an unexpected fault" in caplog.text)
        await bed.ended_job(url(receiver), "other/device")
        await until(lambda: len(receiver.arrived) == 1)
        tasks.cancel_scope.cancel()
    assert await bed.status(job, "acme/device") == "pending"
    assert "secret" not in caplog.text


async def test_the_log_says_once_that_no_webhooks_are_sent(
    bed: WebhookBed, database: RedisClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Redis refuses the claims, here for a layout of another version."""
    caplog.set_level(logging.INFO)
    sender = bed.sender()
    layout = database.key("layout")
    await database.command("SET", layout, "999")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sender.run)
        await until(lambda: "No webhooks are sent: " in caplog.text)
        await database.command("DEL", layout)
        await until(lambda: "Webhooks are sent again" in caplog.text)
        tasks.cancel_scope.cancel()
    assert caplog.text.count("No webhooks are sent: ") == 1


# --- usage and limits -------------------------------------------------------------------------------------------------


def charge(tenant: str) -> Charge:
    return Charge(Reservation(tenant, 0), "large", "chat", Usage(5, 2), 7)


async def test_a_tenant_whose_usage_is_damaged_holds_back_no_other(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    redis_server.flush()
    async with redis.asyncio.Redis.from_url(redis_server.url) as client:
        usage = UsageRecorder(TenantsConfig(), client, wall_clock=lambda: 1_800_000_000.0)
        await client.set(tenant_key("acme", "usage:2027-01-15"), "not a hash")
        for tenant in ("acme", "other"):
            usage.record(charge(tenant))
        assert await usage.flush()
        assert usage.lost == 1
        assert "The usage of tenant acme" in caplog.text
        assert [row.requests for row in await read_usage(client, "other", "2027-01-15")] == [1]


async def test_a_bill_that_cannot_be_read_holds_back_no_other(
    database: RedisClient, caplog: pytest.LogCaptureFixture
) -> None:
    added: list[UsageBatch] = []

    async def add(batch: UsageBatch) -> None:
        added.append(batch)

    bills = {"acme": "1", "acme|x|prompt|large|job": "5", "acme|1|prompt|large|job": "x", "other|1|prompt|l|job": "5"}
    for name, value in bills.items():
        await database.command("HSET", database.key("usage"), name, value)
    assert await UsageOutbox(database, add).flush()
    assert [batch.sums for batch in added if batch.sums] == [{"prompt|l|job": 5}]
    assert caplog.text.count("The cost of a job cannot be read and is lost") == 3


async def test_a_tenant_whose_limits_are_damaged_is_checked_locally_alone(redis_server: RedisServer) -> None:
    """Other tenants' rates stay shared by all gateways."""
    redis_server.flush()
    config = TenantsConfig(default=TenantLimits(requests_per_s=0.001, burst=4), redis_timeout_s=20.0)
    async with redis.asyncio.Redis.from_url(redis_server.url) as client:
        await client.set(tenant_key("acme", "requests"), "not a hash")
        one, two = (TenantRateLimiter(config, client) for _ in range(2))
        demand = Demand(sequences=1, tokens=0, pico_usd=0, lifetime_s=1.0)
        await one.reserve("acme", demand)
        assert one.local_checks == 1
        for _ in range(2):
            await one.reserve("other", demand)
            await two.reserve("other", demand)
        assert (one.local_checks, two.local_checks) == (1, 0)
        await one.flush()
        await one.reserve("acme", demand)
        assert one.local_checks == 2


# --- loops ------------------------------------------------------------------------------------------------------------


async def test_a_loop_that_fails_begins_again(caplog: pytest.LogCaptureFixture) -> None:
    """The message of the exception, which may quote a request, is not logged."""
    runs: list[int] = []
    pauses: list[float] = []

    async def run() -> None:
        runs.append(1)
        if len(runs) < 3:
            raise KeyError("secret")

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    await keep_running("the sender", run, sleep=sleep)
    assert (len(runs), pauses) == (3, [RESTART_S, RESTART_S])
    assert caplog.text.count("the sender failed unexpectedly") == 2
    assert "secret" not in caplog.text


async def test_a_loop_that_is_cancelled_ends() -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keep_running, "the sender", anyio.sleep_forever)
        await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert tasks.cancel_scope.cancel_called


# --- batches ----------------------------------------------------------------------------------------------------------


async def test_an_unexpected_fault_of_one_batch_leaves_the_others(
    stores: JobStores, config: JobsConfig, caplog: pytest.LogCaptureFixture
) -> None:
    def limits(tenant: str) -> TenantLimits:
        if tenant == "acme":
            raise RuntimeError("secret")
        return TenantLimits()

    processor = BatchProcessor(stores, SubmissionParser(config, {"large": TIER}), config, limits)
    for tenant in ("acme", "other"):
        file = await upload(stores, input_file(2), f"{tenant}/1")
        await create_from(stores, file, f"batch_{tenant}")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(processor.run)
        await until(lambda: "batch_acme waits for a minute after an unexpected error" in caplog.text)
        with anyio.fail_after(60.0):
            while (await stores.batches.get("batch_other", "other/1")).submitted < 2:  # noqa: ASYNC110 -- no event
                await anyio.sleep(0.02)
        tasks.cancel_scope.cancel()
    assert "secret" not in caplog.text
