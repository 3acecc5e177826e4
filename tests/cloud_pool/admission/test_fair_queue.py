"""The turns of tenants whose requests use less than they may."""

from __future__ import annotations

import pytest

from causeway_server.cloud_pool.admission.waiting import FairQueue, Ticket

MAY, DO = 50.0, 14.0  # tokens
PLACES = 8


def ticket(tenant: str, at: float) -> Ticket:
    return Ticket("interactive", tenant, 1.0, MAY, at, at + 60.0)


class Flood:
    """A tenant that holds all permits and has a queue; its requests end in the order of their admission."""

    def __init__(self, queue: FairQueue) -> None:
        self.queue = queue
        self.running: list[Ticket] = []
        for at in range(PLACES):
            self.running.append(ticket("flood", at))
            queue.charge(self.running[-1])
        for at in range(40):
            queue.add(ticket("flood", PLACES + at))

    def turn(self) -> Ticket:
        """End one request and return the next one that is admitted."""
        done = self.running.pop(0)
        self.queue.correct(done, DO)
        chosen = self.queue.first()
        assert chosen is not None
        self.queue.pop(chosen)
        self.running.append(chosen)
        if chosen.tenant == "flood":
            self.queue.add(ticket("flood", 100.0))
        return chosen


def test_a_second_request_does_not_wait_for_the_maximum_cost_of_the_first() -> None:
    queue = FairQueue()
    flood = Flood(queue)
    for _ in range(30):
        flood.turn()
    queue.add(ticket("quiet", 200.0))
    assert flood.turn().tenant == "quiet"
    queue.add(ticket("quiet", 201.0))
    assert "quiet" in {flood.turn().tenant for _ in range(2)}


def test_used_tokens_are_shared_whatever_was_announced() -> None:
    queue = FairQueue()
    flood = Flood(queue)
    for at in range(20):
        other = ticket("other", 50.0 + at)
        other.tokens = 4 * MAY
        queue.add(other)
    got = {"flood": 0, "other": 0}
    for number in range(500):
        chosen = flood.turn()
        got[chosen.tenant] += number >= 100  # after the used shares are known
        if chosen.tenant == "other":
            another = ticket("other", 300.0)
            another.tokens = 4 * MAY
            queue.add(another)
    assert got["flood"] == pytest.approx(got["other"], rel=0.05)


def test_without_history_the_announced_tokens_count() -> None:
    queue = FairQueue()
    first = ticket("a", 0.0)
    queue.charge(first)
    assert first.cost == MAY
    queue.correct(first, DO)
    second = ticket("a", 1.0)
    queue.charge(second)
    assert DO < second.cost < MAY


def test_credit_is_bounded() -> None:
    flood = Flood(FairQueue(4.0))
    for _ in range(200):
        flood.turn()
    for at in range(20):
        flood.queue.add(ticket("quiet", 300.0 + at))
    order = [flood.turn().tenant for _ in range(24)]
    assert order[:4].count("quiet") >= 3
    assert order.count("quiet") <= 4 + 10


def test_a_burst_within_credit_is_served_before_a_flood() -> None:
    flood = Flood(FairQueue(4.0))
    for at in range(8):
        flood.queue.add(ticket("quiet", 200.0 + at))
    order = [flood.turn().tenant for _ in range(12)]
    assert order[:3] == ["quiet"] * 3
    assert 2 <= order[3:].count("quiet") <= 5


def test_a_preempted_request_costs_nothing() -> None:
    queue = FairQueue(4.0)
    first, second = ticket("one", 0.0), ticket("one", 1.0)
    queue.charge(first)
    assert first.cost > 0.0
    queue.add(second)
    queue.restore(first)
    assert first.cost == 0.0
    assert queue.first() is first
    assert len(queue) == 2
