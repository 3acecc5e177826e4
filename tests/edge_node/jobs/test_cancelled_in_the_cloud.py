"""A job that is cancelled on the device is cancelled in the cloud, later if the cloud is away."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from causeway_server.edge_node.clock import Clock
from causeway_server.edge_node.config.schema import OutboxConfig
from causeway_server.edge_node.jobs.rows import Cancellation
from tests.waiting import until

from ..device import Device, running
from .cloud import JobCloud
from .killed_outbox import new_job
from .support import PROMPT, accepted, away, opened, request, view


async def cancel(device: Device, job: str) -> None:
    assert (await request(device, "DELETE", f"/v1/jobs/{job}")).json["status"] == "cancelled"


def told(device: Device) -> bool:
    """Whether the device has nothing to tell the cloud."""
    stats = device.parts.jobs.stats
    return stats is not None and stats.cancellations_due == 0


@pytest.mark.slow
async def test_a_cancelled_job_is_cancelled_in_the_cloud(tmp_path: Path) -> None:
    cloud = JobCloud()
    cloud.waits = True
    async with running(tmp_path, cloud=cloud, jobs=PROMPT) as device:
        job = await accepted(device, tags="cloud")
        await until(lambda: cloud.submissions == 1)
        await cancel(device, job)
        await until(lambda: told(device))
        assert cloud.cancelled == [job]


@pytest.mark.slow
async def test_a_cancellation_waits_for_the_cloud_also_over_a_restart(tmp_path: Path) -> None:
    cloud = JobCloud()
    cloud.waits = True
    async with running(tmp_path, cloud=cloud, jobs=PROMPT, probe_interval_s=0.02) as device:
        job = await accepted(device, tags="cloud", deadline_ms=3_600_000)
        await until(lambda: cloud.submissions == 1)
        cloud.cancel_status = 503
        await cancel(device, job)
        await until(lambda: bool(cloud.cancelled))
        assert not told(device)
    gone = away()
    async with running(tmp_path, cloud=gone, jobs=PROMPT, probe_interval_s=0.02) as device:
        assert (await view(device, job))["status"] == "cancelled"
        assert not told(device)
        await gone.come_back()
        await until(lambda: gone.cancelled == [job])  # which does not know it: asked once more, in a minute
        assert not told(device)


@pytest.mark.slow
@pytest.mark.parametrize("status", [200, 400, 403, 405, 409, 501])
async def test_an_answer_that_another_try_would_not_change_is_final(tmp_path: Path, status: int) -> None:
    cloud = JobCloud()
    cloud.waits = True
    cloud.cancel_status = status
    async with running(tmp_path, cloud=cloud, jobs=PROMPT) as device:
        job = await accepted(device, tags="cloud")
        await until(lambda: cloud.submissions == 1)
        await cancel(device, job)
        await until(lambda: told(device))
    assert cloud.cancelled == [job]


@pytest.mark.slow
async def test_a_cloud_that_does_not_know_the_job_is_asked_once_more(tmp_path: Path) -> None:
    """The submission may have been on its way."""
    passed_s = 0.0
    clock = Clock(lambda: time.monotonic() + passed_s, boot_id="one")
    cloud = JobCloud()
    cloud.waits = True
    async with running(tmp_path, cloud=cloud, jobs=PROMPT, clock=clock) as device:
        job = await accepted(device, tags="cloud", deadline_ms=3_600_000)
        await until(lambda: cloud.submissions == 1)
        cloud.forget()
        await cancel(device, job)
        await until(lambda: len(cloud.cancelled) == 1)
        assert not told(device)

        def told_later() -> bool:
            nonlocal passed_s
            passed_s += 1.0  # the minute begins when the daemon has read the answer, which is soon
            return told(device)

        await until(told_later)
    assert cloud.cancelled == [job, job]


@pytest.mark.slow
async def test_a_job_that_was_never_sent_is_not_told_of(tmp_path: Path) -> None:
    cloud = away()
    async with running(tmp_path, cloud=cloud, jobs=PROMPT, probe_interval_s=0.02) as device:
        await cancel(device, await accepted(device, tags="cloud"))
        assert told(device)
    assert cloud.cancelled == []


async def test_bulk_jobs_that_give_way_are_told_of_until_their_deadline(tmp_path: Path) -> None:
    now = 0.0
    store = await opened(tmp_path, OutboxConfig(max_jobs=2, bulk_share=1.0), Clock(lambda: now, lambda: now, "one"))
    sent = [(await store.accept(new_job(store, text), b"{}")).job for text in ("bulk-one", "bulk-two")]
    for claimed in await store.claim("edge", 2):
        assert await store.pin(claimed.job, "large")
        assert await store.release(claimed.job)
    for text in ("bulk-three", "bulk-four"):
        await store.accept(new_job(store, text), b"{}")
    due = await store.run(store.cancellations.due, 10)
    assert {one.key for one in due} == {job.id for job in sent}
    await store.run(store.cancellations.settle, due[0], known=True)
    await store.run(store.cancellations.settle, due[1], known=False)
    assert await store.run(store.cancellations.due, 10) == []
    now = 70.0
    assert await store.run(store.cancellations.due, 10) == [Cancellation(due[1].key, unknown=True)]
    now = 1001.0
    assert await store.run(store.cancellations.due, 10) == []
    assert store.stats.cancellations_due == 0
    store.close()
