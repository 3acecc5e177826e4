"""Webhooks of a device's jobs.

The load: many jobs with receivers of their own, some of them away for days with the network. The faults: a receiver
that is away, refuses, hangs or is gone; the daemon ends between a job's end and its webhook; a URL that leads into the
device or its network.
"""

from __future__ import annotations

import asyncio
import time as real_time
from pathlib import Path

import msgspec
import pytest
from standardwebhooks import Webhook

from causeway_server.edge_node.clock import Clock
from causeway_server.edge_node.config.schema import OutboxWebhookConfig
from causeway_server.router.jobs.webhooks import RETRY_DELAYS_S
from tests.cloud_pool.jobs.webhook_receiver import receiving
from tests.ports import free_port

from ..device import Device, running
from .cloud import JobCloud
from .support import PROMPT, accepted, ended, request, submit, view

pytestmark = pytest.mark.slow
HERE = OutboxWebhookConfig(allowed_networks=("127.0.0.0/8",), allow_http=True)
JOBS = msgspec.structs.replace(PROMPT, webhooks=HERE)


class Time:
    """The clocks of a device, which can be moved on."""

    def __init__(self) -> None:
        self.passed_s = 0.0

    def clock(self) -> Clock:
        return Clock(lambda: real_time.monotonic() + self.passed_s, lambda: real_time.time() + self.passed_s, "one")

    async def pass_s(self, device: Device, seconds: float) -> None:
        """Move on, and let the device see what is due now."""
        self.passed_s += seconds
        (await device.parts.jobs.open()).runner.feed.wake()
        await asyncio.sleep(0.01)


def url(port: int) -> str:
    return f"http://127.0.0.1:{port}/hook"


async def told(device: Device, job: str) -> str:
    """Wait until the webhooks of a job are done; their status."""
    async with asyncio.timeout(60.0):
        while (status := (await view(device, job))["webhook_status"]) in (None, "pending"):  # noqa: ASYNC110 -- the API has no event for it
            await asyncio.sleep(0.01)
    return str(status)


async def secret(device: Device, method: str = "GET") -> str:
    return str((await request(device, method, "/v1/webhooks/secret")).json["secret"])


async def test_a_receiver_is_told_of_the_end_and_fetches_the_answer(tmp_path: Path) -> None:
    """The specification's own library accepts it with the caller's secret; it holds no content."""
    async with receiving() as receiver, running(tmp_path, cloud=JobCloud(), jobs=JOBS) as device:
        job = await accepted(device, "my pin is 4711", tags="private", webhook=url(receiver.port))
        assert await told(device, job) == "delivered"
        ((headers, body),) = receiver.arrived
        payload = Webhook(await secret(device)).verify(body, headers)
        assert payload["type"] == "job.succeeded"
        assert payload["data"] == {"id": job, "status": "succeeded", "object": "job"}
        found = await view(device, job)
        assert (found["webhook"], found["status"]) == (url(receiver.port), "succeeded")
        metrics = (await device.get("/metrics")).body.decode()
        assert 'causeway_edge_jobs_webhooks_total{outcome="delivered"} 1.0' in metrics


async def test_a_rotated_secret_signs_too(tmp_path: Path) -> None:
    async with receiving() as receiver, running(tmp_path, cloud=JobCloud(), jobs=JOBS) as device:
        old = await secret(device)
        new = await secret(device, "POST")
        assert new != old
        job = await accepted(device, webhook=url(receiver.port))
        assert await told(device, job) == "delivered"
        ((headers, body),) = receiver.arrived
        for known in (old, new):
            Webhook(known).verify(body, headers)


async def test_a_receiver_that_is_away_costs_no_attempt_and_is_told_when_it_is_back(tmp_path: Path) -> None:
    time, port = Time(), free_port()
    async with running(tmp_path, cloud=JobCloud(), jobs=JOBS, clock=time.clock()) as device:
        job = await accepted(device, webhook=url(port))
        await ended(device, job)
        sender = (await device.parts.jobs.open()).webhooks
        while sender.unreachable < 2 * len(RETRY_DELAYS_S):  # more than a receiver that answers may refuse
            await time.pass_s(device, 60.0)
        assert (await view(device, job))["webhook_status"] == "pending"
        async with receiving(port=port) as receiver:
            while not receiver.arrived:
                await time.pass_s(device, 60.0)
            assert await told(device, job) == "delivered"
            assert receiver.deliveries == 1


