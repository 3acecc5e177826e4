"""When a queue is not a burst any more but an overload, and who is turned away for it. Pure.

After CoDel (Nichols and Jacobson 2012, RFC 8289): a queue that keeps everybody waiting longer than a target for a whole
interval stands, and only sheds shrink it. Here a queue that stands takes in only who would go in within the target,
known before rather than found after, and work below it is not taken at all: bulk first, standard an interval later.
It ends when somebody waited less than half the target, so that it does not flap.
"""

from __future__ import annotations

import math
from typing import Final

from .ticket import RANK, Priority

INTERVAL_S = 1.0
_TARGETS: Final[dict[Priority, float]] = {"interactive": 0.5, "standard": 1.0, "bulk": 5.0}
"""Of the objective for an interactive request's first token: half of it is for the queue."""


class Standing:
    """Of one priority."""

    def __init__(self) -> None:
        self._above_since = math.inf
        self.since = math.inf  # it stands

    def waited(self, now: float, seconds: float, target_s: float) -> None:
        """One went in after so long. An empty queue counts as no wait."""
        if seconds < target_s / 2:
            self._above_since = self.since = math.inf
        elif seconds < target_s:
            self._above_since = math.inf
        else:
            self._above_since = min(self._above_since, now)
            if now - self._above_since >= INTERVAL_S:
                self.since = min(self.since, now)


class Overload:
    """Owns which queues stand."""

    def __init__(self, objective_s: float) -> None:
        self._objective_s = objective_s
        self._standings = {priority: Standing() for priority in RANK}

    def target_s(self, priority: Priority) -> float:
        return self._objective_s * _TARGETS[priority]

    def waited(self, now: float, priority: Priority, seconds: float) -> None:
        self._standings[priority].waited(now, seconds, self.target_s(priority))

    def stands(self, priority: Priority) -> bool:
        return self._standings[priority].since < math.inf

    def sheds(self, now: float, priority: Priority) -> bool:
        """Whether work of this priority is not taken, because a queue above it stands."""
        interactive, standard = self._standings["interactive"].since, self._standings["standard"].since
        if priority == "bulk":
            return min(interactive, standard) < math.inf
        return priority == "standard" and now - interactive >= INTERVAL_S
