"""Rate limits, permits and the queue."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, nullcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from causeway_server.edge_node.serving.requests import Admission
from causeway_server.router.errors import DeadlineExceeded, Draining, QueueFull, RateLimited
from causeway_server.router.policy.compiled import Limits
from causeway_server.router.trackers import MAX_CLIENTS
from tests.waiting import until


def later(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


class Worker:
    """Acquires a permit and holds it until `done` is set."""

    def __init__(self, admission: Admission, client: str = "", deadline_s: float = 60.0, rank: int = 1) -> None:
        self.done = asyncio.Event()
        self.started = False
        self.task = asyncio.ensure_future(self._work(admission, client, later(deadline_s), rank))

    async def _work(self, admission: Admission, client: str, deadline: float, rank: int) -> None:
        async with admission.permit(deadline, client, rank):
            self.started = True
            await self.done.wait()


async def test_requests_beyond_the_limit_run_in_order_of_arrival() -> None:
    admission = Admission(Limits(concurrent=1, queue=2))
    first, second, third = Worker(admission), Worker(admission), Worker(admission)
    await until(lambda: first.started and admission.waiting == 2)
    first.done.set()
    await until(lambda: second.started)
    assert not third.started
    second.done.set()
    third.done.set()
    await asyncio.gather(first.task, second.task, third.task)
    assert (admission.running, admission.waiting) == (0, 0)


async def test_clients_take_turns() -> None:
    """One that has queued ten requests lets another's first start after its own next one."""
    admission = Admission(Limits(concurrent=1, queue=16))
    running = Worker(admission, "flood")
    flood = [Worker(admission, "flood") for _ in range(10)]
    await until(lambda: admission.waiting == 10)
    quiet = Worker(admission, "quiet")
    await until(lambda: admission.waiting == 11)
    for worker in (running, flood[0]):
        worker.done.set()
        await worker.task
    await until(lambda: quiet.started)
    assert [worker.started for worker in flood] == [True] + [False] * 9
    for worker in (quiet, *flood):
        worker.done.set()
    await asyncio.gather(quiet.task, *(worker.task for worker in flood))


async def test_a_higher_priority_starts_first_and_displaces_a_lower_one() -> None:
    admission = Admission(Limits(concurrent=1, queue=2))
    running = Worker(admission)
    bulk = [Worker(admission, "a", rank=2) for _ in range(2)]
    await until(lambda: admission.waiting == 2)
    urgent = Worker(admission, "a", rank=0)
    await until(bulk[1].task.done)
    assert isinstance(bulk[1].task.exception(), QueueFull)
    with pytest.raises(QueueFull):
        await Worker(admission, "quiet", 1.0, rank=2).task
    running.done.set()
    await until(lambda: urgent.started)
    assert not bulk[0].started
    for worker in (urgent, bulk[0]):
        worker.done.set()
    await asyncio.gather(running.task, urgent.task, bulk[0].task)
    assert (admission.running, admission.waiting) == (0, 0)


@pytest.mark.parametrize("ends", ["answered", "cancelled"])
async def test_a_flood_makes_room_in_a_full_queue(ends: str) -> None:
    """Its youngest request gets 429; that of a client with no more in the queue than others is left alone."""
    admission = Admission(Limits(concurrent=1, queue=4))
    flood = [Worker(admission, "flood") for _ in range(5)]
    await until(lambda: admission.waiting == 4)
    quiet = [Worker(admission, "quiet") for _ in range(2)]
    await until(lambda: flood[3].task.done() and flood[4].task.done())
    assert isinstance(flood[4].task.exception(), QueueFull)
    with pytest.raises(QueueFull):
        await Worker(admission, "quiet", 1.0).task
    with pytest.raises(QueueFull):
        await Worker(admission, "flood", 1.0).task
    for worker in (*flood[:3], *quiet):
        worker.done.set() if ends == "answered" else worker.task.cancel()
    await asyncio.gather(*(worker.task for worker in (*flood, *quiet)), return_exceptions=True)
    assert (admission.running, admission.waiting) == (0, 0)


