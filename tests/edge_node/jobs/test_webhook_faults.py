"""Webhooks of a device's jobs on bad days: a month offline, names that no server resolves, and receivers that
misbehave.

The outbox and the sender are real, receivers listen on loopback, the clock can be moved on.
"""

from __future__ import annotations

import asyncio
import random
import re
import socket
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import pytest
from aiohttp.abc import AbstractResolver, ResolveResult

from causeway_server.edge_node.clock import Clock
from causeway_server.edge_node.config.schema import OutboxConfig, OutboxWebhookConfig
from causeway_server.edge_node.jobs import FILE
from causeway_server.edge_node.jobs.record import Claimed, EdgeJob, JobAnswer, JobNotDead, WebhookStatus
from causeway_server.edge_node.jobs.run import JobFeed
from causeway_server.edge_node.jobs.store import JobOutbox
from causeway_server.edge_node.jobs.webhooks import ReceiverQueue
from causeway_server.router.errors import CloudFailed, JobStoreUnavailable, NotFound
from causeway_server.router.jobs.job import JobEvent
from causeway_server.router.serving.webhooks import WebhookSender
from tests.cloud_pool.jobs.webhook_receiver import Receiver, receiving
from tests.ports import free_port
from tests.waiting import until

from .killed_outbox import new_job
from .support import erased, opened, readable
from .test_clocks import DAY_S, Clocks

HERE = OutboxWebhookConfig(allowed_networks=("127.0.0.0/8",), allow_http=True)
ANSWER = JobAnswer(b"the answer", "miss", "edge", "d")
Ends = Callable[[JobOutbox, EdgeJob], Awaitable[object]]


class NoResolver(AbstractResolver):
    """Resolves no name, and does not say so: what a device without a network has."""

    def __init__(self) -> None:
        self.asked = 0

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        self.asked += 1
        await asyncio.Event().wait()
        raise AssertionError

    async def close(self) -> None:
        pass


class PointsTo(NoResolver):
    """Resolves each name to one address."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self._address = address

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        self.asked += 1
        flags = socket.AI_NUMERICHOST
        return [ResolveResult(hostname=host, host=self._address, port=port, family=family, proto=0, flags=flags)]


class Outbox:
    """An outbox, its webhooks, and the clocks of both."""

    def __init__(self, store: JobOutbox, feed: JobFeed, queue: ReceiverQueue, clocks: Clocks) -> None:
        self.store = store
        self.queue = queue
        self.clocks = clocks
        self._feed = feed

    async def claimed(self, url: str, text: str = "one", *, owner: str = "me") -> Claimed:
        job = msgspec.structs.replace(new_job(self.store, text), owner=owner, webhook=url)
        accepted = await self.store.accept(job, b"the request")
        found = await self.store.claim("edge", 100)
        (one,) = [claimed for claimed in found if claimed.job.seq == accepted.job.seq]
        return one

    async def answered(self, url: str, text: str = "one", *, owner: str = "me") -> EdgeJob:
        claimed = await self.claimed(url, text, owner=owner)
        assert await self.store.succeed(claimed.job, ANSWER)
        self._feed.wake()
        return claimed.job

    async def status(self, job: EdgeJob) -> str:
        return (await self.store.get(job.id, None))[0].webhook_status

    async def becomes(self, job: EdgeJob, status: str) -> None:
        async with asyncio.timeout(60.0):
            while await self.status(job) != status:
                self._feed.wake()
                await asyncio.sleep(0.005)

    async def pass_s(self, seconds: float) -> None:
        self.clocks.pass_s(seconds)
        self._feed.wake()
        await asyncio.sleep(0.0)

    async def passing(self, step_s: float, done: Callable[[], object]) -> None:
        """Let time pass in steps until something has happened."""
        async with asyncio.timeout(60.0):
            while not done():
                await self.pass_s(step_s)
                await asyncio.sleep(0.005)


@asynccontextmanager
async def outbox(
    folder: Path,
    config: OutboxWebhookConfig = HERE,
    clocks: Clocks | None = None,
    resolver: AbstractResolver | None = None,
    *,
    is_readable: bool = False,
) -> AsyncIterator[Outbox]:
    clocks = clocks or Clocks()
    clock: Clock = clocks.clock()
    store, feed = await opened(folder, OutboxConfig(webhooks=config), clock, is_readable=is_readable), JobFeed()
    chance = random.Random(7)
    queue = ReceiverQueue(store, config, clock, chance)
    sender = WebhookSender(queue, config, change=feed.change, resolver=resolver, rng=chance.random)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sender.run)
            yield Outbox(store, feed, queue, clocks)
            tasks.cancel_scope.cancel()
    finally:
        store.close()


def at(receiver: Receiver) -> str:
    return f"http://127.0.0.1:{receiver.port}/hook"


def told(receiver: Receiver) -> list[str]:
    """What the receiver was told, in order."""
    kinds = [msgspec.json.decode(body)["type"] for _, body in receiver.arrived]
    return [str(kind) for kind in kinds]


def ids(receiver: Receiver) -> list[str]:
    return [headers["webhook-id"] for headers, _ in receiver.arrived]


async def test_a_webhook_outlives_a_month_offline(tmp_path: Path) -> None:
    """The answer's own time has passed long before, and the device was started again."""
    clocks, port = Clocks(), free_port()
    async with outbox(tmp_path, clocks=clocks) as before:
        job = await before.answered(f"http://127.0.0.1:{port}/hook")
        for _ in range(30):
            await before.pass_s(DAY_S)
            await before.store.expire()
    async with outbox(tmp_path, clocks=clocks) as after, receiving(port=port) as receiver:
        await after.passing(60.0, lambda: receiver.arrived)
        await after.becomes(job, "delivered")
        assert told(receiver) == ["job.succeeded"]


