"""Each case of the scheduler, with a clock that is a number."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

import pytest

from cloud_pool.admission.scheduler import RETRY_S, AdmissionScheduler, Reason
from cloud_pool.admission.ticket import Priority, Ticket, TicketState
from router.errors import DeadlineExceeded, QueueFull, Shed

from .simulation import settings


class Door:
    """A scheduler with a fixed limit and, by default, no reserve."""

    def __init__(self, permits: int, max_queued: int = 8, **config: float) -> None:
        self.shed: Counter[tuple[Priority, Reason]] = Counter()
        config = {"reserved_share": 0.0, "preemption_share": 0.0, "standard_share": 0.2, "bulk_share": 0.05, **config}
        self.scheduler = AdmissionScheduler(settings(permits, max_queued, least=0, **config), 0.0, self._shed)
        self.now = 0.0

    def _shed(self, priority: Priority, reason: Reason) -> None:
        self.shed[priority, reason] += 1

    def come(
        self,
        priority: Priority = "standard",
        tenant: str = "one",
        *,
        left_s: float = 60.0,
        tokens: float = 1.0,
        weight: float = 1.0,
    ) -> Ticket:
        """Arrive and enter."""
        self.now += 0.001
        ticket = Ticket(priority, tenant, weight, tokens, self.now, self.now + left_s)
        moved = self.scheduler.arrive(ticket, self.now)
        self.displaced = next((each for each in moved if each.state is TicketState.GONE), None)
        self.preempted = next((each for each in moved if each.state is TicketState.WAITING), None)
        return ticket

    def go(self, ticket: Ticket, *, after_s: float = 0.0, used: float | None = None) -> list[Ticket]:
        self.now += after_s
        return self.scheduler.leave(ticket, self.now, used)

    def drained(self, ticket: Ticket, *, every_s: float = 1.0) -> list[Ticket]:
        """Release permits at this rate, each held for two seconds."""
        order = []
        entered = self.go(ticket, after_s=every_s)
        while entered:
            (one,) = entered
            order.append(one)
            entered = self.go(one, after_s=every_s)
        return order


def test_a_request_without_time_is_rejected() -> None:
    with pytest.raises(DeadlineExceeded):
        Door(1).come(left_s=0.0)


def test_priority_first_then_age() -> None:
    door = Door(1)
    held = door.come()
    came = [door.come("bulk"), door.come("standard"), door.come("interactive"), door.come("standard")]
    assert door.drained(held) == [came[2], came[1], came[3], came[0]]
    assert (door.scheduler.running, door.scheduler.pending, door.scheduler.waiting) == (0, 0, 0)


def test_a_full_queue_has_a_default_retry_after() -> None:
    door = Door(1, max_queued=0)
    door.come()
    with pytest.raises(QueueFull) as raised:
        door.come("interactive")
    assert raised.value.retry_after_s == RETRY_S
    assert door.shed == {("interactive", "queue_full"): 1}


def test_an_urgent_request_displaces_the_youngest_of_the_lowest_priority() -> None:
    door = Door(1, max_queued=3)
    door.come()
    first, second, standard = door.come("bulk"), door.come("bulk"), door.come("standard")
    door.come("interactive")
    assert door.displaced is second
    assert second.state is TicketState.GONE
    door.come("standard")
    assert door.displaced is first
    door.come("interactive")
    assert door.displaced is not None
    assert door.displaced.priority == "standard"
    assert door.displaced is not standard
    with pytest.raises(QueueFull):
        door.come("bulk")
    with pytest.raises(QueueFull):
        door.come("standard")
    assert door.scheduler.waiting == 3
    assert door.shed["bulk", "displaced"] == 2


def test_a_tenant_over_its_queue_share_makes_room_by_weight() -> None:
    door = Door(1, max_queued=6)
    door.come()
    floods = [door.come(tenant="flood") for _ in range(6)]
    for expected in (floods[5], floods[4], floods[3]):
        door.come(tenant="quiet")
        assert door.displaced is expected
    with pytest.raises(QueueFull):
        door.come(tenant="quiet")
    with pytest.raises(QueueFull):
        door.come(tenant="flood")
    door.come(tenant="heavy", weight=3.0)
    assert door.displaced is not None


def test_tenants_take_turns_by_tokens() -> None:
    door = Door(1, max_queued=40)
    held = door.come(tenant="other")
    for _ in range(16):
        door.come(tenant="long", tokens=300.0)
    for _ in range(16):
        door.come(tenant="short", tokens=100.0)
    order = [ticket.tenant for ticket in door.drained(held, every_s=0.01)]
    assert 2 <= order[:12].count("long") <= 4


def test_a_new_tenant_is_admitted_before_a_backlog() -> None:
    door = Door(1, max_queued=40)
    held = door.come(tenant="flood")
    for _ in range(30):
        door.come(tenant="flood")
    quiet = door.come(tenant="quiet")
    order = door.drained(held)
    assert order.index(quiet) <= 1


@pytest.mark.parametrize(("used", "first"), [(None, "other"), (10.0, "guessed")])
def test_actual_usage_corrects_the_turns(used: float | None, first: str) -> None:
    door = Door(1, max_queued=40)  # no place to keep for anybody
    for tenant in ("guessed", "other"):  # the turns that they have before others
        door.go(door.come(tenant=tenant, tokens=100.0))
    costly = door.come(tenant="guessed", tokens=1000.0)
    middle = door.come(tenant="other", tokens=300.0)
    assert door.go(costly, used=used) == [middle]
    waiting = [door.come(tenant=tenant, tokens=100.0) for tenant in ("guessed", "other")]
    (entered,) = door.go(middle)
    assert entered in waiting
    assert entered.tenant == first


def test_lower_priorities_have_their_share() -> None:
    """Of a hundred permits with all priorities waiting, bulk gets about five and standard about twenty."""
    door = Door(1, max_queued=400)
    held = door.come()
    for _ in range(120):
        for priority in ("interactive", "standard", "bulk"):
            door.come(priority, left_s=1e6)
    order = [ticket.priority for ticket in door.drained(held, every_s=0.001)[:100]]
    assert 3 <= order.count("bulk") <= 6
    assert 17 <= order.count("standard") <= 21


def test_a_lower_priority_turn_never_costs_a_deadline() -> None:
    door = Door(1, max_queued=400)
    held = door.come()
    for _ in range(60):
        door.come("interactive", left_s=3.0)
    door.come("bulk", left_s=600.0)
    held_s = 0.05
    order = []
    entered = door.go(held, after_s=held_s)
    for _ in range(55):
        (one,) = entered
        order.append(one.priority)
        entered = door.go(one, after_s=held_s)
    assert door.now < 3.0
    late = order[-15:]
    assert "bulk" in order
    assert "bulk" not in late


def busy(places: int = 4, max_queued: int = 64, **config: float) -> tuple[Door, list[Ticket]]:
    """A scheduler that has learned that each of its permits is released every second."""
    door = Door(places, max_queued, **config)
    inside = [door.come(left_s=1e6) for _ in range(places)]
    for _ in range(20):
        waiting = [door.come(left_s=1e6) for _ in range(places)]
        door.now += 1.0
        for ticket in inside:
            door.go(ticket)
        inside = waiting
        assert all(ticket.has_permit for ticket in inside)
    return door, inside


def test_a_request_that_would_wait_too_long_is_shed_at_once() -> None:
    door, _ = busy()
    for _ in range(12):
        door.come()
    with pytest.raises(Shed) as raised:
        door.come(left_s=2.0)
    assert door.shed == {("standard", "deadline"): 1}
    assert raised.value.retry_after_s == pytest.approx(13 / 4, rel=0.25)
    assert door.come(left_s=6.0).state is TicketState.WAITING


def test_no_permit_goes_to_a_request_with_too_little_time() -> None:
    door, inside = busy()
    late, patient = door.come(left_s=1.6), door.come(left_s=60.0)
    door.now += 0.8
    assert door.go(inside[0]) == [patient]
    assert (late.state, patient.has_permit) == (TicketState.GONE, True)
    assert door.shed == {("standard", "deadline"): 1}


def test_retry_after_is_what_the_queue_takes() -> None:
    door, _ = busy()
    for _ in range(8):
        door.come("interactive", left_s=1e6)
        door.come("bulk", left_s=1e6)
    assert door.scheduler.retry_after_s("interactive") == pytest.approx(9 / 4, rel=0.25)
    assert door.scheduler.retry_after_s("bulk") > 2 * door.scheduler.retry_after_s("interactive")


def test_retry_after_of_a_stuck_tier_grows_to_a_minute() -> None:
    door, _ = busy()
    door.come(left_s=1e6)
    before = door.scheduler.retry_after_s("standard")
    door.now += 60.0
    with pytest.raises(Shed):
        door.come(left_s=20.0)
    assert door.scheduler.retry_after_s("standard") == 60.0 > before


def test_bulk_is_shed_while_a_more_urgent_queue_stands() -> None:
    door, inside = busy(max_queued=200)
    for _ in range(40):
        door.come(left_s=1e6)
    for _ in range(6):
        door.now += 1.0
        inside = [new for ticket in inside for new in door.go(ticket)]
    assert door.scheduler.saturated(door.now)
    with pytest.raises(Shed):
        door.come("bulk", left_s=1e6)
    with pytest.raises(Shed):
        door.come("standard", left_s=1e6)
    assert door.come("interactive").state is TicketState.WAITING
    while inside:
        door.now += 1.0
        inside = [new for ticket in inside for new in door.go(ticket)]
    door.now += 3.0
    assert not door.scheduler.saturated(door.now)
    assert door.come("bulk").has_permit


def flooded(places: int = 16, **config: float) -> tuple[Door, list[Ticket]]:
    """A scheduler whose permits and queue one tenant has filled; another one has one permit."""
    door = Door(places, max_queued=64, **config)
    door.come("standard", "quiet")
    return door, [door.come("standard", "flood") for _ in range(2 * places)]


def test_reserved_permits_are_for_light_tenants() -> None:
    door, floods = flooded(reserved_share=0.125)
    assert sum(ticket.has_permit for ticket in floods) == 13
    assert [len(door.go(ticket)) for ticket in floods[:4]] == [1, 1, 1, 1]
    assert door.come("bulk", "quiet").state is TicketState.WAITING
    assert door.come("standard", "flood").state is TicketState.WAITING
    assert door.come("standard", "quiet").has_permit
    assert door.come("interactive", "quiet").has_permit
    assert door.scheduler.running == 16


def test_a_single_tenant_uses_every_permit() -> None:
    door = Door(16, reserved_share=0.5)
    assert all(door.come().has_permit for _ in range(16))


def test_a_waiter_that_leaves_passes_its_permit_on() -> None:
    door = Door(1)
    held, first, second, third = door.come(), door.come(), door.come(), door.come()
    assert door.go(first) == []
    assert door.scheduler.waiting == 2
    assert door.go(held) == [second]
    assert door.go(second) == [third]
    assert door.go(third) == []
    assert door.go(third) == []
    assert (door.scheduler.running, door.scheduler.pending, door.scheduler.waiting) == (0, 0, 0)


def test_an_expired_waiter_gets_no_permit() -> None:
    door = Door(1)
    held, late, other = door.come(), door.come(left_s=1.0), door.come()
    assert door.go(held, after_s=2.0) == [other]
    assert late.state is TicketState.GONE


def test_a_grown_limit_admits_waiters() -> None:
    door = AdmissionScheduler(settings(8, max_queued=64, least=1, reserved_share=0.0), 0.0)
    came = [Ticket("standard", "one", 1.0, 1.0, 0.0, 1e9) for _ in range(60)]
    for ticket in came:
        door.arrive(ticket, 0.0)
    assert (door.limit, door.running) == (4, 4)
    now, by_growth = 0.0, 0
    while door.limit < 8:
        now += 0.1
        assert now < 60.0
        (inside, *_) = [ticket for ticket in came if ticket.has_permit]
        door.leave(inside, now)
        for ticket in [ticket for ticket in came if ticket.state is TicketState.PENDING]:
            by_growth += len(door.first_token(ticket, now + 0.01, 0.01))
        assert door.running == door.limit
        came += [Ticket("standard", "one", 1.0, 1.0, now, 1e9)]
        door.arrive(came[-1], now)
    assert by_growth == 4


def full(places: int = 4, *floods: Priority, **config: float) -> tuple[Door, list[Ticket]]:
    """A scheduler whose permits one tenant holds, none with a token yet, while other tenants are present."""
    door = Door(places, max_queued=4, preemption_share=0.5, **config)
    for tenant in ("quiet", "other"):
        door.go(door.come("interactive", tenant))
    return door, [door.come(each, "flood") for each in floods or ("interactive",) * places]


def test_a_flood_is_preempted_for_a_light_tenant() -> None:
    """The last one admitted, which is the next of its tenant to be admitted again."""
    door, floods = full()
    waiting = [door.come("interactive", "flood") for _ in range(2)]
    quiet = door.come("interactive", "quiet")
    assert quiet.has_permit
    assert door.preempted is floods[3]
    assert (door.scheduler.running, door.scheduler.waiting) == (4, 3)
    assert door.go(floods[0]) == [floods[3]]
    assert door.go(floods[1]) == [waiting[0]]
    assert floods[3].preempted == 1


def test_less_urgent_work_is_preempted() -> None:
    door, held = full(5, "standard", "bulk", "standard", "interactive", "interactive")
    for victim in (held[1], held[2]):
        assert door.come("interactive", "flood").has_permit
        assert door.preempted is victim
    held += [door.come("interactive", "flood")]
    assert held[-1].state is TicketState.WAITING  # It has more than twice its share.
    assert door.come("interactive", "quiet").has_permit
    assert door.preempted is held[0]
    assert door.come("interactive", "other").has_permit
    assert door.preempted is not None
    assert (door.preempted.tenant, door.preempted.priority) == ("flood", "interactive")


def test_no_preemption_after_the_first_token() -> None:
    door, floods = full()
    for ticket in floods:
        door.scheduler.first_token(ticket, door.now, 0.1)
    assert door.come("interactive", "quiet").state is TicketState.WAITING


@pytest.mark.parametrize("priority", ["interactive", "standard"])
def test_a_flood_preempts_nothing(priority: Priority) -> None:
    door, _ = full(4, *(priority,) * 4)
    for _ in range(8):
        door.now += 0.1
        with suppress(QueueFull, Shed):
            door.come(priority, "flood")
        assert door.preempted is None


def test_bulk_preempts_nothing() -> None:
    door, _ = full(4, "bulk", "bulk", "bulk", "bulk")
    assert door.come("bulk", "quiet").state is TicketState.WAITING


def test_a_request_is_preempted_twice_at_most() -> None:
    door, (often, late) = full(2)
    late.deadline = door.now + 1.0
    for times in (1, 2):
        quiet = door.come("interactive", f"quiet {times}")
        assert door.preempted is often
        assert door.go(quiet) == [often]
        assert often.preempted == times
    assert door.come("interactive", "quiet 3").state is TicketState.WAITING


def test_preemptions_are_a_share_of_the_requests() -> None:
    door = Door(8, max_queued=1000, preemption_share=0.1)
    taken = 0
    for at in range(400):
        door.come("interactive", "flood", left_s=1e6)
        if at % 2:
            quiet = door.come("interactive", f"quiet {at % 50}", left_s=1e6)
            taken += door.preempted is not None
            if quiet.has_permit:
                door.go(quiet)
    assert 1 <= taken <= 0.1 * 400 + 5


def test_a_preempted_request_displaces_the_youngest_in_a_full_queue() -> None:
    door, floods = full(2, "standard", "standard")
    waiting = [door.come("standard", "flood") for _ in range(4)]
    assert door.come("interactive", "quiet").has_permit
    assert door.preempted is floods[1]
    assert door.displaced is waiting[3]
    assert door.scheduler.waiting == 4
    door, _ = full(2, "bulk", "bulk")
    urgent = [door.come("standard", "one") for _ in range(4)]
    assert door.come("interactive", "two").has_permit is False or door.displaced not in urgent


def test_a_changed_upper_bound_admits_waiters_and_revokes_nothing() -> None:
    door = Door(4)
    scheduler = AdmissionScheduler(settings(8, max_queued=8, least=1, reserved_share=0.0), 0.0)
    scheduler.set_upper_bound(4, 0.0)
    came = [Ticket("standard", "one", 1.0, 1.0, door.now, 1e9) for _ in range(8)]
    for ticket in came:
        scheduler.arrive(ticket, door.now)
    assert (scheduler.running, scheduler.waiting) == (4, 4)
    assert scheduler.set_upper_bound(6, 0.1) == came[4:6]
    assert scheduler.set_upper_bound(2, 0.2) == []
    assert (scheduler.running, scheduler.limit) == (6, 2)
