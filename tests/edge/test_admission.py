"""Rates, slots and the queue: what is given is given back."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_node.serving.admission import _CLIENTS, Admission, AdmissionLimits
from router.errors import DeadlineExceeded, Draining, QueueFull, RateLimited

from .scripted import until


def later(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


class Worker:
    """Takes a slot and holds it until told to go."""

    def __init__(self, admission: Admission, deadline_s: float = 60.0) -> None:
        self.go = asyncio.Event()
        self.started = False
        self.task = asyncio.ensure_future(self._work(admission, later(deadline_s)))

    async def _work(self, admission: Admission, deadline: float) -> None:
        async with admission.slot(deadline):
            self.started = True
            await self.go.wait()


async def test_only_so_many_work_and_the_rest_wait_in_order() -> None:
    """A slot that is given back goes to whoever waits longest."""
    admission = Admission(AdmissionLimits(concurrent=1, queue=2))
    first, second, third = Worker(admission), Worker(admission), Worker(admission)
    await until(lambda: first.started and admission.stats().waiting == 2)
    first.go.set()
    await until(lambda: second.started)
    assert not third.started
    second.go.set()
    third.go.set()
    await asyncio.gather(first.task, second.task, third.task)
    assert (admission.stats().working, admission.stats().waiting) == (0, 0)


async def test_a_full_queue_refuses_at_once_and_says_when_to_come_back() -> None:
    """Nobody waits in vain: the next one is refused with a Retry-After."""
    admission = Admission(AdmissionLimits(concurrent=1, queue=0))
    worker = Worker(admission)
    await until(lambda: worker.started)
    with pytest.raises(QueueFull) as refused:
        await admission.take(later(1))
    assert refused.value.retry_after_s is not None
    assert refused.value.retry_after_s >= 1.0
    worker.go.set()
    await worker.task


async def test_whoever_waits_past_the_deadline_is_told_and_leaves_the_queue() -> None:
    """A deadline that passes in the queue frees the place in it."""
    admission = Admission(AdmissionLimits(concurrent=1, queue=1))
    worker = Worker(admission)
    await until(lambda: worker.started)
    with pytest.raises(DeadlineExceeded):
        await admission.take(later(0.01))
    assert admission.stats().waiting == 0
    worker.go.set()
    await worker.task
    assert admission.stats().working == 0


async def test_a_waiter_that_is_cancelled_just_as_its_turn_comes_passes_the_slot_on() -> None:
    """The turn and the cancellation in the same step: the slot is not lost."""
    admission = Admission(AdmissionLimits(concurrent=1, queue=2))
    first, second, third = Worker(admission), Worker(admission), Worker(admission)
    await until(lambda: first.started and admission.stats().waiting == 2)
    admission._give_back()  # the first one's slot goes to the second …
    second.task.cancel()  # … who leaves before it runs
    await until(lambda: third.started)
    admission._working += 1  # what the line above took from the first one
    for worker in (first, third):
        worker.go.set()
    await asyncio.gather(first.task, third.task)
    assert admission.stats().working == 0


@given(st.lists(st.sampled_from(["start", "finish", "cancel"]), max_size=40), st.integers(1, 3), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_no_sequence_of_comings_and_goings_loses_a_slot(steps: list[str], concurrent: int, queue: int) -> None:
    """However requests start, end and are cancelled, at the end nobody is at work and nobody waits."""

    async def play() -> None:
        admission = Admission(AdmissionLimits(concurrent=concurrent, queue=queue))
        workers: list[Worker] = []
        for at, step in enumerate(steps):
            if step == "start":
                workers.append(Worker(admission))
            elif workers:
                worker = workers[at % len(workers)]
                worker.task.cancel() if step == "cancel" else worker.go.set()
            if at % 3:
                await asyncio.sleep(0)
            assert admission.stats().working <= concurrent
            assert admission.stats().waiting <= queue
        for worker in workers:
            worker.go.set()
        ended = await asyncio.gather(*(worker.task for worker in workers), return_exceptions=True)
        assert all(e is None or isinstance(e, (QueueFull, asyncio.CancelledError)) for e in ended)
        assert (admission.stats().working, admission.stats().waiting) == (0, 0)

    asyncio.run(play())


def test_a_client_has_its_rate_and_others_have_theirs() -> None:
    """A burst of one second's worth, then the rate; the wait that is told is the true one."""
    admission = Admission(AdmissionLimits(per_client_rps=2.0))
    admission.admit("a", 0.0)
    admission.admit("a", 0.0)
    with pytest.raises(RateLimited) as refused:
        admission.admit("a", 0.1)
    assert refused.value.retry_after_s == pytest.approx(0.4)
    admission.admit("b", 0.1)
    admission.admit("a", 0.5)


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        ("2001:db8:0:7::1", "2001:db8:0:7:ffff::2", True),
        ("2001:db8:0:7::1", "2001:db8:0:8::1", False),
        ("fe80::1%eth0", "fe80::2", True),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
        ("192.0.2.1", "192.0.2.2", False),
        ("::", "kiosk", False),
        ("kiosk", "kiosk 2", False),
    ],
)
def test_the_addresses_of_one_customer_share_a_rate(first: str, second: str, shared: bool) -> None:
    """Who has an IPv6 address has as many as he likes: a /64 counts as one client."""
    admission = Admission(AdmissionLimits(per_client_rps=1.0))
    admission.admit(first, 0.0)
    with pytest.raises(RateLimited) if shared else nullcontext():
        admission.admit(second, 0.0)


def test_a_clock_that_stands_still_or_goes_back_gives_nothing_away() -> None:
    """Tokens come with time that passes, never with time that is taken back."""
    admission = Admission(AdmissionLimits(per_client_rps=1.0))
    admission.admit("a", 10.0)
    for now in (10.0, 5.0, 5.5):
        with pytest.raises(RateLimited):
            admission.admit("a", now)


def test_the_table_of_clients_is_bounded() -> None:
    """A flood of names takes no more memory than the table has places."""
    admission = Admission(AdmissionLimits(per_client_rps=1.0))
    for number in range(_CLIENTS + 100):
        admission.admit(f"client {number}", 0.0)
    assert admission.stats().clients == _CLIENTS


def test_nobody_comes_in_while_draining() -> None:
    """A daemon that is going away says so."""
    admission = Admission(AdmissionLimits())
    admission.drain()
    with pytest.raises(Draining):
        admission.admit("a", 0.0)


async def test_more_room_lets_those_who_wait_start() -> None:
    """A policy that allows more at once is felt right away."""
    admission = Admission(AdmissionLimits(concurrent=1, queue=4))
    workers = [Worker(admission) for _ in range(3)]
    await until(lambda: admission.stats().waiting == 2)
    admission.set_limits(AdmissionLimits(concurrent=3, queue=4))
    await until(lambda: all(worker.started for worker in workers))
    for worker in workers:
        worker.go.set()
    await asyncio.gather(*(worker.task for worker in workers))
