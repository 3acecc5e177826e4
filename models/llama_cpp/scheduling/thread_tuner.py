"""How many threads a step takes: found by trying, because no load figure tells what one more would gain.

A trial compares a few steps with the count in use against a few with a neighbour of it (double or half). What a lost
trial cost decides how long the next one waits, so that trials take about a hundredth of the time at most, also beside
other load, where a thread too many can cost many times a step.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

_STEPS = 4  # on each side of a trial
_GAIN = 1.05  # a larger count must be this much faster
_HOPELESS = 3.0  # a trial step that takes so many times longer ends the trial
_PRICE = 100.0  # seconds of work between trials for each second that a trial lost
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0  # of work between trials


class ThreadTuner:
    """Chooses the number of threads for steps of one kind. `threads`: for the next step."""

    def __init__(self, first: int, most: Callable[[], float] | None) -> None:
        """Begin with `first` threads.

        Args:
            first: the count to begin with.
            most: returns the cores, asked before each trial since a process may lose cores while it runs; None: the
                count stays.
        """
        self.threads = self._best = first
        self._most = most
        self._upwards = True
        self._rows = -1
        self._reference = 0.0  # cost of a step with the best count
        self._costs: list[float] = []  # of this side of the trial
        self._trial_s = self._pause_s = 0.0

    def record(self, rows: int, cost: float, step_s: float) -> None:
        """Record a step that ran with `threads`.

        Args:
            rows: steps are compared only with those of the same number.
            cost: what is compared, for example seconds for each row.
            step_s: the step's duration in seconds.
        """
        if self._most is None:
            return
        if rows != self._rows:
            self._rows = rows
            self._end_trial()
        if self._pause_s > 0:
            self._pause_s -= step_s
            return
        self._costs.append(cost)
        if self.threads == self._best:
            if len(self._costs) == _STEPS:
                self._begin_trial(median(self._costs), max(1, int(self._most())))
            return
        self._trial_s += step_s
        if len(self._costs) == _STEPS or cost > _HOPELESS * self._reference:
            self._decide(median(self._costs))

    def _begin_trial(self, reference: float, most: int) -> None:
        self._costs.clear()
        if self._best > most or most == 1:
            self.threads = self._best = min(self._best, most)
            self._pause_s = _PAUSE_S
            return
        self._reference = reference
        if self._best == most:
            self._upwards = False
        elif self._best == 1:
            self._upwards = True
        self.threads = min(most, self._best * 2) if self._upwards else max(1, self._best // 2)

    def _decide(self, cost: float) -> None:
        won = cost * _GAIN < self._reference if self._upwards else cost <= self._reference * _GAIN
        lost_s = max(0.0, self._trial_s * (1 - self._reference / cost))
        if won:
            self._best = self.threads
            self._pause_s = _PAUSE_S
        else:
            self._upwards = not self._upwards
            self._pause_s = min(max(_PAUSE_S, lost_s * _PRICE), _LONGEST_PAUSE_S)
        self._end_trial()

    def _end_trial(self) -> None:
        self.threads = self._best
        self._trial_s = 0.0
        self._costs.clear()
