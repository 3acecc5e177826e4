"""Preemption on a real event loop: a request stops, waits and continues, and no permit is lost however it ends."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from causeway_server.cloud_pool.admission import AdmissionController, AdmissionSettings, Preempted
from causeway_server.cloud_pool.admission.controller import AdmissionMetrics
from causeway_server.router.errors import DeadlineExceeded, QueueFull

from .waiters import acquire


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


class Work:
    """Sends a request to a silent server whenever it has a permit, until released."""

    def __init__(self, admission: AdmissionController, tenant: str) -> None:
        self.events: list[str] = []
        self.answered = asyncio.Event()
        self.task = asyncio.ensure_future(self._run(admission, tenant))

    async def _run(self, admission: AdmissionController, tenant: str) -> None:
        async with acquire(admission, "interactive", 60.0, tenant, preemptible=True) as permit:
            while True:
                try:
                    with permit:
                        self.events.append("began")
                        await self.answered.wait()
                        permit.first_token(0.1)
                except Preempted:
                    self.events.append("preempted")
                    await permit.granted()
                else:
                    self.events.append("done")
                    return

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def controller(permits: int = 1, max_queued: int = 4, clock: Clock | None = None) -> AdmissionController:
    return AdmissionController(
        permits, max_queued, AdmissionSettings(permits=permits, max_queued=max_queued), clock=clock or Clock()
    )


async def preempted(admission: AdmissionController) -> tuple[Work, Work]:
    """A preempted request, and the one that has its permit."""
    flood = Work(admission, "flood")
    await settle()
    quiet = Work(admission, "quiet")
    await settle()
    assert (flood.events, quiet.events) == (["began", "preempted"], ["began"])
    return flood, quiet


async def test_a_preempted_request_runs_again_in_its_turn() -> None:
    admission = controller()
    flood, quiet = await preempted(admission)
    assert (admission.scheduler.running, admission.scheduler.waiting) == (1, 1)
    quiet.answered.set()
    await settle()
    assert quiet.events == ["began", "done"]
    assert flood.events == ["began", "preempted", "began"]
    flood.answered.set()
    await settle()
    assert flood.events[-1] == "done"
    assert (admission.scheduler.running, admission.scheduler.waiting) == (0, 0)


async def test_cancelling_a_preempted_request_leaves_the_other_alone() -> None:
    admission = controller()
    flood, quiet = await preempted(admission)
    await flood.end()
    assert (admission.scheduler.running, admission.scheduler.waiting) == (1, 0)
    await quiet.end()
    assert (admission.scheduler.running, admission.scheduler.waiting) == (0, 0)


async def test_cancelling_at_the_moment_of_preemption_leaks_nothing() -> None:
    admission = controller()
    flood = Work(admission, "flood")
    await settle()
    quiet = Work(admission, "quiet")
    await asyncio.sleep(0)
    await flood.end()
    await settle()
    assert (admission.scheduler.running, admission.scheduler.waiting) == (1, 0)
    await quiet.end()
    assert (admission.scheduler.running, admission.scheduler.waiting) == (0, 0)


async def test_an_immediate_regrant_still_restarts_the_work() -> None:
    """Its call in Triton was already stopped."""
    admission = controller()
    flood = Work(admission, "flood")
    await settle()
    async with acquire(admission, "interactive", 60.0, "quiet"):
        pass
    await settle()
    assert flood.events == ["began", "preempted", "began"]
    assert (admission.scheduler.running, admission.scheduler.waiting) == (1, 0)
    await flood.end()
    assert admission.scheduler.running == 0


async def test_a_first_token_at_the_moment_of_preemption_is_discarded() -> None:
    admission = controller()
    flood = Work(admission, "flood")
    await settle()
    flood.answered.set()
    quiet = Work(admission, "quiet")
    await settle()
    assert flood.events in (["began", "done"], ["began", "preempted"])
    if flood.events[-1] == "preempted":
        quiet.answered.set()
        await settle()
    assert flood.events[-1] == "done"
    await quiet.end()
    assert (admission.scheduler.running, admission.scheduler.waiting) == (0, 0)


async def test_a_preempted_request_keeps_its_deadline() -> None:
    clock = Clock()
    admission = controller(clock=clock)
    flood = Work(admission, "flood")
    await settle()
    quiet = Work(admission, "quiet")
    await asyncio.sleep(0)
    clock.now += 61.0
    await settle()
    assert isinstance(flood.task.exception(), DeadlineExceeded)
    await quiet.end()
    assert (admission.scheduler.running, admission.scheduler.waiting) == (0, 0)


async def test_a_preempted_request_can_be_displaced_from_a_full_queue() -> None:
    admission = AdmissionController(1, 1, clock=Clock())
    bulk = asyncio.ensure_future(_bulk(admission))
    await settle()
    urgent = Work(admission, "quiet")
    await settle()
    assert admission.scheduler.waiting_of("bulk") == 1
    more = Work(admission, "other")
    await settle()
    assert isinstance(bulk.exception(), QueueFull)
    for work in (urgent, more):
        await work.end()
    assert (admission.scheduler.running, admission.scheduler.waiting) == (0, 0)


async def _bulk(admission: AdmissionController) -> None:
    async with acquire(admission, "bulk", 60.0, "flood", preemptible=True) as permit:
        try:
            with permit:
                await asyncio.Event().wait()
        except Preempted:
            await permit.granted()


async def test_a_request_that_is_not_preemptible_keeps_its_permit() -> None:
    admission = controller()

    async def keeps() -> None:
        async with acquire(admission, "interactive", 60.0, "flood"):
            await asyncio.Event().wait()

    held = asyncio.ensure_future(keeps())
    await settle()
    quiet = Work(admission, "quiet")
    await settle()
    assert quiet.events == []
    held.cancel()
    await settle()
    assert quiet.events == ["began"]
    await quiet.end()


async def test_errors_of_the_work_pass_through() -> None:
    admission = controller()

    async def work(raised: type[Exception]) -> None:
        async with acquire(admission, "interactive", 60.0, preemptible=True) as permit:
            with permit:
                raise raised

    for raised in (RuntimeError, TimeoutError):
        with pytest.raises(raised):
            await work(raised)
    assert (admission.scheduler.running, admission.scheduler.waiting) == (0, 0)


async def test_preemptions_are_counted() -> None:
    registry = CollectorRegistry()
    metrics = AdmissionMetrics(registry)
    admission = AdmissionController(1, 4, clock=Clock(), metrics=metrics, tier="large")
    works = await preempted(admission)
    of = {"tier": "large", "priority": "interactive"}
    assert registry.get_sample_value("causeway_gateway_preemptions_total", of) == 1.0
    for work in works:
        await work.end()