async def test_a_receiver_that_fails_is_tried_again_for_days_and_then_given_up(tmp_path: Path) -> None:
    time = Time()
    jobs = msgspec.structs.replace(JOBS, result_ttl_s=30 * 86400.0)
    async with receiving() as receiver, running(tmp_path, cloud=JobCloud(), jobs=jobs, clock=time.clock()) as device:
        receiver.status = 500
        job = await accepted(device, webhook=url(receiver.port))
        await ended(device, job)
        while (await view(device, job))["webhook_status"] == "pending":
            await time.pass_s(device, 3600.0)
        assert (await view(device, job))["webhook_status"] == "failed"
        assert receiver.deliveries == 1 + len(RETRY_DELAYS_S)
        assert 0.8 * sum(RETRY_DELAYS_S) <= time.passed_s <= 1.5 * sum(RETRY_DELAYS_S)
        assert len({headers["webhook-id"] for headers, _ in receiver.arrived}) == 1


@pytest.mark.parametrize(("status", "becomes"), [(410, "disabled"), (204, "delivered")])
async def test_the_first_answer_may_be_the_last(tmp_path: Path, status: int, becomes: str) -> None:
    async with receiving() as receiver, running(tmp_path, cloud=JobCloud(), jobs=JOBS) as device:
        receiver.status = status
        job = await accepted(device, webhook=url(receiver.port))
        assert await told(device, job) == becomes
        assert len(receiver.arrived) == 1


async def test_what_the_daemon_could_not_tell_before_its_end_is_told_after_it(tmp_path: Path) -> None:
    port = free_port()
    async with running(tmp_path, cloud=JobCloud(), jobs=JOBS) as device:
        job = await accepted(device, webhook=url(port))
        await ended(device, job)
    async with receiving(port=port) as receiver, running(tmp_path, cloud=JobCloud(), jobs=JOBS) as device:
        assert await told(device, job) == "delivered"
        assert len(receiver.arrived) == 1


async def test_a_url_that_leads_into_the_device_is_refused_unless_the_configuration_allows_it(tmp_path: Path) -> None:
    async with running(tmp_path, cloud=JobCloud(), jobs=PROMPT) as device:
        for bad in (
            url(8080),
            "https://127.0.0.1/",
            "https://10.0.0.1/hook",
            "ftp://example.com",
            "https://",
            "x" * 3000,
        ):
            answer = await submit(device, webhook=bad)
            assert (answer.status, answer.code) == (400, "webhook_refused"), bad
        assert (await submit(device, webhook="https://example.com/hook")).status == 202


async def test_a_slow_receiver_holds_up_no_other(tmp_path: Path) -> None:
    async with receiving() as slow, receiving() as fast, running(tmp_path, cloud=JobCloud(), jobs=JOBS) as device:
        slow.go_on.clear()
        hung = [await accepted(device, webhook=url(slow.port)) for _ in range(12)]
        job = await accepted(device, webhook=url(fast.port))
        assert await told(device, job) == "delivered"
        assert slow.deliveries <= HERE.concurrency_per_receiver
        slow.go_on.set()
        assert {await told(device, one) for one in hung} == {"delivered"}


async def test_purged_jobs_are_told_no_more(tmp_path: Path) -> None:
    async with running(tmp_path, cloud=JobCloud(), jobs=JOBS) as device:
        job = await accepted(device, webhook=url(free_port()))
        await ended(device, job)
        assert (await request(device, "POST", f"/v1/jobs/{job}/purge")).status == 200
        stats = (await device.parts.jobs.open()).store.stats
        assert (stats.webhooks_due, stats.webhooks) == (0, {"lost": 1})
