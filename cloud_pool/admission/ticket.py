"""One request in a tier's admission, from its arrival until it has left."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, Literal

Priority = Literal["interactive", "standard", "bulk"]
RANK: Final[dict[Priority, int]] = {"interactive": 0, "standard": 1, "bulk": 2}


class TicketState(enum.Enum):
    NEW = "new"
    WAITING = "waiting"
    PENDING = "pending"  # handed over, without a first token yet
    RUNNING = "running"
    GONE = "gone"


@dataclass(eq=False, slots=True)
class Ticket:
    """`tokens` is what the request may cost, prompt and answer together; the actual number is reported when it ends."""

    priority: Priority
    tenant: str
    weight: float
    tokens: float
    arrived: float  # monotonic, s
    deadline: float  # monotonic, s
    preemptible: bool = True  # until its first token
    cost: float = 0.0  # the cost charged when it was admitted
    state: TicketState = TicketState.NEW
    admitted: float = 0.0  # monotonic, s
    preempted: int = 0  # times

    @property
    def rank(self) -> int:
        return RANK[self.priority]

    @property
    def has_permit(self) -> bool:
        return self.state is TicketState.PENDING or self.state is TicketState.RUNNING
