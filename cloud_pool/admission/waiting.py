"""The waiting tickets of all priorities: their number, their order, and which make room in a full queue. Pure.

Within a priority tenants take turns by the tokens they use, each tenant's own in arrival order. A waiter is one
sequence: a request for many takes as many turns, and no other tenant waits for all of them.

Start-time fair queueing (Goyal, Vin and Cheng 1996): each tenant has a start tag, the next is the tenant with the
lowest, and its tag grows by its sequence's cost over the tenant's weight. Virtual time is the tag of the last sequence
that was admitted. A tenant that was away, or sends less than its share, enters up to `credit` sequences before that: it
waits for no other tenant's backlog, and a burst of it is served at once, which in the long run is within its share.

The cost is the tokens that a sequence may use, times the share that the tenant's recent ones used of theirs; when it
has ended, the tag is corrected by the actual number. Without that estimate a tenant's second sequence would wait for
the maximum cost of its first one, which still runs: several turns of all other tenants.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from causeway_server.router.jobs.submission import RANK
from causeway_server.router.types import Priority

_MAX_TENANTS = 4096
_NEWEST = 0.2  # weight of the last sequence in a tenant's mean


class TicketState(enum.Enum):
    NEW = "new"
    WAITING = "waiting"
    PENDING = "pending"  # handed over, without a first token yet
    RUNNING = "running"
    GONE = "gone"


@dataclass(eq=False, repr=False, slots=True)
class Ticket:
    """A sequence: a request for n choices of each of its prompts has prompts × n tickets, each for one permit.

    `tokens`: at most, prompt and answer together; the actual number is reported when it ends.
    """

    priority: Priority
    tenant: str
    weight: float
    tokens: float
    arrived: float  # monotonic, s
    deadline: float  # monotonic, s
    preemptible: bool = True  # until its first token
    cost: float = 0.0  # the cost charged when it was admitted
    state: TicketState = TicketState.NEW
    admitted: float = -math.inf  # monotonic, s
    preempted: int = 0  # times
    siblings: Sequence[Ticket] = ()  # all tickets of the same request, this one included; () for a single one

    @property
    def rank(self) -> int:
        return RANK[self.priority]

    @property
    def of_request(self) -> Sequence[Ticket]:
        """All tickets of the same request, in the order in which they get their permits."""
        return self.siblings or (self,)

    @property
    def is_first(self) -> bool:
        return not self.siblings or self.siblings[0] is self

    @property
    def has_begun(self) -> bool:
        """Whether a sibling has had a permit, so that the caller may have a part of the answer."""
        return bool(self.siblings) and self.siblings[0].admitted > -math.inf

    @property
    def has_permit(self) -> bool:
        return self.state is TicketState.PENDING or self.state is TicketState.RUNNING


@dataclass(slots=True)
class Flow:
    """The sequences of a tenant."""

    start: float  # tag of the first that waits, or of the next to come
    weight: float
    used_share: float  # mean share that they use of the tokens that they may
    waiting: deque[Ticket] = field(default_factory=deque)


class FairQueue:
    """Fair queue with tenants' tags and waiters. Costs are tokens, tags tokens over weight, `credit` sequences."""

    def __init__(self, credit: float = 0.0) -> None:
        self.credit = credit
        self._flows: dict[str, Flow] = {}
        self._backlogged: dict[str, Flow] = {}  # flows with waiters
        self._virtual = 0.0
        self._used_share = 1.0  # of a tenant without history
        self.count = 0  # of waiters

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Ticket]:
        return (ticket for flow in self._backlogged.values() for ticket in flow.waiting)

    def add(self, ticket: Ticket) -> None:
        self._flow_to_extend(ticket).waiting.append(ticket)

    def has(self, tenant: str) -> bool:
        return tenant in self._backlogged

    def first(self, may_enter: Callable[[Ticket], bool] = lambda ticket: True) -> Ticket | None:
        """Return the next ticket among those for which `may_enter` is true; of equal tags, the oldest."""
        waiting = (flow for flow in self._backlogged.values() if may_enter(flow.waiting[0]))
        heads = ((flow.start, flow.waiting[0].arrived, flow) for flow in waiting)
        found = min(heads, key=lambda head: head[:2], default=None)
        return found[2].waiting[0] if found else None

    def pop(self, ticket: Ticket) -> None:
        """Remove an admitted ticket, the first of its tenant."""
        self._flows[ticket.tenant].waiting.popleft()
        self._count_removed(ticket)
        self.charge(ticket)

    def charge(self, ticket: Ticket) -> None:
        """Charge the cost of a ticket that is admitted."""
        flow = self._flow(ticket)
        self._virtual = max(self._virtual, flow.start)
        ticket.cost = ticket.tokens * flow.used_share
        flow.start += ticket.cost / flow.weight

    def restore(self, ticket: Ticket) -> None:
        """Put a preempted ticket back as its tenant's first, and refund its cost."""
        flow = self._flow_to_extend(ticket)
        flow.start -= ticket.cost / flow.weight
        ticket.cost = 0.0
        flow.waiting.appendleft(ticket)

    def correct(self, ticket: Ticket, used: float) -> None:
        """Correct the cost of an ended ticket by the tokens that it used."""
        flow = self._flow(ticket)
        flow.start += (used - ticket.cost) / flow.weight
        share = min(1.0, used / ticket.tokens)
        flow.used_share += _NEWEST * (share - flow.used_share)
        self._used_share += _NEWEST * (share - self._used_share)

    def remove(self, ticket: Ticket) -> None:
        """Remove a waiter that leaves; it is not charged."""
        self._flows[ticket.tenant].waiting.remove(ticket)
        self._count_removed(ticket)

    def count_ahead(self, ticket: Ticket, siblings: int = 0) -> int:
        """Return the number of waiters ahead of this ticket if it arrived now, behind `siblings` of its request."""
        flow = self._flows.get(ticket.tenant)
        own = siblings if flow is None else siblings + len(flow.waiting)  # all of them
        if self.count == own - siblings:
            return own
        cost = ticket.tokens * (self._used_share if flow is None else flow.used_share) / ticket.weight
        start = self._start_of_idle(-math.inf if flow is None else flow.start, cost)
        if flow is not None:
            start = flow.start if flow.waiting else start
            start += flow.used_share * sum(each.tokens for each in flow.waiting) / flow.weight
        start += siblings * cost
        return own + sum([_count_before(each, start) for each in self._backlogged.values() if each is not flow])

    def youngest(self) -> Ticket | None:
        """Return the youngest ticket of a request that has not begun."""
        last = (flow.waiting[-1] for flow in self._backlogged.values())
        return max((ticket for ticket in last if not ticket.has_begun), key=attrgetter("arrived"), default=None)

    def youngest_over_share(self, ticket: Ticket) -> Ticket | None:
        """Return a ticket of the request that has to make room for a new one in a full queue; None if there is none.

        It is the youngest of the tenant with most of the queue for its weight, if that exceeds its share and the new
        ticket's tenant, with this request, stays within its own.
        """
        flow = self._backlogged.get(ticket.tenant)
        others = [each for each in self._backlogged.values() if each is not flow and not each.waiting[-1].has_begun]
        if not others:
            return None
        longest = max(others, key=lambda other: len(other.waiting) / other.weight)
        count = (len(flow.waiting) if flow else 0) + len(ticket.of_request)
        return longest.waiting[-1] if count / ticket.weight < len(longest.waiting) / longest.weight else None

    def _flow(self, ticket: Ticket) -> Flow:
        flow = self._flows.get(ticket.tenant)
        if flow is None:
            self._forget_idle()
            flow = self._flows[ticket.tenant] = Flow(-math.inf, ticket.weight, self._used_share)
        if not flow.waiting:
            flow.start = self._start_of_idle(flow.start, ticket.tokens * flow.used_share / ticket.weight)
        flow.weight = ticket.weight
        return flow

    def _flow_to_extend(self, ticket: Ticket) -> Flow:
        """Return the tenant's flow, counting the waiter that is about to be added."""
        flow = self._backlogged[ticket.tenant] = self._flow(ticket)
        self.count += 1
        return flow

    def _count_removed(self, ticket: Ticket) -> None:
        self.count -= 1
        if not self._flows[ticket.tenant].waiting:
            del self._backlogged[ticket.tenant]

    def _start_of_idle(self, start: float, cost: float) -> float:
        """Return the start tag for a request of a tenant that has no waiters."""
        return max(start, self._virtual - self.credit * cost)

    def _forget_idle(self) -> None:
        """Delete tenants without debt; if that is not enough, all tenants without waiters."""
        for forget_debts in (False, True):
            if len(self._flows) >= _MAX_TENANTS:
                self._flows = {
                    tenant: flow
                    for tenant, flow in self._flows.items()
                    if flow.waiting or (flow.start > self._virtual and not forget_debts)
                }