async def test_a_full_queue_refuses_at_once_with_retry_after() -> None:
    admission = Admission(Limits(concurrent=1, queue=0))
    worker = Worker(admission)
    await until(lambda: worker.started)
    with pytest.raises(QueueFull) as refused:
        await Worker(admission, deadline_s=1.0).task
    assert refused.value.retry_after_s is not None
    assert refused.value.retry_after_s >= 1.0
    worker.done.set()
    await worker.task


async def test_a_deadline_that_passes_in_the_queue_frees_the_place_in_it() -> None:
    admission = Admission(Limits(concurrent=1, queue=1))
    worker = Worker(admission)
    await until(lambda: worker.started)
    with pytest.raises(DeadlineExceeded):
        await Worker(admission, deadline_s=0.01).task
    assert admission.waiting == 0
    worker.done.set()
    await worker.task
    assert admission.running == 0


async def test_a_waiter_cancelled_in_the_step_of_its_turn_passes_the_permit_on() -> None:
    admission = Admission(Limits(concurrent=1, queue=2))
    first = AsyncExitStack()
    await first.enter_async_context(admission.permit(later(60)))
    second, third = Worker(admission), Worker(admission)
    await until(lambda: admission.waiting == 2)
    await first.aclose()  # grants the permit to the second …
    second.task.cancel()  # … which is cancelled before it runs
    await until(lambda: third.started)
    third.done.set()
    await third.task
    assert admission.running == 0


@given(st.lists(st.sampled_from(["start", "finish", "cancel"]), max_size=40), st.integers(1, 3), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_no_sequence_of_starts_and_ends_loses_a_permit(steps: list[str], concurrent: int, queue: int) -> None:
    async def play() -> None:
        admission = Admission(Limits(concurrent=concurrent, queue=queue))
        workers: list[Worker] = []
        for at, step in enumerate(steps):
            if step == "start":
                workers.append(Worker(admission))
            elif workers:
                worker = workers[at % len(workers)]
                worker.task.cancel() if step == "cancel" else worker.done.set()
            if at % 3:
                await asyncio.sleep(0)
            assert admission.running <= concurrent
            assert admission.waiting <= queue
        for worker in workers:
            worker.done.set()
        ended = await asyncio.gather(*(worker.task for worker in workers), return_exceptions=True)
        assert all(e is None or isinstance(e, (QueueFull, asyncio.CancelledError)) for e in ended)
        assert (admission.running, admission.waiting) == (0, 0)

    asyncio.run(play())


def test_each_client_has_its_own_rate() -> None:
    """A burst of one second's worth, then the rate; Retry-After is exact."""
    admission = Admission(Limits(per_client_rps=2.0))
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
    """A customer with IPv6 has a whole /64: it counts as one client."""
    admission = Admission(Limits(per_client_rps=1.0))
    admission.admit(first, 0.0)
    with pytest.raises(RateLimited) if shared else nullcontext():
        admission.admit(second, 0.0)


def test_a_clock_that_stands_still_or_goes_back_adds_no_tokens() -> None:
    admission = Admission(Limits(per_client_rps=1.0))
    admission.admit("a", 10.0)
    for now in (10.0, 5.0, 5.5):
        with pytest.raises(RateLimited):
            admission.admit("a", now)


def test_the_table_of_clients_is_bounded() -> None:
    admission = Admission(Limits(per_client_rps=1.0))
    for number in range(MAX_CLIENTS + 100):
        admission.admit(f"client {number}", 0.0)
    assert len(admission.buckets) == MAX_CLIENTS


def test_draining_refuses_new_requests() -> None:
    admission = Admission(Limits())
    admission.drain()
    with pytest.raises(Draining):
        admission.admit("a", 0.0)


async def test_a_raised_limit_starts_waiting_requests_at_once() -> None:
    admission = Admission(Limits(concurrent=1, queue=4))
    workers = [Worker(admission) for _ in range(3)]
    await until(lambda: admission.waiting == 2)
    admission.set_limits(Limits(concurrent=3, queue=4))
    await until(lambda: all(worker.started for worker in workers))
    for worker in workers:
        worker.done.set()
    await asyncio.gather(*(worker.task for worker in workers))
