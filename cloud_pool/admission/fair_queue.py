"""The waiters of one priority: tenants take turns by what they use, each tenant's own in order of arrival. Pure.

Start-time fair queueing (Goyal, Vin and Cheng 1996): each tenant has a start tag, the next is who has the least, and
its tag grows by its request's cost over the tenant's weight. Virtual time is the tag of the last who went in. A tenant
that was away, or asks for less than its share, comes in up to `credit` requests before that: it waits for nobody's
backlog, and a burst of it has its turns at once, which in the long run are within its share all the same.

The cost is the tokens that a request may use, times what its tenant's have used of theirs of late; when it has ended,
the tag is put right by what it did use. Without that share a tenant's second request would wait for what its first one,
which still runs, might have cost: several turns of everybody else.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from .ticket import Ticket

_REMEMBERED = 4096  # tenants
_NEWEST = 0.2  # what the last request counts in a tenant's mean


@dataclass(slots=True)
class Flow:
    """A tenant's."""

    start: float  # tag of the first that waits, or of the next to come
    weight: float
    likely: float  # what its requests use of the tokens that they may
    waiting: deque[Ticket] = field(default_factory=deque)


class FairQueue:
    """Owns the tags and who waits. Costs are in tokens, tags in tokens over weight; `credit` is in requests."""

    def __init__(self, credit: float = 0.0) -> None:
        self._credit = credit
        self._flows: dict[str, Flow] = {}
        self._crowd: dict[str, Flow] = {}  # those with somebody who waits
        self._virtual = 0.0
        self._likely = 1.0  # of a tenant that nothing is known of
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Ticket]:
        return (ticket for flow in self._crowd.values() for ticket in flow.waiting)

    def add(self, ticket: Ticket) -> None:
        self._crowded(ticket).waiting.append(ticket)

    def first(self, may: Callable[[Ticket], bool] = lambda ticket: True) -> Ticket | None:
        """Whose turn it is, of those who `may` go in; of equals, the oldest's."""
        waiting = (flow for flow in self._crowd.values() if may(flow.waiting[0]))
        heads = ((flow.start, flow.waiting[0].arrived, flow) for flow in waiting)
        found = min(heads, key=lambda head: head[:2], default=None)
        return found[2].waiting[0] if found else None

    def take(self, ticket: Ticket) -> None:
        """The first of its tenant goes in."""
        self._flows[ticket.tenant].waiting.popleft()
        self._gone(ticket)
        self.charge(ticket)

    def charge(self, ticket: Ticket) -> None:
        """It goes in, or went in without waiting."""
        flow = self._flow(ticket)
        self._virtual = max(self._virtual, flow.start)
        ticket.cost = ticket.tokens * flow.likely
        flow.start += ticket.cost / flow.weight

    def restore(self, ticket: Ticket) -> None:
        """It went in and lost its place: it has cost nothing, and is the first of its tenant."""
        flow = self._crowded(ticket)
        flow.start -= ticket.cost / flow.weight
        ticket.cost = 0.0
        flow.waiting.appendleft(ticket)

    def correct(self, ticket: Ticket, used: float) -> None:
        """What a request that went in has used after all."""
        flow = self._flow(ticket)
        flow.start += (used - ticket.cost) / flow.weight
        share = min(1.0, used / ticket.tokens)
        flow.likely += _NEWEST * (share - flow.likely)
        self._likely += _NEWEST * (share - self._likely)

    def drop(self, ticket: Ticket) -> None:
        """It leaves without having gone in, and has cost nothing."""
        self._flows[ticket.tenant].waiting.remove(ticket)
        self._gone(ticket)

    def ahead(self, ticket: Ticket) -> int:
        """How many of those who wait go in before this one, were it to come now."""
        own = self._flows.get(ticket.tenant)
        cost = ticket.tokens * (self._likely if own is None else own.likely) / ticket.weight
        start = self._from(-math.inf if own is None else own.start, cost)
        if own is not None:
            start = own.start if own.waiting else start
            start += own.likely * sum(each.tokens for each in own.waiting) / own.weight
        return sum(_before(flow, start) for flow in self._crowd.values())

    def youngest(self) -> Ticket | None:
        return max((flow.waiting[-1] for flow in self._crowd.values()), key=_age, default=None)

    def over_share(self, ticket: Ticket) -> Ticket | None:
        """The youngest of the tenant that has most of the queue for its weight, where that is more than its share and
        the newcomer's tenant, with this one, is not. None where nobody has to give way."""
        waiting = dict(self._crowd)
        own = waiting.pop(ticket.tenant, None)
        if not waiting:
            return None
        most = max(waiting.values(), key=lambda flow: len(flow.waiting) / flow.weight)
        mine = (len(own.waiting) if own else 0) + 1
        return most.waiting[-1] if mine / ticket.weight < len(most.waiting) / most.weight else None

    def _flow(self, ticket: Ticket) -> Flow:
        flow = self._flows.get(ticket.tenant)
        if flow is None:
            self._forget()
            flow = self._flows[ticket.tenant] = Flow(-math.inf, ticket.weight, self._likely)
        if not flow.waiting:
            flow.start = self._from(flow.start, ticket.tokens * flow.likely / ticket.weight)
        flow.weight = ticket.weight
        return flow

    def _crowded(self, ticket: Ticket) -> Flow:
        """The flow, to which one is added that waits."""
        flow = self._crowd[ticket.tenant] = self._flow(ticket)
        self._count += 1
        return flow

    def _gone(self, ticket: Ticket) -> None:
        """It does not wait any more."""
        self._count -= 1
        if not self._flows[ticket.tenant].waiting:
            del self._crowd[ticket.tenant]

    def _from(self, start: float, cost: float) -> float:
        """The tag of a tenant that comes when none of its requests waits."""
        return max(start, self._virtual - self._credit * cost)

    def _forget(self) -> None:
        """Who owes nothing; where that is not enough, everybody who does not wait."""
        for debts in (False, True):
            if len(self._flows) >= _REMEMBERED:
                kept = {t: f for t, f in self._flows.items() if f.waiting or (f.start > self._virtual and not debts)}
                self._flows = kept


def _before(flow: Flow, start: float) -> int:
    """How many of a tenant's waiters have a tag up to `start`."""
    tag, count = flow.start, 0
    for ticket in flow.waiting:
        if tag > start:
            break
        tag += flow.likely * ticket.tokens / flow.weight
        count += 1
    return count


def _age(ticket: Ticket) -> float:
    return ticket.arrived
