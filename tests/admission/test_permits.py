"""Which places are kept, and for whom: the books of places alone."""

from __future__ import annotations

from cloud_pool.admission.config import AdmissionConfig
from cloud_pool.admission.permits import PermitAllocator
from cloud_pool.admission.ticket import Priority, Ticket, TicketState


class Seats:
    """Ten places, of which one is kept; a credit of four requests, and `rate` places that come free a second."""

    def __init__(self, rate: float = 0.0) -> None:
        self.places = PermitAllocator(AdmissionConfig(reserved_share=0.1), 4.0)
        self.rate = rate

    def come(self, tenant: str, now: float = 0.0, priority: Priority = "interactive", weight: float = 1.0) -> Ticket:
        """And goes in."""
        ticket = self.ask(tenant, now, priority, weight)
        self.places.enter(ticket, now)
        return ticket

    def ask(self, tenant: str, now: float = 0.0, priority: Priority = "interactive", weight: float = 1.0) -> Ticket:
        """It came, and no more."""
        ticket = Ticket(priority, tenant, weight, 1.0, now, now + 60.0)
        self.places.record_arrival(ticket, now, self.rate)
        return ticket

    def may(self, tenant: str, priority: Priority = "interactive") -> bool:
        return self.places.may_take_last(Ticket(priority, tenant, 1.0, 1.0, 0.0, 60.0), 10, 0.0)


def test_alone_nothing_is_kept() -> None:
    """One tenant with one kind of work has nobody to keep anything for."""
    seats = Seats()
    for _ in range(5):
        seats.come("one")
    assert seats.places.reserve(10, 0.0) == 0


def test_two_kinds_of_work_or_two_tenants() -> None:
    """One place is kept while they were here of late."""
    kinds, tenants = Seats(), Seats()
    kinds.come("one", priority="bulk")
    kinds.come("one")
    tenants.come("one")
    tenants.places.leave(tenants.come("two"))
    for seats in (kinds, tenants):
        assert seats.places.reserve(10, 5.0) == 1
        seats.come("one", 20.0)
        assert seats.places.reserve(10, 20.0) == 0


def test_who_still_has_a_place_is_still_here() -> None:
    """However long its answer takes."""
    seats = Seats()
    seats.come("patient")
    for now in (5.0, 15.0, 25.0, 35.0):
        seats.come("other", now)
    assert seats.places.reserve(10, 35.0) == 1


def test_one_more_while_what_runs_begins_all_at_once() -> None:
    """Two would be without a token if they had come evenly: with two, or with more, they have not. Only while many
    wait, else they are nobody's harm."""
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


def test_who_asks_little() -> None:
    """Who holds less than its share, half of it while many wait; bulk never, and standard work beside other tenants'
    only."""
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


def test_credit_is_earned_by_asking_for_no_more_than_ones_share() -> None:
    """Ten places come free a second, for two: who asks four times a second may hold more than its share while many
    wait, who asks twenty times may not, and may again a while after that."""
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


def test_less_urgent_work_does_not_count() -> None:
    """A tenant with a flood of something may ask something more urgent all the same."""
    seats = Seats()
    seats.ask("other")
    for _ in range(9):
        seats.come("one", priority="bulk")
    assert seats.may("one", "standard")
    for _ in range(12):
        seats.come("one", priority="standard")
    assert not seats.may("one", "standard")
    assert seats.may("one")


def test_credit_is_for_a_burst() -> None:
    """Nobody holds twice its share on it."""
    seats = Seats(rate=10.0)
    seats.ask("flood")
    held = [seats.places.enter(seats.ask("quiet", now), now) for now in range(9)]
    assert seats.may("quiet")
    seats.come("quiet", 10.0)
    assert len(held) == 9
    assert not seats.may("quiet")


def test_of_few_places_one_is_kept_as_well() -> None:
    """A limit that was cut is when it matters; of three none, and none where an operator wants none."""
    seats = Seats()
    seats.come("one")
    seats.come("two")
    assert [seats.places.reserve(limit, 0.0) for limit in (3, 4, 7, 14, 15, 30)] == [0, 1, 1, 1, 2, 3]
    none = PermitAllocator(AdmissionConfig(reserved_share=0.0), 4.0)
    for tenant in ("one", "two"):
        none.record_arrival(Ticket("interactive", tenant, 1.0, 1.0, 0.0, 60.0), 0.0, 0.0)
    assert none.reserve(10, 0.0) == 0


def test_a_heavier_tenant_may_hold_more() -> None:
    """Its share is by its weight."""
    seats = Seats()
    seats.come("light", weight=1.0)
    for _ in range(5):
        seats.come("heavy", weight=9.0)
    little = Ticket("interactive", "heavy", 9.0, 1000.0, 0.0, 60.0)
    assert seats.places.may_take_last(little, 6, 0.0)
    assert not seats.places.may_take_last(little, 5, 0.0)


def test_leaving_twice_is_no_concern_of_the_books() -> None:
    """A place that was given back is entered again as if it were new."""
    seats = Seats()
    ticket = seats.come("one")
    seats.places.preempt(ticket)
    assert (ticket.state, ticket.preempted) == (TicketState.WAITING, 1)
    assert (seats.places.running, seats.places.pending) == (0, 0)
    seats.places.enter(ticket, 1.0)
    assert (ticket.state, ticket.admitted) == (TicketState.PENDING, 1.0)
    assert (seats.places.running, seats.places.pending) == (1, 1)
