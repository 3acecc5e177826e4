"""The turns of tenants whose requests use less than they may."""

from __future__ import annotations

import pytest

from cloud_pool.admission.fair_queue import FairQueue
from cloud_pool.admission.ticket import Ticket

MAY, DO = 50.0, 14.0  # tokens
PLACES = 8


def ticket(tenant: str, at: float) -> Ticket:
    return Ticket("interactive", tenant, 1.0, MAY, at, at + 60.0)


class Flood:
    """A tenant that has all places and a queue, and whose requests end in the order in which they went in."""

    def __init__(self, queue: FairQueue) -> None:
        self.queue = queue
        self.running: list[Ticket] = []
        for at in range(PLACES):
            self.running.append(ticket("flood", at))
            queue.charge(self.running[-1])
        for at in range(40):
            queue.add(ticket("flood", PLACES + at))

    def turn(self) -> Ticket:
        """One ends, and the next goes in, who is returned."""
        done = self.running.pop(0)
        self.queue.correct(done, DO)
        chosen = self.queue.first()
        assert chosen is not None
        self.queue.pop(chosen)
        self.running.append(chosen)
        if chosen.tenant == "flood":
            self.queue.add(ticket("flood", 100.0))
        return chosen


def test_a_second_request_does_not_wait_for_what_the_first_might_have_cost() -> None:
    """The quiet tenant's next one goes in at the next turn but one, although its first still runs."""
    queue = FairQueue()
    flood = Flood(queue)
    for _ in range(30):
        flood.turn()
    queue.add(ticket("quiet", 200.0))
    assert flood.turn().tenant == "quiet"
    queue.add(ticket("quiet", 201.0))
    assert "quiet" in {flood.turn().tenant for _ in range(2)}


def test_over_time_the_tokens_used_are_shared() -> None:
    """Two that both flood get the same, whatever they announce."""
    queue = FairQueue()
    flood = Flood(queue)
    for at in range(20):
        other = ticket("other", 50.0 + at)
        other.tokens = 4 * MAY
        queue.add(other)
    got = {"flood": 0, "other": 0}
    for number in range(500):
        chosen = flood.turn()
        got[chosen.tenant] += number >= 100  # what each uses has to be known first
        if chosen.tenant == "other":
            another = ticket("other", 300.0)
            another.tokens = 4 * MAY
            queue.add(another)
    assert got["flood"] == pytest.approx(got["other"], rel=0.05)


def test_what_is_unknown_costs_what_it_may() -> None:
    """Nothing has ended yet: the announced tokens count."""
    queue = FairQueue()
    first = ticket("a", 0.0)
    queue.charge(first)
    assert first.cost == MAY
    queue.correct(first, DO)
    second = ticket("a", 1.0)
    queue.charge(second)
    assert DO < second.cost < MAY


def test_credit_is_bounded() -> None:
    """However long a tenant was away, it comes in by four requests before its turn and not by all that it has."""
    flood = Flood(FairQueue(4.0))
    for _ in range(200):
        flood.turn()
    for at in range(20):
        flood.queue.add(ticket("quiet", 300.0 + at))
    order = [flood.turn().tenant for _ in range(24)]
    assert order[:4].count("quiet") >= 3
    assert order.count("quiet") <= 4 + 10


def test_a_burst_within_its_share_has_its_turns_at_once() -> None:
    """What comes at once of a tenant that was away goes in before the flood's, and then they take turns."""
    flood = Flood(FairQueue(4.0))
    for at in range(8):
        flood.queue.add(ticket("quiet", 200.0 + at))
    order = [flood.turn().tenant for _ in range(12)]
    assert order[:3] == ["quiet"] * 3
    assert 2 <= order[3:].count("quiet") <= 5


def test_a_place_given_back_has_cost_nothing() -> None:
    """Its tenant is where it was, and this request is its first again."""
    queue = FairQueue(4.0)
    first, second = ticket("one", 0.0), ticket("one", 1.0)
    queue.charge(first)
    assert first.cost > 0.0
    queue.add(second)
    queue.restore(first)
    assert first.cost == 0.0
    assert queue.first() is first
    assert len(queue) == 2
