"""Webhooks over real sockets: signed, repeated, disabled, and never to where they may not go."""

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

from cloud_pool.jobs.config import JobsConfig, WebhookConfig
from cloud_pool.jobs.metrics import JobMetrics
from cloud_pool.jobs.record import NewJob
from cloud_pool.jobs.store.job_store import JobStore
from cloud_pool.jobs.store.redis_client import RedisClient
from cloud_pool.jobs.webhooks.delivery import WebhookSender
from cloud_pool.jobs.webhooks.outbox import WebhookOutbox

from .conftest import Clock
from .webhook_receiver import Receiver, receiving

MakeOffer = Callable[..., NewJob]
LOOPBACK = WebhookConfig(allowed_networks=("127.0.0.0/8",), allow_http=True, timeout_s=5.0)


class Names(AbstractResolver):
    """A name server in an attacker's hand: each look-up gets the next answer, the last one for ever."""

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


class Post:
    """Makes deliveries, and makes jobs end that want one."""

    def __init__(self, store: JobStore, database: RedisClient, clock: Clock, offer: MakeOffer) -> None:
        self.clock = clock
        self.registry = CollectorRegistry()
        self._store, self._database, self._offer = store, database, offer
        self._deliverers: list[WebhookSender] = []

    def deliverer(
        self,
        config: WebhookConfig = LOOPBACK,
        names: AbstractResolver | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> WebhookSender:
        self.hooks = WebhookOutbox(self._database, config, clock=self.clock)
        metrics = JobMetrics(CollectorRegistry())
        made = WebhookSender(self.hooks, config, metrics, resolver=names, tls=tls, clock=time.time, rng=lambda: 0.5)
        self._deliverers.append(made)
        return made

    async def ended_job(self, url: str) -> str:
        job = (await self._store.accept(self._offer(webhook=url))).id
        (record,) = (await self._store.claim("w", "large", ["standard"])).records
        await self._store.succeed(job, record.fence, b"{}")
        return job

    async def status(self, job: str) -> str:
        return (await self._store.get(job, "kiosk")).webhook_status

    async def close(self) -> None:
        for deliverer in self._deliverers:
            await deliverer.close()


@pytest_asyncio.fixture
async def post(store: JobStore, database: RedisClient, clock: Clock, offer: MakeOffer) -> AsyncIterator[Post]:
    made = Post(store, database, clock, offer)
    yield made
    await made.close()


@pytest_asyncio.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as found:
        yield found


def url(receiver: Receiver, host: str = "127.0.0.1") -> str:
    return f"http://{host}:{receiver.port}/hook"


async def test_a_delivery_is_signed(post: Post, receiver: Receiver) -> None:
    """The specification's own library accepts it with the owner's secret, and it holds no content."""
    deliverer = post.deliverer()
    job = await post.ended_job(url(receiver))
    assert await deliverer.deliver_due() == 1
    ((headers, body),) = receiver.arrived
    (secret,) = await post.hooks.signing_secrets("kiosk")
    said = Webhook(secret).verify(body, headers)
    assert (said["type"], said["data"]) == ("job.succeeded", {"id": job, "status": "succeeded", "object": "job"})
    assert await post.status(job) == "delivered"
    assert await deliverer.deliver_due() == 0


async def test_a_rotated_secret_signs_beside_the_new_one(post: Post, receiver: Receiver) -> None:
    """For a day receivers with the old secret and with the new one both accept; then the old one is gone."""
    deliverer = post.deliverer()
    (old,) = await post.hooks.signing_secrets("kiosk")
    new, previous = await post.hooks.signing_secrets("kiosk", rotate=True)
    assert previous == old != new
    await post.ended_job(url(receiver))
    await deliverer.deliver_due()
    headers, body = receiver.arrived[0]
    for secret in (old, new):
        Webhook(secret).verify(body, headers)
    post.clock.now += 86_401
    assert await post.hooks.signing_secrets("kiosk") == (new,)
    assert await post.hooks.signing_secrets("another") != (new,)


@pytest.mark.parametrize("status", [500, 503, 404, 301, 302, 307, 308])
async def test_a_failed_delivery_is_made_again(post: Post, receiver: Receiver, status: int) -> None:
    """Under the same id, when its pause is over and not before; a redirect is not followed."""
    deliverer = post.deliverer()
    receiver.answers = [status]
    job = await post.ended_job(url(receiver))
    await deliverer.deliver_due()
    assert await deliverer.deliver_due() == 0
    assert await post.status(job) == "pending"
    post.clock.now += 5.0
    await deliverer.deliver_due()
    assert await post.status(job) == "delivered"
    first, second = (headers["webhook-id"] for headers, _ in receiver.arrived)
    assert first == second


async def test_a_delivery_is_given_up(post: Post, receiver: Receiver) -> None:
    """After the last of the pauses it has failed, and is not tried again."""
    deliverer = post.deliverer()
    receiver.answers = [500] * 100
    job = await post.ended_job(url(receiver))
    for _ in range(20):
        await deliverer.deliver_due()
        post.clock.now += 86_400 * 2
    assert len(receiver.arrived) == 10
    assert await post.status(job) == "failed"


async def test_410_disables_the_address(post: Post, receiver: Receiver) -> None:
    """The owner's address gets nothing more, for this job or the next, until the time is over."""
    deliverer = post.deliverer(msgspec.structs.replace(LOOPBACK, disable_after_410_s=3600.0))
    receiver.answers = [410]
    first = await post.ended_job(url(receiver))
    second = await post.ended_job(url(receiver))
    await deliverer.deliver_due()
    await deliverer.deliver_due()
    third = await post.ended_job(url(receiver))
    await deliverer.deliver_due()
    assert await post.status(first) == "disabled" or await post.status(second) == "disabled"
    assert await post.status(third) == "disabled"
    assert await post.hooks.is_disabled("kiosk", url(receiver))
    assert not await post.hooks.is_disabled("another", url(receiver))


async def test_a_delivery_outlives_its_deliverer(post: Post, receiver: Receiver) -> None:
    """One that was claimed and never ended is made by another when the lease is over."""
    deliverer = post.deliverer()
    job = await post.ended_job(url(receiver))
    (lost,) = await post.hooks.claim(10)
    assert await deliverer.deliver_due() == 0
    post.clock.now += 60.0
    assert await deliverer.deliver_due() == 1
    assert await post.status(job) == "delivered"
    assert not await post.hooks.finish(lost, "failed")


@pytest.mark.parametrize("address", ["127.0.0.1", "169.254.169.254", "10.0.0.1", "::1", "::ffff:127.0.0.1"])
async def test_a_name_for_a_private_address_is_refused(post: Post, receiver: Receiver, address: str) -> None:
    """A public name that leads inside gets no connection; the delivery waits."""
    deliverer = post.deliverer(WebhookConfig(allow_http=True), Names(address))
    job = await post.ended_job(url(receiver, "hooks.example.com"))
    assert await deliverer.deliver_due() == 1
    assert receiver.arrived == []
    assert await post.status(job) == "pending"


async def test_a_rebinding_name_is_refused(post: Post, receiver: Receiver) -> None:
    """A name that was public when first looked up, and is private when connected to, gets no connection."""
    names = Names("93.184.215.14", "127.0.0.1")
    await names.resolve("rebind.example.com")  # what a check at the time of the offer would have seen
    deliverer = post.deliverer(WebhookConfig(allow_http=True), names)
    await post.ended_job(url(receiver, "rebind.example.com"))
    await deliverer.deliver_due()
    assert receiver.arrived == []


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost", "0x7f000001", "2130706433"])
async def test_a_literal_private_address_is_refused(post: Post, receiver: Receiver, host: str) -> None:
    """However loopback is spelled, and though no name is looked up, no connection is made."""
    deliverer = post.deliverer(WebhookConfig(allow_http=True, timeout_s=2.0))
    await post.ended_job(url(receiver, host))
    await deliverer.deliver_due()
    assert receiver.arrived == []


async def test_an_allowed_name_is_reached(post: Post, receiver: Receiver) -> None:
    """The same name is called where the operator allows its network: the refusals above are the rule's doing."""
    deliverer = post.deliverer(LOOPBACK, Names("127.0.0.1"))
    await post.ended_job(url(receiver, "hooks.example.com"))
    await deliverer.deliver_due()
    assert json.loads(receiver.arrived[0][1])["type"] == "job.succeeded"


async def test_a_dead_receiver_is_tried_again(post: Post, receiver: Receiver) -> None:
    """A refused connection is like a failed delivery."""
    deliverer = post.deliverer()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        job = await post.ended_job(f"http://127.0.0.1:{free.getsockname()[1]}/")
        await deliverer.deliver_due()
    assert await post.status(job) == "pending"


def test_the_config_that_is_shipped_allows_nothing() -> None:
    """By default only https to public addresses."""
    assert (JobsConfig().webhooks.allowed_networks, JobsConfig().webhooks.allow_http) == ((), False)
