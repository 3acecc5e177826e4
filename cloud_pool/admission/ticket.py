"""One sequence of a request in a tier's admission, from its arrival until it has left."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

from router.jobs.submission import RANK, Priority

__all__ = ["RANK", "Priority", "Ticket", "TicketState"]


class TicketState(enum.Enum):
    NEW = "new"
    WAITING = "waiting"
    PENDING = "pending"  # handed over, without a first token yet
    RUNNING = "running"
    GONE = "gone"


@dataclass(eq=False, slots=True)
class Ticket:
    """One sequence: a request for n choices of each of its prompts has prompts × n tickets, each for one permit.

    `tokens` is what the sequence may cost, prompt and answer together; the actual number is reported when it ends.
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
        """All tickets of its request, in the order in which they get their permits."""
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
