"""Arrivals, departures, waits and timeouts in any order: nothing is lost, and no request waits for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from causeway_server.cloud_pool.admission.scheduler import AdmissionScheduler
from causeway_server.cloud_pool.admission.waiting import FairQueue, Ticket, TicketState
from causeway_server.router.errors import CausewayError
from causeway_server.router.jobs.submission import RANK
from causeway_server.router.types import Priority

from .simulation import settings

PRIORITIES = st.sampled_from(list(RANK))
TENANTS = st.sampled_from(["a", "b", "c"])


class Machine(RuleBasedStateMachine):
    """Random callers, a server that is fast or slow, and failures."""

    known = Bundle("known")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.scheduler = AdmissionScheduler(settings(8, max_queued=6), 0.0)
        self.inside: set[Ticket] = set()
        self.waiting: set[Ticket] = set()

    @rule(
        target=known,
        priority=PRIORITIES,
        tenant=TENANTS,
        left_s=st.floats(0.0, 30.0),
        tokens=st.floats(1.0, 500.0),
        sequences=st.just(1) | st.integers(2, 20),
    )
    def come(self, priority: Priority, tenant: str, left_s: float, tokens: float, sequences: int):  # type: ignore[no-untyped-def]
        """A request of one or many sequences is taken as a whole or not at all."""
        tickets = [
            Ticket(priority, tenant, 1.0 + len(tenant), tokens, self.now, self.now + left_s) for _ in range(sequences)
        ]
        for ticket in tickets if sequences > 1 else ():
            ticket.siblings = tickets
        before, full = self.scheduler.running, self._unbegun() >= 6
        try:
            moved = self.scheduler.arrive(tickets[0], self.now)
        except CausewayError:
            assert {ticket.state for ticket in tickets} == {TicketState.NEW}
            return multiple()
        for each in moved:
            if each.state is TicketState.WAITING:
                self.inside.remove(each)
                self.waiting.add(each)
            else:
                assert each.state is TicketState.GONE
                assert not each.has_begun
                self.waiting.remove(each)
        entered = [ticket for ticket in tickets if ticket.has_permit]
        assert entered == tickets[: len(entered)]
        assert entered or not full or moved  # A full queue takes a request only in another one's place.
        swapped = sum(each.state is TicketState.WAITING for each in moved)
        assert self.scheduler.running == before + len(entered) - swapped
        assert self.scheduler.running <= max(before, self.scheduler.limit)
        self.inside.update(entered)
        self.waiting.update(tickets[len(entered) :])
        return multiple(*tickets)

    @rule(ticket=consumes(known), used=st.none() | st.floats(0.0, 1000.0))
    def leave(self, ticket: Ticket, used: float | None) -> None:
        """Done, failed, cancelled or timed out."""
        entered = self.scheduler.leave(ticket, self.now, used)
        self.inside.discard(ticket)
        self.waiting.discard(ticket)
        self._entered(entered)

    @rule(ticket=known, seconds=st.floats(0.001, 5.0))
    def first_token(self, ticket: Ticket, seconds: float) -> None:
        self._entered(self.scheduler.first_token(ticket, self.now, seconds))

    @rule(ticket=known)
    def failed(self, ticket: Ticket) -> None:
        self.scheduler.failed(ticket, self.now)

    @rule(seconds=st.floats(0.0, 20.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(ticket=known)
    def leave_with_siblings(self, ticket: Ticket) -> None:
        """The client leaves, or one sequence fails: those that wait leave first."""
        for each in reversed(ticket.of_request):
            self.leave(each, None)
            if each is not ticket.of_request[0] and each.state is TicketState.GONE:
                assert not any(one in self.inside and one.state is TicketState.GONE for one in ticket.of_request)

    def _unbegun(self) -> int:
        return sum(not ticket.has_begun for ticket in self.waiting)

    def _entered(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            assert ticket.has_permit
            assert ticket.deadline > self.now
            self.waiting.remove(ticket)
            self.inside.add(ticket)
        if tickets:
            assert self.scheduler.running <= self.scheduler.limit
        # Tickets whose deadline had passed when their turn came.
        self.waiting = {ticket for ticket in self.waiting if ticket.state is TicketState.WAITING}

    @invariant()
    def books_are_right(self) -> None:
        """Every permit has one holder, every waiter is known."""
        assert self.scheduler.running == len(self.inside) <= 8
        assert self.scheduler.pending == sum(ticket.state is TicketState.PENDING for ticket in self.inside)
        assert self.scheduler.waiting == len(self.waiting)
        assert self._unbegun() < 6 + 20  # The queue takes a whole request while it is not full.
        assert 1 <= self.scheduler.limit <= 8

    @invariant()
    def waiters_have_a_running_request(self) -> None:
        """Where requests wait, another one runs, whose end admits the next."""
        assert not self.waiting or self.inside

    def teardown(self) -> None:
        """Without further arrivals every waiter with time left is admitted."""
        for _ in range(1000):
            if not self.inside:
                break
            self.leave(next(iter(self.inside)), None)
        assert not self.waiting
        assert self.scheduler.running == self.scheduler.pending == 0


TestMachine = Machine.TestCase


@given(st.lists(st.tuples(TENANTS, st.integers(1, 30)), min_size=2, max_size=12), st.integers(1, 8))
def test_tenants_get_equal_turns_whatever_the_size_of_their_requests(came: list[tuple[str, int]], permits: int) -> None:
    """While two tenants wait, neither gets more than its credit ahead; the limit is never exceeded, nothing is left."""
    config = {"reserved_share": 0.0, "preemption_share": 0.0}
    scheduler = AdmissionScheduler(settings(permits, max_queued=1000, least=0, **config), 0.0)
    running: list[Ticket] = []
    waiting = dict.fromkeys(("a", "b", "c"), 0)
    for tenant, sequences in came:
        tickets = [Ticket("standard", tenant, 1.0, 1.0, 0.0, 1e9) for _ in range(sequences)]
        for ticket in tickets if sequences > 1 else ():
            ticket.siblings = tickets
        scheduler.arrive(tickets[0], 0.0)
        running += [ticket for ticket in tickets if ticket.has_permit]
        waiting[tenant] += sum(not ticket.has_permit for ticket in tickets)
    served = dict.fromkeys(waiting, 0)
    for count in range(1, 400):
        assert len(running) == scheduler.running <= permits
        if not running:
            break
        for ticket in scheduler.leave(running.pop(0), float(count), 1.0):
            running.append(ticket)
            served[ticket.tenant] += 1
            waiting[ticket.tenant] -= 1
        backlogged = [tenant for tenant, left in waiting.items() if left]
        assert all(abs(served[one] - served[other]) <= 2 * permits for one in backlogged for other in backlogged)
    assert (scheduler.running, scheduler.waiting, sum(waiting.values())) == (0, 0, 0)


@given(
    st.lists(st.tuples(TENANTS, st.floats(1.0, 100.0), st.sampled_from([1.0, 2.0])), min_size=1, max_size=40), st.data()
)
def test_no_tenant_is_starved(came: list[tuple[str, float, float]], data: st.DataObject) -> None:
    """The bound of start-time fair queueing: until a tenant's turn comes, no other gets more than its weight allows,
    plus one request."""
    weights = {tenant: weight for tenant, _, weight in came}
    queue, tickets = FairQueue(), []
    for at, (tenant, tokens, _) in enumerate(came):
        ticket = Ticket("standard", tenant, weights[tenant], tokens, float(at), 1e9)
        queue.add(ticket)
        tickets.append(ticket)
    served = dict.fromkeys(weights, 0.0)
    backlogged = {tenant: sum(t.tenant == tenant for t in tickets) for tenant in weights}
    while (first := queue.first()) is not None:
        queue.pop(first)
        served[first.tenant] += first.tokens / first.weight
        backlogged[first.tenant] -= 1
        still = [tenant for tenant, count in backlogged.items() if count]
        for one in still:
            for other in still:
                assert abs(served[one] - served[other]) <= 100.0 / weights[one] + 100.0 / weights[other] + 1e-6


@given(st.lists(st.tuples(TENANTS, st.floats(1.0, 100.0)), max_size=30), TENANTS, st.integers(0, 10))
def test_count_ahead_is_exact_without_further_arrivals(came: list[tuple[str, float]], tenant: str, taken: int) -> None:
    queue = FairQueue()
    for at, (name, tokens) in enumerate(came):
        queue.add(Ticket("standard", name, 1.0, tokens, float(at), 1e9))
    for _ in range(min(taken, len(came))):
        first = queue.first()
        assert first is not None
        queue.pop(first)
    ticket = Ticket("standard", tenant, 1.0, 10.0, 1000.0, 1e9)
    predicted = queue.count_ahead(ticket)
    queue.add(ticket)
    before = 0
    while (first := queue.first()) is not ticket:
        assert first is not None
        queue.pop(first)
        before += 1
    assert before == predicted
