"""Requests of several sequences: they arrive as a whole, and their permits come one by one."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from causeway_server.cloud_pool.admission import AdmissionController, Permit
from causeway_server.cloud_pool.admission.scheduler import AdmissionScheduler, Reason
from causeway_server.cloud_pool.admission.waiting import Ticket, TicketState
from causeway_server.router.errors import DeadlineExceeded, QueueFull, Shed
from causeway_server.router.types import Priority

from .simulation import settings
from .waiters import acquire

HELD_S = 2.0


def request(
    sequences: int, tenant: str = "loud", *, at: float = 0.0, left_s: float = 60.0, priority: Priority = "standard"
) -> list[Ticket]:
    """The tickets of one request."""
    tickets = [Ticket(priority, tenant, 1.0, 1.0, at, at + left_s, preemptible=False) for _ in range(sequences)]
    for ticket in tickets:
        ticket.siblings = tickets
    return tickets


class SequenceBed:
    """A scheduler of four permits without a reserve, each of which is held for HELD_S."""

    def __init__(self, max_queued: int = 8) -> None:
        self.shed: Counter[tuple[Priority, Reason]] = Counter()
        config = {"reserved_share": 0.0, "preemption_share": 0.0}
        self.scheduler = AdmissionScheduler(settings(4, max_queued, least=0, **config), 0.0, self._shed)
        self.now = 0.0
        self.running: list[Ticket] = []

    def _shed(self, priority: Priority, reason: Reason) -> None:
        self.shed[priority, reason] += 1

    def arrive(self, tickets: list[Ticket]) -> list[Ticket]:
        moved = self.scheduler.arrive(tickets[0], self.now)
        self.running += [ticket for ticket in tickets if ticket.has_permit]
        return moved

    def release(self) -> list[Ticket]:
        """End the sequence that has run longest; returns those that are admitted for it."""
        self.now += HELD_S / 4
        admitted = self.scheduler.leave(self.running.pop(0), self.now)
        self.running += admitted
        return admitted

    def drained(self) -> str:
        """The tenants in the order of their permits, by their first letters."""
        order = ""
        while self.running:
            order += "".join(ticket.tenant[0] for ticket in self.release())
        return order


def test_as_many_sequences_run_as_there_are_permits() -> None:
    bed = SequenceBed()
    bed.arrive(request(6))
    assert (bed.scheduler.running, bed.scheduler.waiting) == (4, 2)
    assert bed.drained() == "ll"
    assert (bed.scheduler.running, bed.scheduler.waiting) == (0, 0)


def test_another_tenant_takes_turns_with_the_sequences() -> None:
    """Its first request waits for one release, and not for the other tenant's."""
    bed = SequenceBed(max_queued=100)
    bed.arrive(request(60))
    for _ in range(16):
        bed.arrive(request(1, "quiet", at=bed.now))
    order = bed.drained()
    assert order.startswith("q")
    assert order.rindex("q") <= 2 * 16


def test_a_single_request_of_the_same_cost_is_no_better_off() -> None:
    """Two tenants with as many sequences, in one request and in many, get as many permits, but for the credit."""
    bed = SequenceBed(max_queued=100)
    bed.arrive(request(20, "many"))
    for _ in range(16):
        bed.arrive(request(1, "single", at=bed.now))
    order = bed.drained()
    assert all(abs(order[:length].count("m") - order[:length].count("s")) <= 4 for length in range(len(order)))


def test_a_full_queue_counts_sequences_and_displaces_requests_as_a_whole() -> None:
    bed = SequenceBed(max_queued=8)
    bed.arrive(request(4))
    bed.arrive(request(1, at=0.1))
    young = request(7, at=0.2)
    bed.arrive(young)
    with pytest.raises(QueueFull):
        bed.arrive(request(1, at=0.3))
    moved = bed.arrive(request(1, "quiet", at=0.4))
    assert moved == young
    assert {ticket.state for ticket in young} == {TicketState.GONE}
    assert (bed.scheduler.waiting, bed.shed["standard", "displaced"]) == (2, 1)


def test_a_request_that_has_begun_neither_fills_the_queue_nor_leaves_it() -> None:
    bed = SequenceBed(max_queued=2)
    begun = request(9)
    bed.arrive(begun)
    assert bed.scheduler.waiting == 5
    for _ in range(2):
        assert bed.arrive(request(1, at=0.1)) == []
    with pytest.raises(QueueFull):
        bed.arrive(request(1, at=0.2))
    bed.arrive(request(1, "quiet", at=0.3))
    assert all(ticket.state is not TicketState.GONE for ticket in begun)
    assert bed.shed["standard", "displaced"] == 1


