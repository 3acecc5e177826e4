"""When a queue is not a burst any more but an overload, and which requests are shed for it. Pure.

After CoDel (Nichols and Jacobson 2012, RFC 8289): a queue in which every request waits longer than a target for a whole
interval is a standing queue, and only shedding shrinks it. Here a standing queue takes only requests that would be
admitted within the target, predicted rather than found out afterwards, and work of lower priority is not taken at all:
bulk first, standard an interval later. It ends when for an interval no request has waited half as long, so that it does
not flap.
"""

from __future__ import annotations

import math
from typing import Final

from .ticket import RANK, Priority

INTERVAL_S = 1.0
_TARGETS: Final[dict[Priority, float]] = {"interactive": 0.5, "standard": 1.0, "bulk": 5.0}
"""Times the objective for an interactive request's first token: half of it is for the queue."""


class StandingQueue:
    """The queue of one priority."""

    def __init__(self) -> None:
        self._above_since = math.inf
        self._since = math.inf
        self._long_wait_at = -math.inf

    def record_wait(self, now: float, seconds: float, target_s: float) -> None:
        """Record the wait of a request, which was admitted or predicted."""
        if seconds < target_s:
            self._above_since = math.inf
        else:
            self._above_since = min(self._above_since, now)
        if self.since(now) is None:
            self._since = math.inf
        if seconds >= target_s / 2:
            self._long_wait_at = now
        if now - self._above_since >= INTERVAL_S:
            self._since = min(self._since, now)

    def since(self, now: float) -> float | None:
        """Return when it became a standing queue, s; None: it is not."""
        return self._since if now - self._long_wait_at < INTERVAL_S and self._since < math.inf else None


class OverloadDetector:
    """Owns the state of each priority's queue."""

    def __init__(self, objective_s: float) -> None:
        self._objective_s = objective_s
        self._queues = {priority: StandingQueue() for priority in RANK}

    def target_s(self, priority: Priority) -> float:
        return self._objective_s * _TARGETS[priority]

    def record_wait(self, now: float, priority: Priority, seconds: float) -> None:
        self._queues[priority].record_wait(now, seconds, self.target_s(priority))

    def is_standing(self, now: float, priority: Priority) -> bool:
        return self._queues[priority].since(now) is not None

    def should_shed(self, now: float, priority: Priority) -> bool:
        """Tell whether work of this priority is rejected because a queue above it is a standing one."""
        interactive = self._queues["interactive"].since(now)
        if priority == "bulk":
            return interactive is not None or self.is_standing(now, "standard")
        return priority == "standard" and interactive is not None and now - interactive >= INTERVAL_S
