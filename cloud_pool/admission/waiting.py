"""The tickets that wait, of all priorities: how many, in which order, and which make room in a full queue. Pure.

`max_queued` bounds the sequences that wait for their request to begin. A queue that is not full takes a whole request;
a full one takes it in the place of another one, which is displaced as a whole. A request that has begun is not
displaced and does not count: of each tenant and priority at most one waits for more permits, the first in its turn.
"""

from __future__ import annotations

from collections.abc import Iterator

from .fair_queue import FairQueue
from .ticket import RANK, Priority, Ticket, TicketState


class WaitingTickets:
    """Owns the queue of each priority."""

    def __init__(self, max_queued: int, credit: float) -> None:
        self.queues: dict[Priority, FairQueue] = {priority: FairQueue(credit) for priority in RANK}
        self._max_queued = max_queued

    def __len__(self) -> int:
        return sum(map(len, self.queues.values()))

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
        return sum(len(queue) for each, queue in self.queues.items() if RANK[each] <= RANK[priority])

    def count_ahead(self, ticket: Ticket, siblings: int = 0) -> int:
        """Return how many would be admitted before this ticket if it came now, behind so many siblings."""
        above = sum(len(queue) for each, queue in self.queues.items() if RANK[each] < ticket.rank)
        return above + self.of(ticket).count_ahead(ticket, siblings)

    def rank_of(self, tenant: str) -> int:
        """Return the rank of the tenant's most urgent ticket, the number of ranks where it has none."""
        return next((RANK[each] for each, queue in self.queues.items() if queue.has(tenant)), len(RANK))

    def more_urgent(self, ticket: Ticket) -> Iterator[Ticket]:
        """Yield the tickets of the priorities above."""
        return (one for each, queue in self.queues.items() if RANK[each] < ticket.rank for one in queue)

    @property
    def is_full(self) -> bool:
        return len(self) >= self._max_queued and self._count_unbegun() >= self._max_queued

    def displace_for(self, ticket: Ticket) -> list[Ticket]:
        """Remove a request that makes room for a new one in a full queue.

        It is the youngest of the lowest priority below, else the youngest of a tenant that has more of the queue for
        its weight. Returns its tickets; none where no such request is large enough.
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
    """Return the waiting tickets of its request."""
    return [each for each in ticket.of_request if each.state is TicketState.WAITING]
