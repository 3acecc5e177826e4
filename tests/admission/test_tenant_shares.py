"""Waiters on a real event loop: what they are told, and that no place is lost however they leave."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from cloud_pool.admission import AdmissionController, Priority
from cloud_pool.admission.metrics import AdmissionMetrics
from router.errors import QueueFull, Shed


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
    """Has a place until it is cancelled."""
    async with admission.acquire(priority, 60.0, tenant):
        await asyncio.Event().wait()


async def end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_who_gives_way_is_told() -> None:
    """The youngest bulk waiter gets a 429 that says when to come back, later than honest and never sooner."""
    admission = AdmissionController(1, 1, chance=lambda: 1.0)
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
    assert admission.waiting_of("interactive") == 1
    await end(held)
    await settle()
    assert (admission.running, admission.waiting) == (1, 0)
    await end(urgent)
    assert (admission.running, admission.waiting) == (0, 0)


async def test_who_gives_way_and_is_cancelled_at_once() -> None:
    """A waiter that is pushed out in the moment that it leaves on its own is just gone."""
    admission = AdmissionController(1, 1)
    held = asyncio.ensure_future(hold(admission))
    await settle()
    bulk = asyncio.ensure_future(hold(admission, "bulk"))
    await settle()
    bulk.cancel()
    urgent = asyncio.ensure_future(hold(admission, "interactive"))
    await asyncio.gather(bulk, return_exceptions=True)
    await settle()
    assert (admission.running, admission.waiting) == (1, 1)
    await end(held, urgent)
    assert (admission.running, admission.waiting) == (0, 0)


async def test_cancelled_with_a_place_just_given() -> None:
    """The place passes on to the next, and to the one after that."""
    admission = AdmissionController(1, 8)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(admission.acquire("standard", 60.0))
        waiters = [asyncio.ensure_future(hold(admission)) for _ in range(3)]
        await settle()
    # Given to the first, which has not run yet.
    waiters[0].cancel()
    await settle()
    assert (admission.running, admission.waiting) == (1, 1)
    await end(*waiters)
    assert (admission.running, admission.waiting) == (0, 0)


@pytest.mark.parametrize("step", ["nothing", "first token", "failed"])
async def test_work_that_fails_gives_its_place_back(step: str) -> None:
    """Whatever is raised inside, before the first token or after it."""
    admission = AdmissionController(1, 8)

    async def work() -> None:
        async with admission.acquire("standard", 60.0) as place:
            if step == "first token":
                place.first_token(0.1)
            if step == "failed":
                place.failed()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await work()
    assert (admission.running, admission.waiting) == (0, 0)


async def test_refusals_and_waits_are_counted() -> None:
    """How long each waited, who was turned away and why, who waits now and how many may go in."""
    clock, registry = Clock(), CollectorRegistry()
    metrics = AdmissionMetrics(registry)
    admission = AdmissionController(
        1, 1, clock=clock, on_admitted=metrics.admitted("large"), on_shed=metrics.shed("large")
    )
    metrics.watch("large", admission)
    held = asyncio.ensure_future(hold(admission))
    await settle()
    waiting = asyncio.ensure_future(hold(admission, "interactive"))
    await settle()
    with pytest.raises(QueueFull):
        await hold(admission, "bulk")
    text = generate_latest(registry).decode()
    assert 'causeway_cloud_requests_queued{priority="interactive",tier="large"} 1.0' in text
    assert 'causeway_cloud_requests_running{tier="large"} 1.0' in text
    assert 'causeway_cloud_concurrency_limit{tier="large"} 1.0' in text
    assert 'causeway_cloud_requests_shed_total{priority="bulk",reason="queue_full",tier="large"} 1.0' in text
    clock.now += 0.3
    await end(held)
    await settle()
    waited = registry.get_sample_value("causeway_cloud_queue_seconds_sum", {"tier": "large", "priority": "interactive"})
    assert waited == pytest.approx(0.3)
    await end(waiting)


async def test_estimates_for_the_ladder() -> None:
    """Nothing to wait for while a place is free; then as long as the places take that are given before."""
    clock = Clock()
    admission = AdmissionController(2, 64, clock=clock)
    assert admission.expected_wait_s("standard") == 0.0
    assert not admission.saturated
    for _ in range(20):
        async with admission.acquire("standard", 60.0):
            clock.now += 1.0
    tasks = [asyncio.ensure_future(hold(admission)) for _ in range(6)]
    await settle()
    assert admission.waiting == 4
    assert admission.expected_wait_s("standard") == pytest.approx(5 / 2, rel=0.2)
    assert admission.expected_wait_s("interactive") == pytest.approx(1 / 2, rel=0.2)
    with pytest.raises(Shed) as raised:
        async with admission.acquire("standard", 1.0):
            pass
    assert raised.value.retry_after_s is not None
    assert 2.0 <= raised.value.retry_after_s <= 3.5
    await end(*tasks)