async def test_a_webhook_that_nobody_takes_ends_by_its_age_and_the_job_says_so(tmp_path: Path) -> None:
    config = msgspec.structs.replace(HERE, max_age_s=10 * DAY_S)
    async with outbox(tmp_path, config) as device:
        job = await device.answered(f"http://127.0.0.1:{free_port()}/hook")
        await device.pass_s(9 * DAY_S)
        await device.store.expire()
        assert await device.status(job) == "pending"
        await device.pass_s(2 * DAY_S)
        await device.store.expire()
        assert device.store.stats.webhooks == {"expired": 1}
        assert device.store.stats.webhooks_due == 0
        assert await device.status(job) == "failed"
        await device.store.expire()
        with pytest.raises(NotFound):
            await device.store.get(job.id, None)


async def test_what_is_kept_for_a_webhook_alone_has_no_content_and_no_room_of_others(tmp_path: Path) -> None:
    """A dead letter without its request cannot be retried, and says so."""
    async with outbox(tmp_path) as device:
        url = f"http://127.0.0.1:{free_port()}/hook"
        job = await device.answered(url)
        claimed = await device.claimed(url, "two")
        await exhausted(device.store, claimed.job)
        assert device.store.stats.bytes > 0
        await device.pass_s(8 * DAY_S)
        await device.store.expire()
        assert (device.store.stats.bytes, device.store.stats.empty) == (0, 2)
        assert (await device.store.get(job.id, None))[1] == b""
        with pytest.raises(JobNotDead, match="Submit the request again"):
            await device.store.retry(claimed.job.id, None)
        await erased(tmp_path, [b"the request", b"the answer"])