def test_a_request_whose_last_sequence_would_be_late_is_shed_before_its_first() -> None:
    """At two releases a second, 20 sequences take ten seconds."""
    bed = SequenceBed(max_queued=100)
    bed.arrive(request(4))
    bed.now = HELD_S
    bed.release()
    with pytest.raises(Shed) as shed:
        bed.arrive(request(20, at=bed.now, left_s=8.0))
    assert shed.value.retry_after_s is not None
    assert (bed.scheduler.running, bed.scheduler.waiting) == (3, 0)
    bed.arrive(request(20, at=bed.now, left_s=20.0))
    assert bed.scheduler.running == 4


def test_its_own_wait_is_no_overload_for_others() -> None:
    """A request of a hundred sequences is no standing queue: bulk work of other tenants is not shed for it."""
    bed = SequenceBed(max_queued=200)
    bed.arrive(request(100, priority="interactive"))
    for _ in range(20):
        bed.release()
    bed.arrive(request(1, "quiet", at=bed.now, priority="bulk", left_s=1e6))
    assert not bed.shed
    assert not bed.scheduler.saturated(bed.now)


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


class Running:
    """The sequences of one request at a controller: each runs until it is told to end."""

    def __init__(self, admission: AdmissionController, sequences: int, tenant: str = "loud") -> None:
        self.running = 0
        self.ends = [asyncio.Event() for _ in range(sequences)]
        self.task = asyncio.ensure_future(self._run(admission, tenant))

    async def _run(self, admission: AdmissionController, tenant: str) -> None:
        async with admission.acquire(len(self.ends), "standard", 60.0, tenant) as permits:
            await asyncio.gather(*map(self._sequence, permits, self.ends))

    async def _sequence(self, permit: Permit, end: asyncio.Event) -> None:
        await permit.granted()
        self.running += 1
        await end.wait()
        self.running -= 1
        permit.release()


async def test_a_sequence_that_ends_lets_the_next_one_run() -> None:
    admission = AdmissionController(permits=2, max_queued=8)
    running = Running(admission, 3)
    await settle()
    assert (running.running, admission.scheduler.running, admission.scheduler.waiting) == (2, 2, 1)
    running.ends[1].set()
    await settle()
    assert (running.running, admission.scheduler.running, admission.scheduler.waiting) == (2, 2, 0)
    for end in running.ends:
        end.set()
    await running.task
    assert (admission.scheduler.running, admission.scheduler.waiting) == (0, 0)


async def test_a_client_that_leaves_gives_every_permit_back() -> None:
    admission = AdmissionController(permits=2, max_queued=8)
    leaving, staying = Running(admission, 5), Running(admission, 2, "quiet")
    await settle()
    leaving.task.cancel()
    await asyncio.gather(leaving.task, return_exceptions=True)
    await settle()
    assert (staying.running, admission.scheduler.running, admission.scheduler.waiting) == (2, 2, 0)
    for end in staying.ends:
        end.set()
    await staying.task
    assert admission.scheduler.running == 0


async def test_a_client_that_leaves_as_a_permit_comes_passes_it_on() -> None:
    admission = AdmissionController(permits=1, max_queued=8)
    first, leaving, staying = Running(admission, 1), Running(admission, 3), Running(admission, 1)
    await settle()
    first.ends[0].set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    leaving.task.cancel()
    await asyncio.gather(first.task, leaving.task, return_exceptions=True)
    await settle()
    assert (staying.running, admission.scheduler.running, admission.scheduler.waiting) == (1, 1, 0)
    staying.ends[0].set()
    await staying.task


async def test_a_displaced_request_gets_one_error_for_all_its_sequences() -> None:
    admission = AdmissionController(permits=1, max_queued=2)
    first, displaced = Running(admission, 1), Running(admission, 3)
    await settle()
    quiet = Running(admission, 1, "quiet")
    await settle()
    with pytest.raises(QueueFull):
        await displaced.task
    for each in (first, quiet):
        each.ends[0].set()
        await each.task
    assert (admission.scheduler.running, admission.scheduler.waiting) == (0, 0)


async def test_a_displaced_request_learns_of_it_at_its_next_step() -> None:
    """Its tasks had not begun to wait when it was displaced."""
    admission = AdmissionController(permits=1, max_queued=2)
    async with acquire(admission, "standard", 60.0), admission.acquire(3, "standard", 60.0, "loud") as permits:
        quiet = Running(admission, 1, "quiet")
        await settle()
        for permit in permits:
            with pytest.raises(QueueFull):
                await permit.granted()
        quiet.task.cancel()
        await asyncio.gather(quiet.task, return_exceptions=True)
    assert (admission.scheduler.running, admission.scheduler.waiting) == (0, 0)


async def test_sequences_that_wait_beyond_the_deadline_fail() -> None:
    admission = AdmissionController(permits=1, max_queued=8)
    async with acquire(admission, "standard", 60.0):
        with pytest.raises(DeadlineExceeded):
            async with admission.acquire(2, "standard", 0.01) as permits:
                await permits[0].granted()
    assert (admission.scheduler.running, admission.scheduler.waiting) == (0, 0)
