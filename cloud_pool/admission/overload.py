"""When a queue is not a burst any more but an overload, and who is turned away for it. Pure.

After CoDel (Nichols and Jacobson 2012, RFC 8289): a queue that keeps everybody waiting longer than a target for a whole
interval stands, and only sheds shrink it. Here a queue that stands takes in only who would go in within the target,
known before rather than found after, and work below it is not taken at all: bulk first, standard an interval later.
It ends when for an interval nobody has waited half as long, so that it does not flap.
"""

from __future__ import annotations

import math
from typing import Final

from .ticket import RANK, Priority

INTERVAL_S = 1.0
_TARGETS: Final[dict[Priority, float]] = {"interactive": 0.5, "standard": 1.0, "bulk": 5.0}
"""Of the objective for an interactive request's first token: half of it is for the queue."""


class StandingQueue:
    """Of one priority."""

    def __init__(self) -> None:
        self._above_since = math.inf
        self._since = math.inf
        self._long_at = -math.inf

    def waited(self, now: float, seconds: float, target_s: float) -> None:
        """One went in after so long."""
        if seconds < target_s:
            self._above_since = math.inf
        else:
            self._above_since = min(self._above_since, now)
        if self.since(now) is None:
            self._since = math.inf
        if seconds >= target_s / 2:
            self._long_at = now
        if now - self._above_since >= INTERVAL_S:
            self._since = min(self._since, now)

    def since(self, now: float) -> float | None:
        """When it began to stand, s; None: it does not."""
        return self._since if now - self._long_at < INTERVAL_S and self._since < math.inf else None


class OverloadDetector:
    """Owns which queues stand."""

    def __init__(self, objective_s: float) -> None:
        self._objective_s = objective_s
        self._standings = {priority: StandingQueue() for priority in RANK}

    def target_s(self, priority: Priority) -> float:
        return self._objective_s * _TARGETS[priority]

    def waited(self, now: float, priority: Priority, seconds: float) -> None:
        self._standings[priority].waited(now, seconds, self.target_s(priority))

    def stands(self, now: float, priority: Priority) -> bool:
        return self._standings[priority].since(now) is not None

    def sheds(self, now: float, priority: Priority) -> bool:
        """Whether work of this priority is not taken, because a queue above it stands."""
        interactive = self._standings["interactive"].since(now)
        if priority == "bulk":
            return interactive is not None or self.stands(now, "standard")
        return priority == "standard" and interactive is not None and now - interactive >= INTERVAL_S
