"""How long to wait before an engine child that ended is started again. Pure."""

from __future__ import annotations

_FIRST_S = 0.1
_LONGEST_S = 30.0
_HEALTHY_S = 5.0


class RestartBackoff:
    """Doubles the pause with each child that ends soon, and begins anew after a healthy one.

    Args:
        first_s: the pause after a healthy child.
        healthy_s: a child was healthy if it was ready for so many seconds. The time that it took to load does not
            count: a large model may load for a minute and crash at its first step.
    """

    def __init__(self, *, first_s: float = _FIRST_S, healthy_s: float = _HEALTHY_S) -> None:
        self._first_s = first_s
        self._healthy_s = healthy_s
        self._next_s = first_s

    def pause_s(self, ready_s: float) -> float:
        """Return the pause after a child that was ready for `ready_s`; 0 if it never was."""
        if ready_s >= self._healthy_s:
            self._next_s = self._first_s
        pause_s, self._next_s = self._next_s, min(2.0 * self._next_s, _LONGEST_S)
        return pause_s