async def test_a_name_that_no_server_resolves_costs_no_attempt(tmp_path: Path) -> None:
    """Offline, DNS often hangs instead of failing: three days of that must not end a delivery."""
    config, resolver = msgspec.structs.replace(HERE, timeout_s=0.05), NoResolver()
    async with outbox(tmp_path, config, resolver=resolver) as device:
        job = await device.answered("http://receiver.example/hook")
        await device.passing(600.0, lambda: resolver.asked >= 4)
        await until(lambda: device.queue.unreachable >= 3)
        (due,) = await device.store.run(device.store.webhooks.due, 10, (), ())
        assert (due.attempts, await device.status(job)) == (0, "pending")


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.7", "169.254.169.254"])
async def test_a_name_that_points_into_the_device_or_its_network_gets_nothing(tmp_path: Path, address: str) -> None:
    """The name is harmless when the job comes, and is resolved again for each connection."""
    config, resolver = OutboxWebhookConfig(allow_http=True), PointsTo(address)
    async with receiving() as receiver, outbox(tmp_path, config, resolver=resolver) as device:
        job = await device.answered(f"http://harmless.example:{receiver.port}/hook")
        await device.passing(600.0, lambda: device.queue.unreachable >= 3)
        assert (receiver.deliveries, await device.status(job)) == (0, "pending")
    assert resolver.asked >= 3


@pytest.mark.parametrize("status", [301, 302, 307, 308, 400, 500, 503])
async def test_a_receiver_that_does_not_take_it_gets_the_same_id_again(tmp_path: Path, status: int) -> None:
    """A redirect is not followed: it could lead anywhere."""
    async with receiving() as receiver, outbox(tmp_path) as device:
        receiver.answers = [status, status]
        job = await device.answered(at(receiver))
        await device.passing(300.0, lambda: receiver.deliveries >= 3)
        await device.becomes(job, "delivered")
        assert len(receiver.arrived) == 3
        assert len(set(ids(receiver))) == 1


@asynccontextmanager
async def raw(answer: bytes) -> AsyncIterator[int]:
    """A receiver that sends these bytes without an end; its port."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            while answer:
                writer.write(answer)
                await writer.drain()
            await reader.read()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "answer",
    [b"", b"HTTP/1.1 200 OK\r\nx: " + b"x" * 65536, b"not http at all\r\n\r\n"],
    ids=["silent", "endless headers", "garbage"],
)
async def test_a_receiver_that_hangs_or_floods_costs_an_attempt_and_holds_up_no_other(
    tmp_path: Path, answer: bytes
) -> None:
    config = msgspec.structs.replace(HERE, timeout_s=1.5, concurrency=4)  # the one that works needs time to answer
    async with raw(answer) as port, receiving() as receiver, outbox(tmp_path, config) as device:
        hung = [await device.answered(f"http://127.0.0.1:{port}/", f"hung-{number}") for number in range(8)]
        job = await device.answered(at(receiver))
        await device.becomes(job, "delivered")
        await until(lambda: device.store.stats.webhooks_due == len(hung))
        assert {await device.status(one) for one in hung} == {"pending"}


async def cancelled(store: JobOutbox, job: EdgeJob) -> None:
    await store.cancel(job.id, None)


async def failed(store: JobOutbox, job: EdgeJob) -> None:
    await store.fail(job, JobEvent.FAIL, CloudFailed("no"))


async def exhausted(store: JobOutbox, job: EdgeJob) -> None:
    await store.fail(job, JobEvent.EXHAUST, CloudFailed("never"))


async def expired(store: JobOutbox, job: EdgeJob) -> None:
    await store.fail(job, JobEvent.EXPIRE, CloudFailed("too late"))


@pytest.mark.parametrize("end", [cancelled, failed, exhausted, expired])
async def test_every_end_is_told(tmp_path: Path, end: Ends) -> None:
    async with receiving() as receiver, outbox(tmp_path) as device:
        claimed = await device.claimed(at(receiver))
        await end(device.store, claimed.job)
        await device.becomes(claimed.job, "delivered")
        state = (await device.store.get(claimed.job.id, None))[0].state
        assert told(receiver) == [f"job.{state.value}"]


async def test_a_dead_letter_that_dies_again_is_another_delivery(tmp_path: Path) -> None:
    """Receivers drop an id that they have seen."""
    async with receiving() as receiver, outbox(tmp_path) as device:
        claimed = await device.claimed(at(receiver))
        await exhausted(device.store, claimed.job)
        await device.becomes(claimed.job, "delivered")
        await device.store.retry(claimed.job.id, None)
        assert await device.status(claimed.job) == ""
        await device.store.place([(one.job, "edge") for one in await device.store.unplaced(10)])
        (again,) = await device.store.claim("edge", 10)
        await exhausted(device.store, again.job)
        await device.becomes(claimed.job, "delivered")
        assert told(receiver) == ["job.dead", "job.dead"]
        assert len(set(ids(receiver))) == 2


async def test_a_wall_clock_that_jumps_neither_delays_nor_ends_a_delivery(tmp_path: Path) -> None:
    clocks = Clocks()
    async with receiving() as receiver, outbox(tmp_path, clocks=clocks) as device:
        receiver.answers = [500, 500]
        job = await device.answered(at(receiver))
        await until(lambda: receiver.deliveries == 1)
        clocks.unix -= 20 * 365 * DAY_S
        await device.passing(10.0, lambda: receiver.deliveries == 2)
        clocks.unix += 40 * 365 * DAY_S
        await device.passing(300.0, lambda: receiver.deliveries == 3)
        await device.becomes(job, "delivered")


async def test_a_store_that_fails_after_the_delivery_repeats_it_with_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk was full when the delivery was to be noted."""
    async with receiving() as receiver, outbox(tmp_path) as device:
        finish, refused = device.store.webhooks.finish, 0

        def once_full(db: sqlite3.Connection, number: int, status: WebhookStatus) -> bool:
            nonlocal refused
            refused += 1
            if refused == 1:
                raise JobStoreUnavailable("disk full")
            return finish(db, number, status)

        monkeypatch.setattr(device.store.webhooks, "finish", once_full)
        job = await device.answered(at(receiver))
        await device.becomes(job, "delivered")
        assert len(receiver.arrived) == 2
        assert len(set(ids(receiver))) == 1


