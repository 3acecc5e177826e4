"""Waiters on a real event loop: their errors, and that no permit is lost however they leave."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from causeway_server.cloud_pool.admission import AdmissionController
from causeway_server.cloud_pool.admission.controller import AdmissionMetrics
from causeway_server.router.errors import QueueFull, Shed
from causeway_server.router.types import Priority

from .waiters import acquire


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def hold(admission: AdmissionController, priority: Priority = "standard", tenant: str = "") -> None:
    """Hold a permit until cancelled."""
    async with acquire(admission, priority, 60.0, tenant):
        await asyncio.Event().wait()


async def end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_displaced_waiter_gets_a_429_with_retry_after() -> None:
    admission = AdmissionController(1, 1, rng=lambda: 1.0)
    held = asyncio.ensure_future(hold(admission))
    await settle()
    bulk = asyncio.ensure_future(hold(admission, "bulk"))
    await settle()
    urgent = asyncio.ensure_future(hold(admission, "interactive"))
    await settle()
    assert bulk.done()
    error = bulk.exception()
    assert isinstance(error, QueueFull)
    assert error.retry_after_s == 1.25
    assert admission.scheduler.waiting_of("interactive") == 1
    await end(held)
    await settle()
    assert (admission.scheduler.running, admission.scheduler.waiting) == (1, 0)
    await end(urgent)
    assert (admission.scheduler.running, admission.scheduler.waiting) == (0, 0)


async def test_a_displaced_waiter_cancelled_at_once_leaves_nothing() -> None:
    admission = AdmissionController(1, 1)
    held = asyncio.ensure_future(hold(admission))
    await settle()
    bulk = asyncio.ensure_future(hold(admission, "bulk"))
    await settle()
    bulk.cancel()
    urgent = asyncio.ensure_future(hold(admission, "interactive"))
    await asyncio.gather(bulk, return_exceptions=True)
    await settle()
    assert (admission.scheduler.running, admission.scheduler.waiting) == (1, 1)
    await end(held, urgent)
    assert (admission.scheduler.running, admission.scheduler.waiting) == (0, 0)


async def test_a_permit_granted_to_a_cancelled_waiter_passes_on() -> None:
    admission = AdmissionController(1, 8)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(acquire(admission, "standard", 60.0))
        waiters = [asyncio.ensure_future(hold(admission)) for _ in range(3)]
        await settle()
    # Granted to the first, which has not run yet.
    waiters[0].cancel()
    await settle()
    assert (admission.scheduler.running, admission.scheduler.waiting) == (1, 1)
    await end(*waiters)
    assert (admission.scheduler.running, admission.scheduler.waiting) == (0, 0)


@pytest.mark.parametrize("step", ["nothing", "first token", "failed"])
async def test_failing_work_releases_its_permit(step: str) -> None:
    admission = AdmissionController(1, 8)

    async def work() -> None:
        async with acquire(admission, "standard", 60.0) as permit:
            if step == "first token":
                permit.first_token(0.1)
            if step == "failed":
                permit.failed()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await work()
    assert (admission.scheduler.running, admission.scheduler.waiting) == (0, 0)


async def test_waits_and_sheds_are_counted() -> None:
    clock, registry = Clock(), CollectorRegistry()
    metrics = AdmissionMetrics(registry)
    admission = AdmissionController(1, 1, clock=clock, metrics=metrics, tier="large")
    held = asyncio.ensure_future(hold(admission))
    await settle()
    waiting = asyncio.ensure_future(hold(admission, "interactive"))
    await settle()
    with pytest.raises(QueueFull):
        await hold(admission, "bulk")
    text = generate_latest(registry).decode()
    assert 'causeway_gateway_requests_queued{priority="interactive",tier="large"} 1.0' in text
    assert 'causeway_gateway_requests_running{tier="large"} 1.0' in text
    assert 'causeway_gateway_concurrency_limit{tier="large"} 1.0' in text
    assert 'causeway_gateway_requests_shed_total{priority="bulk",reason="queue_full",tier="large"} 1.0' in text
    clock.now += 0.3
    await end(held)
    await settle()
    waited = registry.get_sample_value(
        "causeway_gateway_queue_seconds_sum", {"tier": "large", "priority": "interactive"}
    )
    assert waited == pytest.approx(0.3)
    await end(waiting)


async def test_expected_waits() -> None:
    clock = Clock()
    admission = AdmissionController(2, 64, clock=clock)
    assert admission.scheduler.expected_wait_s("standard") == 0.0
    assert not admission.scheduler.saturated(clock.now)
    for _ in range(20):
        async with acquire(admission, "standard", 60.0):
            clock.now += 1.0
    tasks = [asyncio.ensure_future(hold(admission)) for _ in range(6)]
    await settle()
    assert admission.scheduler.waiting == 4
    assert admission.scheduler.expected_wait_s("standard") == pytest.approx(5 / 2, rel=0.2)
    assert admission.scheduler.expected_wait_s("interactive") == pytest.approx(1 / 2, rel=0.2)
    with pytest.raises(Shed) as raised:
        async with acquire(admission, "standard", 1.0):
            pass
    assert raised.value.retry_after_s is not None
    assert 2.0 <= raised.value.retry_after_s <= 3.5
    await end(*tasks)