def _count_before(flow: Flow, start: float) -> int:
    """Return the number of a tenant's waiters with a tag up to `start`."""
    tag, count = flow.start, 0
    for ticket in flow.waiting:
        if tag > start:
            break
        tag += flow.used_share * ticket.tokens / flow.weight
        count += 1
    return count


class WaitingTickets:
    """The queues of all priorities.

    `max_queued` bounds the sequences whose request waits to begin. A queue with room accepts a whole request; a full
    one accepts it in place of another request, which is displaced as a whole. A request that has begun is not displaced
    and does not count: per tenant and priority at most one waits for more permits, the first in its turn.
    """

    def __init__(self, max_queued: int, credit: float) -> None:
        self.queues: dict[Priority, FairQueue] = {priority: FairQueue(credit) for priority in RANK}
        self._in_order = tuple(self.queues.values())
        self._max_queued = max_queued

    def __len__(self) -> int:
        count = 0
        for queue in self._in_order:  # asked for at every event
            count += queue.count
        return count

    def of(self, ticket: Ticket) -> FairQueue:
        """Return the queue of the ticket's priority."""
        return self.queues[ticket.priority]

    def add(self, ticket: Ticket) -> None:
        self.of(ticket).add(ticket)
        ticket.state = TicketState.WAITING

    def remove(self, ticket: Ticket) -> None:
        self.of(ticket).remove(ticket)
        ticket.state = TicketState.GONE

    def count_at_or_above(self, priority: Priority) -> int:
        count = 0
        for queue in self._in_order[: RANK[priority] + 1]:
            count += queue.count
        return count

    def count_ahead(self, ticket: Ticket, siblings: int = 0) -> int:
        """Return the number of tickets ahead of this one if it arrived now, behind `siblings` of its request."""
        above = sum([queue.count for queue in self._in_order[: ticket.rank]])
        return above + self.of(ticket).count_ahead(ticket, siblings)

    def rank_of(self, tenant: str) -> int:
        """Return the rank of the tenant's most urgent ticket; the number of ranks if it has none."""
        for priority, queue in self.queues.items():
            if queue.count and queue.has(tenant):
                return RANK[priority]
        return len(RANK)

    def more_urgent(self, ticket: Ticket) -> Iterator[Ticket]:
        """Yield the tickets of higher priorities."""
        return (waiter for each, queue in self.queues.items() if RANK[each] < ticket.rank for waiter in queue)

    @property
    def is_full(self) -> bool:
        return len(self) >= self._max_queued and self._count_unbegun() >= self._max_queued

    def displace_for(self, ticket: Ticket) -> list[Ticket]:
        """Remove a request to make room for a new one in a full queue; return its tickets, none if none is large
        enough.

        It is the youngest of the lowest priority below, else of a tenant that holds more of the queue for its weight.
        """
        below = (self.queues[each].youngest() for each in reversed(RANK) if RANK[each] > ticket.rank)
        excess = self._count_unbegun() - self._max_queued + 1
        for found in (*below, self.of(ticket).youngest_over_share(ticket)):
            if found is not None and len(_waiting(found)) >= excess:
                return self._displace(found)
        return []

    def displace_behind(self, victim: Ticket) -> list[Ticket]:
        """Remove the youngest request of the lowest priority, down from the victim's. Returns its tickets."""
        behind = (self.queues[each].youngest() for each in reversed(RANK) if RANK[each] >= victim.rank)
        youngest = next((each for each in behind if each is not None), None)
        return [] if youngest is None else self._displace(youngest)

    def _displace(self, ticket: Ticket) -> list[Ticket]:
        tickets = _waiting(ticket)
        for each in tickets:
            self.remove(each)
        return tickets

    def _count_unbegun(self) -> int:
        return sum(not ticket.has_begun for queue in self.queues.values() for ticket in queue)


def _waiting(ticket: Ticket) -> list[Ticket]:
    """Return the waiting tickets of the same request."""
    return [each for each in ticket.of_request if each.state is TicketState.WAITING]