async def test_each_owner_has_a_secret_of_its_own(tmp_path: Path) -> None:
    async with outbox(tmp_path) as device:
        run, secrets = device.store.run, device.store.webhooks.secrets
        mine, yours = await run(secrets, "me"), await run(secrets, "you")
        assert mine != yours
        assert await run(secrets, "me") == mine


@pytest.mark.slow
async def test_nothing_is_left_of_a_url_whose_job_was_purged(tmp_path: Path) -> None:
    """URLs hold tokens. Rows of other lengths came and went, so that they moved between pages."""
    chance = random.Random(7)
    store = await opened(tmp_path, is_readable=True)
    urls = [f"https://h{n}.example/<{n:06}>" + "t" * chance.choice((0, 40, 300, 900)) for n in range(600)]
    accepted = await asyncio.gather(
        *[
            store.accept(msgspec.structs.replace(new_job(store, str(n)), webhook=url), b"body")
            for n, url in enumerate(urls)
        ]
    )
    for found in await store.claim("edge", 600):
        await store.succeed(found.job, ANSWER)
    chosen = chance.sample(range(len(urls)), 550)
    for number in chosen:
        await store.purge(accepted[number].job.id, None)
    store.close()
    content = (tmp_path / FILE).read_bytes()
    left = {int(n) for n in re.findall(rb"<([0-9]{6})>", content)}
    assert left == set(range(600)) - set(chosen)
    hosts = {int(n) for n in re.findall(rb"//h([0-9]+)\.example", content)}
    assert hosts <= set(range(600)) - set(chosen)


async def test_a_url_of_a_purged_job_leaves_the_log_too(tmp_path: Path) -> None:
    async with outbox(tmp_path, is_readable=True) as device:
        url = f"http://127.0.0.1:{free_port()}/token-4711"
        job = await device.answered(url)
        assert readable(tmp_path, [b"token-4711"])
        await device.store.purge(job.id, None)
        await erased(tmp_path, [b"token-4711"])
