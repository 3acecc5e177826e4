"""Each case of the scheduler, with a clock that is a number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import pytest

from causeway_server.cloud_pool.admission.scheduler import RETRY_S, AdmissionScheduler, Reason
from causeway_server.cloud_pool.admission.waiting import Ticket, TicketState
from causeway_server.router.errors import DeadlineExceeded, QueueFull, Shed
from causeway_server.router.types import Priority

from .simulation import settings


class SchedulerBed:
    """A scheduler with a fixed limit and, by default, no reserve."""

    def __init__(self, permits: int, max_queued: int = 8, **config: float) -> None:
        self.shed: Counter[tuple[Priority, Reason]] = Counter()
        config = {"reserved_share": 0.0, "preemption_share": 0.0, "standard_share": 0.2, "bulk_share": 0.05, **config}
        self.scheduler = AdmissionScheduler(settings(permits, max_queued, least=0, **config), 0.0, self._shed)
        self.now = 0.0

    def _shed(self, priority: Priority, reason: Reason) -> None:
        self.shed[priority, reason] += 1

    def arrive(
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

    def leave(self, ticket: Ticket, *, after_s: float = 0.0, used: float | None = None) -> list[Ticket]:
        self.now += after_s
        return self.scheduler.leave(ticket, self.now, used)

    def drained(self, ticket: Ticket, *, every_s: float = 1.0) -> list[Ticket]:
        """Release permits at this rate, each held for two seconds."""
        order = []
        entered = self.leave(ticket, after_s=every_s)
        while entered:
            (one,) = entered
            order.append(one)
            entered = self.leave(one, after_s=every_s)
        return order


def test_a_request_without_time_is_rejected() -> None:
    with pytest.raises(DeadlineExceeded):
        SchedulerBed(1).arrive(left_s=0.0)


def test_priority_first_then_age() -> None:
    bed = SchedulerBed(1)
    held = bed.arrive()
    came = [bed.arrive("bulk"), bed.arrive("standard"), bed.arrive("interactive"), bed.arrive("standard")]
    assert bed.drained(held) == [came[2], came[1], came[3], came[0]]
    assert (bed.scheduler.running, bed.scheduler.pending, bed.scheduler.waiting) == (0, 0, 0)


def test_a_full_queue_has_a_default_retry_after() -> None:
    bed = SchedulerBed(1, max_queued=0)
    bed.arrive()
    with pytest.raises(QueueFull) as raised:
        bed.arrive("interactive")
    assert raised.value.retry_after_s == RETRY_S
    assert bed.shed == {("interactive", "queue_full"): 1}


def test_an_urgent_request_displaces_the_youngest_of_the_lowest_priority() -> None:
    bed = SchedulerBed(1, max_queued=3)
    bed.arrive()
    first, second, standard = bed.arrive("bulk"), bed.arrive("bulk"), bed.arrive("standard")
    bed.arrive("interactive")
    assert bed.displaced is second
    assert second.state is TicketState.GONE
    bed.arrive("standard")
    assert bed.displaced is first
    bed.arrive("interactive")
    assert bed.displaced is not None
    assert bed.displaced.priority == "standard"
    assert bed.displaced is not standard
    with pytest.raises(QueueFull):
        bed.arrive("bulk")
    with pytest.raises(QueueFull):
        bed.arrive("standard")
    assert bed.scheduler.waiting == 3
    assert bed.shed["bulk", "displaced"] == 2


def test_a_tenant_over_its_queue_share_makes_room_by_weight() -> None:
    bed = SchedulerBed(1, max_queued=6)
    bed.arrive()
    floods = [bed.arrive(tenant="flood") for _ in range(6)]
    for expected in (floods[5], floods[4], floods[3]):
        bed.arrive(tenant="quiet")
        assert bed.displaced is expected
    with pytest.raises(QueueFull):
        bed.arrive(tenant="quiet")
    with pytest.raises(QueueFull):
        bed.arrive(tenant="flood")
    bed.arrive(tenant="heavy", weight=3.0)
    assert bed.displaced is not None


def test_tenants_take_turns_by_tokens() -> None:
    bed = SchedulerBed(1, max_queued=40)
    held = bed.arrive(tenant="other")
    for _ in range(16):
        bed.arrive(tenant="long", tokens=300.0)
    for _ in range(16):
        bed.arrive(tenant="short", tokens=100.0)
    order = [ticket.tenant for ticket in bed.drained(held, every_s=0.01)]
    assert 2 <= order[:12].count("long") <= 4


def test_a_new_tenant_is_admitted_before_a_backlog() -> None:
    bed = SchedulerBed(1, max_queued=40)
    held = bed.arrive(tenant="flood")
    for _ in range(30):
        bed.arrive(tenant="flood")
    quiet = bed.arrive(tenant="quiet")
    order = bed.drained(held)
    assert order.index(quiet) <= 1


@pytest.mark.parametrize(("used", "first"), [(None, "other"), (10.0, "guessed")])
def test_actual_usage_corrects_the_turns(used: float | None, first: str) -> None:
    bed = SchedulerBed(1, max_queued=40)  # too few permits to reserve one
    for tenant in ("guessed", "other"):  # the turns before the other tenants
        bed.leave(bed.arrive(tenant=tenant, tokens=100.0))
    costly = bed.arrive(tenant="guessed", tokens=1000.0)
    middle = bed.arrive(tenant="other", tokens=300.0)
    assert bed.leave(costly, used=used) == [middle]
    waiting = [bed.arrive(tenant=tenant, tokens=100.0) for tenant in ("guessed", "other")]
    (entered,) = bed.leave(middle)
    assert entered in waiting
    assert entered.tenant == first


def test_lower_priorities_have_their_share() -> None:
    """Of a hundred permits with all priorities waiting, bulk gets about five and standard about twenty."""
    bed = SchedulerBed(1, max_queued=400)
    held = bed.arrive()
    for _ in range(120):
        for priority in ("interactive", "standard", "bulk"):
            bed.arrive(priority, left_s=1e6)
    order = [ticket.priority for ticket in bed.drained(held, every_s=0.001)[:100]]
    assert 3 <= order.count("bulk") <= 6
    assert 17 <= order.count("standard") <= 21


def test_a_lower_priority_turn_never_costs_a_deadline() -> None:
    bed = SchedulerBed(1, max_queued=400)
    held = bed.arrive()
    for _ in range(60):
        bed.arrive("interactive", left_s=3.0)
    bed.arrive("bulk", left_s=600.0)
    held_s = 0.05
    order = []
    entered = bed.leave(held, after_s=held_s)
    for _ in range(55):
        (one,) = entered
        order.append(one.priority)
        entered = bed.leave(one, after_s=held_s)
    assert bed.now < 3.0
    late = order[-15:]
    assert "bulk" in order
    assert "bulk" not in late


def busy(permits: int = 4, max_queued: int = 64, **config: float) -> tuple[SchedulerBed, list[Ticket]]:
    """A scheduler that has learned that each of its permits is released every second."""
    bed = SchedulerBed(permits, max_queued, **config)
    inside = [bed.arrive(left_s=1e6) for _ in range(permits)]
    for _ in range(20):
        waiting = [bed.arrive(left_s=1e6) for _ in range(permits)]
        bed.now += 1.0
        for ticket in inside:
            bed.leave(ticket)
        inside = waiting
        assert all(ticket.has_permit for ticket in inside)
    return bed, inside


def test_a_request_that_would_wait_too_long_is_shed_at_once() -> None:
    bed, _ = busy()
    for _ in range(12):
        bed.arrive()
    with pytest.raises(Shed) as raised:
        bed.arrive(left_s=2.0)
    assert bed.shed == {("standard", "deadline"): 1}
    assert raised.value.retry_after_s == pytest.approx(13 / 4, rel=0.25)
    assert bed.arrive(left_s=6.0).state is TicketState.WAITING


def test_no_permit_goes_to_a_request_with_too_little_time() -> None:
    bed, inside = busy()
    late, patient = bed.arrive(left_s=1.6), bed.arrive(left_s=60.0)
    bed.now += 0.8
    assert bed.leave(inside[0]) == [patient]
    assert (late.state, patient.has_permit) == (TicketState.GONE, True)
    assert bed.shed == {("standard", "deadline"): 1}


def test_retry_after_is_what_the_queue_takes() -> None:
    bed, _ = busy()
    for _ in range(8):
        bed.arrive("interactive", left_s=1e6)
        bed.arrive("bulk", left_s=1e6)
    assert bed.scheduler.retry_after_s("interactive") == pytest.approx(9 / 4, rel=0.25)
    assert bed.scheduler.retry_after_s("bulk") > 2 * bed.scheduler.retry_after_s("interactive")


def test_retry_after_of_a_stuck_tier_grows_to_a_minute() -> None:
    bed, _ = busy()
    bed.arrive(left_s=1e6)
    before = bed.scheduler.retry_after_s("standard")
    bed.now += 60.0
    with pytest.raises(Shed):
        bed.arrive(left_s=20.0)
    assert bed.scheduler.retry_after_s("standard") == 60.0 > before


def test_bulk_is_shed_while_a_more_urgent_queue_stands() -> None:
    bed, inside = busy(max_queued=200)
    for _ in range(40):
        bed.arrive(left_s=1e6)
    for _ in range(6):
        bed.now += 1.0
        inside = [new for ticket in inside for new in bed.leave(ticket)]
    assert bed.scheduler.saturated(bed.now)
    with pytest.raises(Shed):
        bed.arrive("bulk", left_s=1e6)
    with pytest.raises(Shed):
        bed.arrive("standard", left_s=1e6)
    assert bed.arrive("interactive").state is TicketState.WAITING
    while inside:
        bed.now += 1.0
        inside = [new for ticket in inside for new in bed.leave(ticket)]
    bed.now += 3.0
    assert not bed.scheduler.saturated(bed.now)
    assert bed.arrive("bulk").has_permit


def flooded(permits: int = 16, **config: float) -> tuple[SchedulerBed, list[Ticket]]:
    """A scheduler whose permits and queue one tenant has filled; another one has one permit."""
    bed = SchedulerBed(permits, max_queued=64, **config)
    bed.arrive("standard", "quiet")
    return bed, [bed.arrive("standard", "flood") for _ in range(2 * permits)]


def test_reserved_permits_are_for_light_tenants() -> None:
    bed, floods = flooded(reserved_share=0.125)
    assert sum(ticket.has_permit for ticket in floods) == 13
    assert [len(bed.leave(ticket)) for ticket in floods[:4]] == [1, 1, 1, 1]
    assert bed.arrive("bulk", "quiet").state is TicketState.WAITING
    assert bed.arrive("standard", "flood").state is TicketState.WAITING
    assert bed.arrive("standard", "quiet").has_permit
    assert bed.arrive("interactive", "quiet").has_permit
    assert bed.scheduler.running == 16


def test_a_single_tenant_uses_every_permit() -> None:
    bed = SchedulerBed(16, reserved_share=0.5)
    assert all(bed.arrive().has_permit for _ in range(16))


def test_a_waiter_that_leaves_passes_its_permit_on() -> None:
    bed = SchedulerBed(1)
    held, first, second, third = bed.arrive(), bed.arrive(), bed.arrive(), bed.arrive()
    assert bed.leave(first) == []
    assert bed.scheduler.waiting == 2
    assert bed.leave(held) == [second]
    assert bed.leave(second) == [third]
    assert bed.leave(third) == []
    assert bed.leave(third) == []
    assert (bed.scheduler.running, bed.scheduler.pending, bed.scheduler.waiting) == (0, 0, 0)


def test_an_expired_waiter_gets_no_permit() -> None:
    bed = SchedulerBed(1)
    held, late, other = bed.arrive(), bed.arrive(left_s=1.0), bed.arrive()
    assert bed.leave(held, after_s=2.0) == [other]
    assert late.state is TicketState.GONE


def test_a_grown_limit_admits_waiters() -> None:
    bed = AdmissionScheduler(settings(8, max_queued=64, least=1, reserved_share=0.0), 0.0)
    came = [Ticket("standard", "one", 1.0, 1.0, 0.0, 1e9) for _ in range(60)]
    for ticket in came:
        bed.arrive(ticket, 0.0)
    assert (bed.limit, bed.running) == (4, 4)
    now, by_growth = 0.0, 0
    while bed.limit < 8:
        now += 0.1
        assert now < 60.0
        (inside, *_) = [ticket for ticket in came if ticket.has_permit]
        bed.leave(inside, now)
        for ticket in [ticket for ticket in came if ticket.state is TicketState.PENDING]:
            by_growth += len(bed.first_token(ticket, now + 0.01, 0.01))
        assert bed.running == bed.limit
        came += [Ticket("standard", "one", 1.0, 1.0, now, 1e9)]
        bed.arrive(came[-1], now)
    assert by_growth == 4


def full(permits: int = 4, *floods: Priority, **config: float) -> tuple[SchedulerBed, list[Ticket]]:
    """A scheduler whose permits one tenant holds, none with a token yet, while other tenants are present."""
    bed = SchedulerBed(permits, max_queued=4, preemption_share=0.5, **config)
    for tenant in ("quiet", "other"):
        bed.leave(bed.arrive("interactive", tenant))
    priorities: Sequence[Priority] = floods or ["interactive"] * permits
    return bed, [bed.arrive(each, "flood") for each in priorities]


def test_a_flood_is_preempted_for_a_light_tenant() -> None:
    """The last one admitted, which is the next of its tenant to be admitted again."""
    bed, floods = full()
    waiting = [bed.arrive("interactive", "flood") for _ in range(2)]
    quiet = bed.arrive("interactive", "quiet")
    assert quiet.has_permit
    assert bed.preempted is floods[3]
    assert (bed.scheduler.running, bed.scheduler.waiting) == (4, 3)
    assert bed.leave(floods[0]) == [floods[3]]
    assert bed.leave(floods[1]) == [waiting[0]]
    assert floods[3].preempted == 1


def test_less_urgent_work_is_preempted() -> None:
    bed, held = full(5, "standard", "bulk", "standard", "interactive", "interactive")
    for victim in (held[1], held[2]):
        assert bed.arrive("interactive", "flood").has_permit
        assert bed.preempted is victim
    held += [bed.arrive("interactive", "flood")]
    assert held[-1].state is TicketState.WAITING  # It has more than twice its share.
    assert bed.arrive("interactive", "quiet").has_permit
    assert bed.preempted is held[0]
    assert bed.arrive("interactive", "other").has_permit
    assert bed.preempted is not None
    assert (bed.preempted.tenant, bed.preempted.priority) == ("flood", "interactive")


def test_no_preemption_after_the_first_token() -> None:
    bed, floods = full()
    for ticket in floods:
        bed.scheduler.first_token(ticket, bed.now, 0.1)
    assert bed.arrive("interactive", "quiet").state is TicketState.WAITING


@pytest.mark.parametrize("priority", ["interactive", "standard"])
def test_a_flood_preempts_nothing(priority: Priority) -> None:
    bed, _ = full(4, *(priority,) * 4)
    for _ in range(8):
        bed.now += 0.1
        with suppress(QueueFull, Shed):
            bed.arrive(priority, "flood")
        assert bed.preempted is None


def test_bulk_preempts_nothing() -> None:
    bed, _ = full(4, "bulk", "bulk", "bulk", "bulk")
    assert bed.arrive("bulk", "quiet").state is TicketState.WAITING


def test_a_request_is_preempted_twice_at_most() -> None:
    bed, (often, late) = full(2)
    late.deadline = bed.now + 1.0
    for times in (1, 2):
        quiet = bed.arrive("interactive", f"quiet {times}")
        assert bed.preempted is often
        assert bed.leave(quiet) == [often]
        assert often.preempted == times
    assert bed.arrive("interactive", "quiet 3").state is TicketState.WAITING


def test_preemptions_are_a_share_of_the_requests() -> None:
    bed = SchedulerBed(8, max_queued=1000, preemption_share=0.1)
    taken = 0
    for at in range(400):
        bed.arrive("interactive", "flood", left_s=1e6)
        if at % 2:
            quiet = bed.arrive("interactive", f"quiet {at % 50}", left_s=1e6)
            taken += bed.preempted is not None
            if quiet.has_permit:
                bed.leave(quiet)
    assert 1 <= taken <= 0.1 * 400 + 5


def test_a_preempted_request_displaces_the_youngest_in_a_full_queue() -> None:
    bed, floods = full(2, "standard", "standard")
    waiting = [bed.arrive("standard", "flood") for _ in range(4)]
    assert bed.arrive("interactive", "quiet").has_permit
    assert bed.preempted is floods[1]
    assert bed.displaced is waiting[3]
    assert bed.scheduler.waiting == 4
    bed, _ = full(2, "bulk", "bulk")
    urgent = [bed.arrive("standard", "one") for _ in range(4)]
    assert bed.arrive("interactive", "two").has_permit is False or bed.displaced not in urgent


def test_a_changed_upper_bound_admits_waiters_and_revokes_nothing() -> None:
    bed = SchedulerBed(4)
    scheduler = AdmissionScheduler(settings(8, max_queued=8, least=1, reserved_share=0.0), 0.0)
    scheduler.set_upper_bound(4, 0.0)
    came = [Ticket("standard", "one", 1.0, 1.0, bed.now, 1e9) for _ in range(8)]
    for ticket in came:
        scheduler.arrive(ticket, bed.now)
    assert (scheduler.running, scheduler.waiting) == (4, 4)
    assert scheduler.set_upper_bound(6, 0.1) == came[4:6]
    assert scheduler.set_upper_bound(2, 0.2) == []
    assert (scheduler.running, scheduler.limit) == (6, 2)
