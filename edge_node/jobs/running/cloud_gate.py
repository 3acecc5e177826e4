"""When jobs may go to the cloud, so that a thousand boxes do not storm it when it comes back."""

from __future__ import annotations

import random

from ...config.schema import JobsConfig

_CATCH_UP = 3.0  # times the steady rate, at most
_SOON_S = 2.0  # a pause for which the cloud named no time
_LONGEST_PAUSE_S = 60.0


class CloudGate:
    """When jobs may go to the cloud: while it is reachable, after a random pause, at a bounded rate.

    Args:
        chance: draws the pauses.
    """

    def __init__(self, config: JobsConfig, chance: random.Random) -> None:
        self._jitter_s = config.jitter_s
        self._interval_s = 1.0 / (_CATCH_UP * config.steady_per_s)
        self._chance = chance
        self._was_open = False
        self._opens = 0.0
        self._next = 0.0

    def may_send(self, now: float, *, reachable: bool, backlog: bool) -> bool:
        """Whether one job may be sent now, which it then is. `now`: monotonic, s. `backlog`: jobs wait."""
        if reachable and not self._was_open:
            self._opens = max(self._opens, now + (self._chance.random() * self._jitter_s if backlog else 0.0))
        self._was_open = reachable
        if not reachable or now < max(self._opens, self._next):
            return False
        self._next = max(self._next, now - self._interval_s) + self._interval_s
        return True

    def wait_s(self, now: float) -> float:
        """Until the next job may be sent, if the cloud is reachable."""
        return max(0.0, max(self._opens, self._next) - now)

    def pause(self, now: float, seconds: float | None) -> None:
        """The cloud asked for a pause, or failed."""
        wait_s = _SOON_S if seconds is None else min(seconds, _LONGEST_PAUSE_S)
        self._opens = max(self._opens, now + wait_s * (1.0 + 0.25 * self._chance.random()))
