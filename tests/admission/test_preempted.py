"""Who gives his place back on a real event loop: he stops, waits, goes on, and no place is lost however it ends."""

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
    """Asks a server that says nothing, whenever it has a place, until it is let go."""

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
    """One that gave its place back, and who has it."""
    flood = Work(admission, "flood")
    await settle()
    quiet = Work(admission, "quiet")
    await settle()
    assert (flood.said, quiet.said) == (["began", "gave back"], ["began"])
    return flood, quiet


async def test_it_goes_on_when_its_turn_comes() -> None:
    """Its work is stopped and done again; both end, and the place is free."""
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


async def test_it_is_cancelled_while_it_waits_again() -> None:
    """It leaves the queue, and the place of the other is not touched."""
    admission = door()
    flood, quiet = await preempted(admission)
    await flood.end()
    assert (admission.running, admission.waiting) == (1, 0)
    await quiet.end()
    assert (admission.running, admission.waiting) == (0, 0)


async def test_it_is_cancelled_before_it_knows() -> None:
    """In the moment in which its place goes to somebody else."""
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


async def test_it_has_a_place_again_before_it_knows() -> None:
    """The other has left at once: it begins anew all the same, for its server was told to stop."""
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


async def test_a_first_token_in_that_very_moment_is_too_late() -> None:
    """The place is gone already; nobody has seen the token, and it is made again."""
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


async def test_its_time_ends_before_it_waits_again() -> None:
    """The time for a request is one, however often it waits."""
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


async def test_it_gives_way_in_a_full_queue() -> None:
    """Behind more urgent work the youngest gets a 429, also if that had a place before."""
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


async def test_who_did_not_say_so_gives_nothing_back() -> None:
    """Its place is its own until it leaves."""
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


async def test_what_its_work_raises_is_told() -> None:
    """Whatever it is, and also a timeout of its own."""
    admission = door()
    for raised in (RuntimeError, TimeoutError):
        with pytest.raises(raised):
            async with admission.acquire("interactive", 60.0, preemptible=True) as place, place.while_held():
                raise raised
    assert (admission.running, admission.waiting) == (0, 0)


async def test_they_are_counted() -> None:
    """By tier and priority."""
    registry = CollectorRegistry()
    metrics = AdmissionMetrics(registry)
    admission = AdmissionController(1, 4, clock=Clock(), on_preempted=metrics.preempted("large"))
    works = await preempted(admission)
    of = {"tier": "large", "priority": "interactive"}
    assert registry.get_sample_value("causeway_cloud_preemptions_total", of) == 1.0
    for work in works:
        await work.end()
