"""Reserved permits and preemption: the books of permits alone."""

from __future__ import annotations

from causeway_server.cloud_pool.admission.permits import AdmissionConfig, PermitAllocator
from causeway_server.cloud_pool.admission.waiting import Ticket, TicketState
from causeway_server.router.types import Priority


class PermitBooks:
    """Ten permits, of which one is reserved; a credit of four requests, and `rate` permits released a second."""

    def __init__(self, rate: float = 0.0) -> None:
        self.permits = PermitAllocator(AdmissionConfig(reserved_share=0.1), 4.0)
        self.rate = rate

    def enter(self, tenant: str, now: float = 0.0, priority: Priority = "interactive", weight: float = 1.0) -> Ticket:
        """Arrive and enter."""
        ticket = self.arrive(tenant, now, priority, weight)
        self.permits.enter(ticket, now)
        return ticket

    def arrive(self, tenant: str, now: float = 0.0, priority: Priority = "interactive", weight: float = 1.0) -> Ticket:
        """Arrive only."""
        ticket = Ticket(priority, tenant, weight, 1.0, now, now + 60.0)
        self.permits.record_arrival(ticket, now, self.rate)
        return ticket

    def may_take_last(self, tenant: str, priority: Priority = "interactive") -> bool:
        return self.permits.may_take_last(Ticket(priority, tenant, 1.0, 1.0, 0.0, 60.0), 10, 0.0)


def test_one_tenant_with_one_priority_reserves_nothing() -> None:
    books = PermitBooks()
    for _ in range(5):
        books.enter("one")
    assert books.permits.reserve(10, 0.0) == 0


def test_mixed_priorities_or_tenants_reserve_a_permit() -> None:
    kinds, tenants = PermitBooks(), PermitBooks()
    kinds.enter("one", priority="bulk")
    kinds.enter("one")
    tenants.enter("one")
    tenants.permits.leave(tenants.enter("two"))
    for books in (kinds, tenants):
        assert books.permits.reserve(10, 5.0) == 1
        books.enter("one", 20.0)
        assert books.permits.reserve(10, 20.0) == 0


def test_a_tenant_that_holds_a_permit_is_present() -> None:
    books = PermitBooks()
    books.enter("patient")
    for now in (5.0, 15.0, 25.0, 35.0):
        books.enter("other", now)
    assert books.permits.reserve(10, 35.0) == 1


def test_starts_beside_another_tenant_are_bunched_where_more_than_even_ones_are_without_a_token() -> None:
    books = PermitBooks()
    flood = [books.enter("flood") for _ in range(3)]
    assert not books.permits.is_bunched(even_pending=0.0)
    books.arrive("quiet")
    assert books.permits.is_bunched(even_pending=2.5)
    assert not books.permits.is_bunched(even_pending=2.6)
    books.permits.got_first_token(flood[0])
    assert not books.permits.is_bunched(even_pending=2.0)
    assert (books.permits.running, books.permits.pending) == (3, 2)


def test_a_tenant_earns_no_credit_while_it_waits() -> None:
    """One request for many sequences: no other request of its tenant arrives until it has ended."""
    waiting = {"fan-out"}
    permits = PermitAllocator(AdmissionConfig(), 4.0, lambda tenant: 0 if tenant in waiting else 3)
    tickets = [Ticket("interactive", "fan-out", 1.0, 1.0, 0.0, 60.0) for _ in range(128)]
    for ticket in tickets:
        ticket.siblings = tickets
    permits.record_arrival(tickets[0], 0.0, 16.0)
    for ticket in tickets[:6]:
        permits.enter(ticket, 0.0)

    def may_take_last(now: float) -> bool:
        permits.record_arrival(Ticket("interactive", "quiet", 1.0, 1.0, now, now + 60.0), now, 16.0)
        return permits.may_take_last(tickets[-1], 10, now)

    assert not any(may_take_last(float(now)) for now in range(40))
    waiting.clear()
    assert may_take_last(60.0)


