"""Preemption on a real event loop: a request stops, waits and continues, and no permit is lost however it ends."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from cloud_pool.admission import AdmissionController, AdmissionSettings, Preempted
from cloud_pool.admission.metrics import AdmissionMetrics
from router.errors import DeadlineExceeded, QueueFull


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
        self.said: list[str] = []
        self.answered = asyncio.Event()
        self.task = asyncio.ensure_future(self._run(admission, tenant))

    async def _run(self, admission: AdmissionController, tenant: str) -> None:
        async with admission.acquire("interactive", 60.0, tenant, preemptible=True) as place:
            while True:
                try:
                    async with place.while_held():
                        self.said.append("began")
                        await self.answered.wait()
                        place.first_token(0.1)
                except Preempted:
                    self.said.append("gave back")
                    await place.reacquire()
                else:
                    self.said.append("done")
                    return

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def door(places: int = 1, queue: int = 4, clock: Clock | None = None) -> AdmissionController:
    return AdmissionController(
        places, queue, AdmissionSettings(permits=places, max_queued=queue), clock=clock or Clock()
    )


async def preempted(admission: AdmissionController) -> tuple[Work, Work]:
    """A preempted request, and the one that has its permit."""
    flood = Work(admission, "flood")
    await settle()
    quiet = Work(admission, "quiet")
    await settle()
    assert (flood.said, quiet.said) == (["began", "gave back"], ["began"])
    return flood, quiet


async def test_a_preempted_request_runs_again_in_its_turn() -> None:
    admission = door()
    flood, quiet = await preempted(admission)
    assert (admission.running, admission.waiting) == (1, 1)
    quiet.answered.set()
    await settle()
    assert quiet.said == ["began", "done"]
    assert flood.said == ["began", "gave back", "began"]
    flood.answered.set()
    await settle()
    assert flood.said[-1] == "done"
    assert (admission.running, admission.waiting) == (0, 0)


async def test_cancelling_a_preempted_request_leaves_the_other_alone() -> None:
    admission = door()
    flood, quiet = await preempted(admission)
    await flood.end()
    assert (admission.running, admission.waiting) == (1, 0)
    await quiet.end()
    assert (admission.running, admission.waiting) == (0, 0)


async def test_cancelling_at_the_moment_of_preemption_leaks_nothing() -> None:
    admission = door()
    flood = Work(admission, "flood")
    await settle()
    quiet = Work(admission, "quiet")
    await asyncio.sleep(0)
    await flood.end()
    await settle()
    assert (admission.running, admission.waiting) == (1, 0)
    await quiet.end()
    assert (admission.running, admission.waiting) == (0, 0)


async def test_an_immediate_regrant_still_restarts_the_work() -> None:
    """Its server was already told to stop."""
    admission = door()
    flood = Work(admission, "flood")
    await settle()
    async with admission.acquire("interactive", 60.0, "quiet"):
        pass
    await settle()
    assert flood.said == ["began", "gave back", "began"]
    assert (admission.running, admission.waiting) == (1, 0)
    await flood.end()
    assert admission.running == 0


async def test_a_first_token_at_the_moment_of_preemption_is_discarded() -> None:
    admission = door()
    flood = Work(admission, "flood")
    await settle()
    flood.answered.set()
    quiet = Work(admission, "quiet")
    await settle()
    assert flood.said in (["began", "done"], ["began", "gave back"])
    if flood.said[-1] == "gave back":
        quiet.answered.set()
        await settle()
    assert flood.said[-1] == "done"
    await quiet.end()
    assert (admission.running, admission.waiting) == (0, 0)


async def test_a_preempted_request_keeps_its_deadline() -> None:
    clock = Clock()
    admission = door(clock=clock)
    flood = Work(admission, "flood")
    await settle()
    quiet = Work(admission, "quiet")
    await asyncio.sleep(0)
    clock.now += 61.0
    await settle()
    assert isinstance(flood.task.exception(), DeadlineExceeded)
    await quiet.end()
    assert (admission.running, admission.waiting) == (0, 0)


async def test_a_preempted_request_can_be_displaced_from_a_full_queue() -> None:
    admission = AdmissionController(1, 1, clock=Clock())
    bulk = asyncio.ensure_future(_bulk(admission))
    await settle()
    urgent = Work(admission, "quiet")
    await settle()
    assert admission.waiting_of("bulk") == 1
    more = Work(admission, "other")
    await settle()
    assert isinstance(bulk.exception(), QueueFull)
    for work in (urgent, more):
        await work.end()
    assert (admission.running, admission.waiting) == (0, 0)


async def _bulk(admission: AdmissionController) -> None:
    async with admission.acquire("bulk", 60.0, "flood", preemptible=True) as place:
        try:
            async with place.while_held():
                await asyncio.Event().wait()
        except Preempted:
            await place.reacquire()


async def test_a_request_that_is_not_preemptible_keeps_its_permit() -> None:
    admission = door()

    async def keeps() -> None:
        async with admission.acquire("interactive", 60.0, "flood"):
            await asyncio.Event().wait()

    held = asyncio.ensure_future(keeps())
    await settle()
    quiet = Work(admission, "quiet")
    await settle()
    assert quiet.said == []
    held.cancel()
    await settle()
    assert quiet.said == ["began"]
    await quiet.end()


async def test_errors_of_the_work_pass_through() -> None:
    admission = door()
    for raised in (RuntimeError, TimeoutError):
        with pytest.raises(raised):
            async with admission.acquire("interactive", 60.0, preemptible=True) as place, place.while_held():
                raise raised
    assert (admission.running, admission.waiting) == (0, 0)


async def test_preemptions_are_counted() -> None:
    registry = CollectorRegistry()
    metrics = AdmissionMetrics(registry)
    admission = AdmissionController(1, 4, clock=Clock(), on_preempted=metrics.preempted("large"))
    works = await preempted(admission)
    of = {"tier": "large", "priority": "interactive"}
    assert registry.get_sample_value("causeway_cloud_preemptions_total", of) == 1.0
    for work in works:
        await work.end()
