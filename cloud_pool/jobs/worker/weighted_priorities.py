"""Which priority a free slot prefers: smooth weighted round robin, so that bulk jobs are slow but never starve.

Source: the algorithm of nginx's upstream module (commit 52327e0627f49dbda1e8db695e63a4b0af4448b1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ...admission import RANK, Priority

PRIORITY_WEIGHTS: Final[Mapping[Priority, int]] = {"interactive": 8, "standard": 3, "bulk": 1}


class WeightedRoundRobin:
    """Yields priorities. With the default weights any 12 in a row hold 8 interactive, 3 standard and 1 bulk."""

    def __init__(self, weights: Mapping[Priority, int] = PRIORITY_WEIGHTS) -> None:
        self._weights = weights
        self._total = sum(weights.values())
        self._credits = dict.fromkeys(weights, 0)

    def next(self, slots: int) -> tuple[Priority, ...]:
        """Return the preferred priority of each slot. Slots of a priority without jobs go to the most urgent others."""
        return tuple(self._next() for _ in range(slots))

    def _next(self) -> Priority:
        for priority, weight in self._weights.items():
            self._credits[priority] += weight
        chosen = max(self._credits, key=lambda priority: (self._credits[priority], -RANK[priority]))
        self._credits[chosen] -= self._total
        return chosen