def test_which_tenants_are_light() -> None:
    books = PermitBooks()
    alone = books.may_take_last("one", "standard")
    for tenant in ("quiet", "flood"):
        for _ in range(5):
            books.arrive(tenant, priority="standard")  # No tenant has credit left.
    for _ in range(5):
        books.enter("flood", priority="standard")
    assert not alone
    assert books.may_take_last("quiet", "standard")
    assert not books.may_take_last("quiet", "bulk")
    assert not books.may_take_last("flood", "standard")
    for _ in range(3):
        books.enter("quiet", priority="standard")
    assert books.may_take_last("quiet", "standard")  # It holds three of its five.
    books.permits.note_crowding(0.0)
    assert not books.may_take_last("quiet", "standard")


def test_credit_is_earned_by_staying_within_the_share() -> None:
    books = PermitBooks(rate=10.0)
    for tick in range(100):
        books.permits.note_crowding(tick / 20.0)
        books.arrive("flood", tick / 20.0)
        if tick % 5 == 0:
            books.arrive("quiet", tick / 20.0)
    for _ in range(6):
        for tenant in ("quiet", "flood"):
            books.permits.enter(Ticket("interactive", tenant, 1.0, 1.0, 5.0, 65.0), 5.0)
    assert books.may_take_last("quiet")
    assert not books.may_take_last("flood")
    books.arrive("flood", 5.9)
    assert not books.may_take_last("flood")
    books.arrive("flood", 7.5)
    assert books.may_take_last("flood")


def test_less_urgent_permits_do_not_count() -> None:
    books = PermitBooks()
    books.arrive("other")
    for _ in range(9):
        books.enter("one", priority="bulk")
    assert books.may_take_last("one", "standard")
    for _ in range(12):
        books.enter("one", priority="standard")
    assert not books.may_take_last("one", "standard")
    assert books.may_take_last("one")


def test_credit_allows_less_than_twice_the_share() -> None:
    books = PermitBooks(rate=10.0)
    books.arrive("flood")
    held = [books.permits.enter(books.arrive("quiet", now), now) for now in range(9)]
    assert books.may_take_last("quiet")
    books.enter("quiet", 10.0)
    assert len(held) == 9
    assert not books.may_take_last("quiet")


def test_one_of_four_permits_is_reserved_and_none_of_three() -> None:
    books = PermitBooks()
    books.enter("one")
    books.enter("two")
    assert [books.permits.reserve(limit, 0.0) for limit in (3, 4, 7, 14, 15, 30)] == [0, 1, 1, 1, 2, 3]
    none = PermitAllocator(AdmissionConfig(reserved_share=0.0), 4.0)
    for tenant in ("one", "two"):
        none.record_arrival(Ticket("interactive", tenant, 1.0, 1.0, 0.0, 60.0), 0.0, 0.0)
    assert none.reserve(10, 0.0) == 0


def test_permits_that_jobs_hold_are_reserved_while_work_is_mixed() -> None:
    """But for one, so that every request may run while long jobs hold them all."""
    books = PermitBooks()
    books.arrive("one")
    assert books.permits.reserve(10, 0.0, jobs=3) == 0
    books.arrive("other")
    assert [books.permits.reserve(10, 0.0, jobs) for jobs in (0, 3, 8, 20)] == [1, 4, 9, 9]
    assert books.permits.reserve(1, 0.0, jobs=1) == 0


def test_a_tenants_share_follows_its_weight() -> None:
    books = PermitBooks()
    books.enter("light", weight=1.0)
    for _ in range(5):
        books.enter("heavy", weight=9.0)
    little = Ticket("interactive", "heavy", 9.0, 1000.0, 0.0, 60.0)
    assert books.permits.may_take_last(little, 6, 0.0)
    assert not books.permits.may_take_last(little, 5, 0.0)


def test_a_preempted_permit_can_be_entered_again() -> None:
    books = PermitBooks()
    ticket = books.enter("one")
    books.permits.preempt(ticket)
    assert (ticket.state, ticket.preempted) == (TicketState.WAITING, 1)
    assert (books.permits.running, books.permits.pending) == (0, 0)
    books.permits.enter(ticket, 1.0)
    assert (ticket.state, ticket.admitted) == (TicketState.PENDING, 1.0)
    assert (books.permits.running, books.permits.pending) == (1, 1)
