"""One request at a tier's door, from its arrival until it has left."""

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
    """`tokens` is what the request may cost, prompt and answer; what it did cost is told later."""

    priority: Priority
    tenant: str
    weight: float
    tokens: float
    arrived: float  # monotonic, s
    deadline: float  # monotonic, s
    preemptible: bool = True  # its place, if it must, as long as it has had no token
    cost: float = 0.0  # what it was taken to cost when it went in
    state: TicketState = TicketState.NEW
    admitted: float = 0.0  # monotonic, s
    preempted: int = 0  # times that it gave its place back

    @property
    def rank(self) -> int:
        return RANK[self.priority]

    @property
    def has_permit(self) -> bool:
        return self.state is TicketState.PENDING or self.state is TicketState.RUNNING
