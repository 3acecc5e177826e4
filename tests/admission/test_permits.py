"""Reserved permits and preemption: the books of permits alone."""

from __future__ import annotations

from cloud_pool.admission.config import AdmissionConfig
from cloud_pool.admission.permits import PermitAllocator
from cloud_pool.admission.ticket import Priority, Ticket, TicketState


class Seats:
    """Ten permits, of which one is reserved; a credit of four requests, and `rate` permits released a second."""

    def __init__(self, rate: float = 0.0) -> None:
        self.places = PermitAllocator(AdmissionConfig(reserved_share=0.1), 4.0)
        self.rate = rate

    def come(self, tenant: str, now: float = 0.0, priority: Priority = "interactive", weight: float = 1.0) -> Ticket:
        """Arrive and enter."""
        ticket = self.ask(tenant, now, priority, weight)
        self.places.enter(ticket, now)
        return ticket

    def ask(self, tenant: str, now: float = 0.0, priority: Priority = "interactive", weight: float = 1.0) -> Ticket:
        """Arrive only."""
        ticket = Ticket(priority, tenant, weight, 1.0, now, now + 60.0)
        self.places.record_arrival(ticket, now, self.rate)
        return ticket

    def may(self, tenant: str, priority: Priority = "interactive") -> bool:
        return self.places.may_take_last(Ticket(priority, tenant, 1.0, 1.0, 0.0, 60.0), 10, 0.0)


def test_one_tenant_with_one_priority_reserves_nothing() -> None:
    seats = Seats()
    for _ in range(5):
        seats.come("one")
    assert seats.places.reserve(10, 0.0) == 0


def test_mixed_priorities_or_tenants_reserve_a_permit() -> None:
    kinds, tenants = Seats(), Seats()
    kinds.come("one", priority="bulk")
    kinds.come("one")
    tenants.come("one")
    tenants.places.leave(tenants.come("two"))
    for seats in (kinds, tenants):
        assert seats.places.reserve(10, 5.0) == 1
        seats.come("one", 20.0)
        assert seats.places.reserve(10, 20.0) == 0


def test_a_tenant_that_holds_a_permit_is_present() -> None:
    seats = Seats()
    seats.come("patient")
    for now in (5.0, 15.0, 25.0, 35.0):
        seats.come("other", now)
    assert seats.places.reserve(10, 35.0) == 1


def test_bunched_starts_reserve_one_more_while_many_wait() -> None:
    seats = Seats()
    quiet, flood = seats.come("quiet"), seats.come("flood")
    assert seats.places.pending == 2
    assert seats.places.reserve(10, 0.0, even_pending=2.0) == 1
    seats.places.note_crowding(0.0)
    assert seats.places.reserve(10, 0.0, even_pending=2.0) == 2
    assert seats.places.reserve(10, 0.0, even_pending=2.6) == 1
    seats.places.got_first_token(flood)
    assert seats.places.reserve(10, 0.0, even_pending=2.0) == 1
    seats.places.leave(quiet)
    assert seats.places.reserve(10, 0.0, even_pending=0.0) == 1
    assert (seats.places.running, seats.places.pending) == (1, 0)


def test_which_tenants_are_light() -> None:
    seats = Seats()
    alone = seats.may("one", "standard")
    for tenant in ("quiet", "flood"):
        for _ in range(5):
            seats.ask(tenant, priority="standard")  # Nobody has any credit left.
    for _ in range(5):
        seats.come("flood", priority="standard")
    assert not alone
    assert seats.may("quiet", "standard")
    assert not seats.may("quiet", "bulk")
    assert not seats.may("flood", "standard")
    for _ in range(3):
        seats.come("quiet", priority="standard")
    assert seats.may("quiet", "standard")  # It holds three of its five.
    seats.places.note_crowding(0.0)
    assert not seats.may("quiet", "standard")


def test_credit_is_earned_by_staying_within_the_share() -> None:
    seats = Seats(rate=10.0)
    for tick in range(100):
        seats.places.note_crowding(tick / 20.0)
        seats.ask("flood", tick / 20.0)
        if tick % 5 == 0:
            seats.ask("quiet", tick / 20.0)
    for _ in range(6):
        for tenant in ("quiet", "flood"):
            seats.places.enter(Ticket("interactive", tenant, 1.0, 1.0, 5.0, 65.0), 5.0)
    assert seats.may("quiet")
    assert not seats.may("flood")
    seats.ask("flood", 5.9)
    assert not seats.may("flood")
    seats.ask("flood", 7.5)
    assert seats.may("flood")


def test_less_urgent_permits_do_not_count() -> None:
    seats = Seats()
    seats.ask("other")
    for _ in range(9):
        seats.come("one", priority="bulk")
    assert seats.may("one", "standard")
    for _ in range(12):
        seats.come("one", priority="standard")
    assert not seats.may("one", "standard")
    assert seats.may("one")


def test_credit_allows_less_than_twice_the_share() -> None:
    seats = Seats(rate=10.0)
    seats.ask("flood")
    held = [seats.places.enter(seats.ask("quiet", now), now) for now in range(9)]
    assert seats.may("quiet")
    seats.come("quiet", 10.0)
    assert len(held) == 9
    assert not seats.may("quiet")


def test_one_of_four_permits_is_reserved_and_none_of_three() -> None:
    seats = Seats()
    seats.come("one")
    seats.come("two")
    assert [seats.places.reserve(limit, 0.0) for limit in (3, 4, 7, 14, 15, 30)] == [0, 1, 1, 1, 2, 3]
    none = PermitAllocator(AdmissionConfig(reserved_share=0.0), 4.0)
    for tenant in ("one", "two"):
        none.record_arrival(Ticket("interactive", tenant, 1.0, 1.0, 0.0, 60.0), 0.0, 0.0)
    assert none.reserve(10, 0.0) == 0


def test_a_tenants_share_follows_its_weight() -> None:
    seats = Seats()
    seats.come("light", weight=1.0)
    for _ in range(5):
        seats.come("heavy", weight=9.0)
    little = Ticket("interactive", "heavy", 9.0, 1000.0, 0.0, 60.0)
    assert seats.places.may_take_last(little, 6, 0.0)
    assert not seats.places.may_take_last(little, 5, 0.0)


def test_a_preempted_permit_can_be_entered_again() -> None:
    seats = Seats()
    ticket = seats.come("one")
    seats.places.preempt(ticket)
    assert (ticket.state, ticket.preempted) == (TicketState.WAITING, 1)
    assert (seats.places.running, seats.places.pending) == (0, 0)
    seats.places.enter(ticket, 1.0)
    assert (ticket.state, ticket.admitted) == (TicketState.PENDING, 1.0)
    assert (seats.places.running, seats.places.pending) == (1, 1)
