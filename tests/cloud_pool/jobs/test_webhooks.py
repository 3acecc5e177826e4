"""Webhooks over real sockets: signed, retried, disabled, and never sent to forbidden addresses."""

from __future__ import annotations

import json
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest
import pytest_asyncio
from aiohttp.abc import AbstractResolver, ResolveResult
from prometheus_client import CollectorRegistry
from standardwebhooks import Webhook

from causeway_server.cloud_pool.storage.config import JobsConfig, WebhookConfig
from causeway_server.cloud_pool.storage.job_store import JobStore
from causeway_server.cloud_pool.storage.outboxes import WebhookDelivery, WebhookOutbox
from causeway_server.cloud_pool.storage.record import NewJob
from causeway_server.cloud_pool.storage.redis_client import RedisClient
from causeway_server.router.jobs.webhooks import RETRY_DELAYS_S
from causeway_server.router.serving.webhooks import WebhookSender

from .conftest import Clock
from .webhook_receiver import Receiver, receiving

MakeJob = Callable[..., NewJob]
SIGNATURE = ("webhook-id", "webhook-timestamp", "webhook-signature")
LOOPBACK = WebhookConfig(allowed_networks=("127.0.0.0/8",), allow_http=True, timeout_s=5.0)


class ScriptedResolver(AbstractResolver):
    """A name server in an attacker's hand: each look-up gets the next answer; the last one repeats."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        address = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        kind = socket.AF_INET6 if ":" in address else socket.AF_INET
        return [ResolveResult(hostname=host, host=address, port=port, family=kind, proto=0, flags=0)]

    async def close(self) -> None:
        pass


class WebhookBed:
    """Ends jobs that have a webhook, and sends the deliveries."""

    def __init__(self, store: JobStore, database: RedisClient, clock: Clock, new_job: MakeJob) -> None:
        self.clock = clock
        self.registry = CollectorRegistry()
        self._store, self._database, self._new_job = store, database, new_job
        self._senders: list[WebhookSender[WebhookDelivery]] = []

    def sender(
        self, config: WebhookConfig = LOOPBACK, names: AbstractResolver | None = None, tls: ssl.SSLContext | None = None
    ) -> WebhookSender[WebhookDelivery]:
        self.outbox = WebhookOutbox(self._database, config)
        self.unreadable = 0
        self.outbox.on_unreadable = self._count_unreadable
        sender = WebhookSender(self.outbox, config, resolver=names, tls=tls, clock=time.time, rng=lambda: 0.5)
        self._senders.append(sender)
        return sender

    def _count_unreadable(self) -> None:
        self.unreadable += 1

    async def ended_job(self, url: str, owner: str = "kiosk") -> str:
        job = (await self._store.accept(self._new_job(webhook=url, owner=owner))).id
        (record,) = (await self._store.claim("w", "large", ["standard"])).records
        await self._store.succeed(job, record.fence, b"{}")
        return job

    async def status(self, job: str, owner: str = "kiosk") -> str:
        return (await self._store.get(job, owner)).webhook_status

    async def close(self) -> None:
        for sender in self._senders:
            await sender.close()


@pytest_asyncio.fixture
async def bed(store: JobStore, database: RedisClient, clock: Clock, new_job: MakeJob) -> AsyncIterator[WebhookBed]:
    bed = WebhookBed(store, database, clock, new_job)
    yield bed
    await bed.close()


@pytest_asyncio.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as found:
        yield found


def url(receiver: Receiver, host: str = "127.0.0.1") -> str:
    return f"http://{host}:{receiver.port}/hook"


async def test_a_delivery_is_signed(bed: WebhookBed, receiver: Receiver) -> None:
    """The specification's own library accepts it with the owner's secret; it holds no content."""
    sender = bed.sender()
    job = await bed.ended_job(url(receiver))
    assert await sender.deliver_due() == 1
    ((headers, body),) = receiver.arrived
    (secret,) = await bed.outbox.signing_secrets("kiosk")
    payload = Webhook(secret).verify(body, headers)
    data = {"id": job, "status": "succeeded", "object": "job"}
    assert (payload["type"], payload["data"]) == ("job.succeeded", data)
    assert await bed.status(job) == "delivered"
    assert await sender.deliver_due() == 0


async def test_the_previous_secret_signs_for_a_day(bed: WebhookBed, receiver: Receiver) -> None:
    sender = bed.sender()
    (old,) = await bed.outbox.signing_secrets("kiosk")
    new, previous = await bed.outbox.signing_secrets("kiosk", rotate=True)
    assert previous == old != new
    await bed.ended_job(url(receiver))
    await sender.deliver_due()
    headers, body = receiver.arrived[0]
    for secret in (old, new):
        Webhook(secret).verify(body, headers)
    bed.clock.now += 86_401
    assert await bed.outbox.signing_secrets("kiosk") == (new,)
    assert await bed.outbox.signing_secrets("another") != (new,)


@pytest.mark.parametrize("status", [500, 503, 404, 301, 302, 307, 308])
async def test_a_failed_delivery_is_retried(bed: WebhookBed, receiver: Receiver, status: int) -> None:
    """Under the same id, after its delay; redirects are not followed."""
    sender = bed.sender()
    receiver.answers = [status]
    job = await bed.ended_job(url(receiver))
    await sender.deliver_due()
    assert await sender.deliver_due() == 0
    assert await bed.status(job) == "pending"
    bed.clock.now += 5.0
    await sender.deliver_due()
    assert await bed.status(job) == "delivered"
    first, second = (headers["webhook-id"] for headers, _ in receiver.arrived)
    assert first == second


async def test_a_delivery_fails_after_the_last_delay(bed: WebhookBed, receiver: Receiver) -> None:
    sender = bed.sender()
    receiver.answers = [500] * 100
    job = await bed.ended_job(url(receiver))
    for delay_s in (*RETRY_DELAYS_S, 86_400.0):
        await sender.deliver_due()
        bed.clock.now += delay_s
    assert len(receiver.arrived) == 10
    assert await bed.status(job) == "failed"


async def test_410_disables_the_url_for_a_time(bed: WebhookBed, receiver: Receiver) -> None:
    sender = bed.sender(msgspec.structs.replace(LOOPBACK, disable_after_410_s=3600.0))
    receiver.answers = [410]
    first = await bed.ended_job(url(receiver))
    second = await bed.ended_job(url(receiver))
    await sender.deliver_due()
    await sender.deliver_due()
    third = await bed.ended_job(url(receiver))
    await sender.deliver_due()
    assert await bed.status(first) == "disabled" or await bed.status(second) == "disabled"
    assert await bed.status(third) == "disabled"
    assert await bed.outbox.is_disabled("kiosk", url(receiver))
    assert not await bed.outbox.is_disabled("another", url(receiver))


async def test_another_worker_sends_a_claimed_delivery_after_its_lease(bed: WebhookBed, receiver: Receiver) -> None:
    sender = bed.sender()
    job = await bed.ended_job(url(receiver))
    (lost,) = await bed.outbox.claim(10)
    assert await sender.deliver_due() == 0
    bed.clock.now += 60.0
    assert await sender.deliver_due() == 1
    assert await bed.status(job) == "delivered"
    assert not await bed.outbox.finish(lost, "failed")


@pytest.mark.parametrize("address", ["127.0.0.1", "169.254.169.254", "10.0.0.1", "::1", "::ffff:127.0.0.1"])
async def test_a_name_with_a_private_address_gets_no_connection(
    bed: WebhookBed, receiver: Receiver, address: str
) -> None:
    sender = bed.sender(WebhookConfig(allow_http=True), ScriptedResolver(address))
    job = await bed.ended_job(url(receiver, "hooks.example.com"))
    assert await sender.deliver_due() == 1
    assert receiver.arrived == []
    assert await bed.status(job) == "pending"


async def test_dns_rebinding_gets_no_connection(bed: WebhookBed, receiver: Receiver) -> None:
    """A name is public at the first look-up and private when the socket is opened."""
    names = ScriptedResolver("93.184.215.14", "127.0.0.1")
    await names.resolve("rebind.example.com")  # what a check at submission would have seen
    sender = bed.sender(WebhookConfig(allow_http=True), names)
    await bed.ended_job(url(receiver, "rebind.example.com"))
    await sender.deliver_due()
    assert receiver.arrived == []


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost", "0x7f000001", "2130706433"])
async def test_a_literal_private_address_gets_no_connection(bed: WebhookBed, receiver: Receiver, host: str) -> None:
    """However loopback is spelled."""
    sender = bed.sender(WebhookConfig(allow_http=True, timeout_s=2.0))
    await bed.ended_job(url(receiver, host))
    await sender.deliver_due()
    assert receiver.arrived == []


async def test_a_name_in_an_allowed_network_is_reached(bed: WebhookBed, receiver: Receiver) -> None:
    """This proves that the refusals above come from the address rules."""
    sender = bed.sender(LOOPBACK, ScriptedResolver("127.0.0.1"))
    await bed.ended_job(url(receiver, "hooks.example.com"))
    await sender.deliver_due()
    assert json.loads(receiver.arrived[0][1])["type"] == "job.succeeded"


async def test_a_refused_connection_is_retried(bed: WebhookBed, receiver: Receiver) -> None:
    sender = bed.sender()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        job = await bed.ended_job(f"http://127.0.0.1:{free.getsockname()[1]}/")
        await sender.deliver_due()
    assert await bed.status(job) == "pending"


def test_by_default_webhooks_go_to_public_https_only() -> None:
    assert (JobsConfig().webhooks.allowed_networks, JobsConfig().webhooks.allow_http) == ((), False)
