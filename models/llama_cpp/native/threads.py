"""How many threads a step takes: at first the idle cores, then what trials find.

llama.cpp's threads meet at a barrier many times in each step; a thread that waits for its core stops all of them, so
one thread too many costs far more than one too few. No load figure tells what one more would gain: it is tried.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from statistics import median

import psutil

_CGROUP = Path("/sys/fs/cgroup/cpu.max")
_WINDOW_S = 0.1
_STEPS = 4  # on each side of a trial
_GAIN = 1.05  # a larger count must be this much faster
_HOPELESS = 1.5  # the second trial step that takes so many times longer ends the trial; one alone may be an accident
_PRICE = 200.0  # seconds of work between trials for each second that a trial lost
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0  # of work between trials


def allowed_cores() -> float:
    """Return the cores that CPU affinity and the cgroup's quota leave to this process."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    return min(cores, cgroup_quota(_CGROUP))


def cgroup_quota(path: Path) -> float:
    """Read cgroup v2's `cpu.max` ("max 100000" or "150000 100000") as cores; infinite without a limit."""
    try:
        quota, period = path.read_text().split()
        return float("inf") if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return float("inf")


def busy_cores() -> float:
    """Measure for a moment how many of the allowed cores are busy, with any process's work."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    loads = psutil.cpu_percent(interval=_WINDOW_S, percpu=True)
    return sum(load for core, load in enumerate(loads) if core in allowed) / 100


def choose_threads(requested: int, allowed: float | None = None, busy: float | None = None) -> int:
    """Choose the number of decoding threads, at least 1.

    Args:
        requested: the configured number, cut to the allowed cores; 0: the idle cores less one, which is the daemon's.
        allowed: cores that this process may use; None: measured.
        busy: cores in use; None: measured.
    """
    allowed = allowed_cores() if allowed is None else allowed
    if requested > 0:
        return max(1, min(requested, round(allowed)))
    free = allowed - (busy_cores() if busy is None else busy)
    physical = psutil.cpu_count(logical=False) or round(allowed)
    # A core that is a quarter busy still counts as free: the sample includes this process's own start.
    return max(1, min(int(free + 0.25) - 1, physical))


class ThreadTuner:
    """Chooses the number of threads for steps of one kind.

    `threads`: for the next step that is recorded. `best`: of the trials so far, for any other step. `settled`: a trial
    was decided, or the cores leave nothing to decide.
    """

    def __init__(self, first: int, most: Callable[[], float] | None) -> None:
        """Begin with `first` threads.

        Args:
            first: the count to begin with.
            most: returns the cores, asked before each trial since a process may lose cores while it runs; None: the
                count stays.
        """
        self.threads = self.best = first
        self.settled = most is None
        self._most = most
        self._upwards = True
        self._rows = -1
        self._reference = 0.0  # cost of a step with the best count
        self._costs: list[float] = []  # of this side of the trial
        self._trial_s = self._pause_s = 0.0
        self._refused = 0  # trials of more threads that were lost since the count last changed

    def record(self, rows: int, cost: float, step_s: float) -> None:
        """Record a step that ran with `threads`.

        Args:
            rows: of answers; steps are compared only with those of the same number.
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
        if self.threads == self.best:
            if len(self._costs) == _STEPS:
                self._begin_trial(median(self._costs), max(1, int(self._most())))
            return
        self._trial_s += step_s
        hopeless = sum(one > _HOPELESS * self._reference for one in self._costs) > 1
        if hopeless or len(self._costs) == _STEPS:
            self._decide(median(self._costs))

    def _begin_trial(self, reference: float, most: int) -> None:
        self._costs.clear()
        if self.best > most or most == 1:
            self.settled = True
            self.threads = self.best = min(self.best, most)
            self._pause_s = _PAUSE_S
            return
        self._reference = reference
        if self.best == most:
            self._upwards = False
        elif self.best == 1:
            self._upwards = True
        self.threads = min(most, self.best * 2) if self._upwards else max(1, self.best // 2)

    def _decide(self, cost: float) -> None:
        won = cost * _GAIN < self._reference if self._upwards else cost <= self._reference * _GAIN
        self.settled = True
        lost_s = max(0.0, self._trial_s * (1 - self._reference / cost))
        if won:
            self.best = self.threads
            self._pause_s = _PAUSE_S
            self._refused = 0
        else:
            self._pause_s = min(max(_PAUSE_S, lost_s * _PRICE), _LONGEST_PAUSE_S)
            if self._upwards:
                self._refused += 1
                self._pause_s = min(self._pause_s, _PAUSE_S * 2**self._refused)
            self._upwards = not self._upwards
        self._end_trial()

    def _end_trial(self) -> None:
        self.threads = self.best
        self._trial_s = 0.0
        self._costs.clear()


class TunersBySize:
    """A tuner for each size of a step, by powers of 2: 1 row, 2 to 3, 4 to 7 and so on; those with prompts apart."""

    def __init__(self, first: int, most: Callable[[], float] | None) -> None:
        """Begin with `first` threads; the arguments are those of each tuner."""
        self._first = first
        self._most = most
        self._tuners: dict[tuple[bool, int], ThreadTuner] = {}  # by (with a prompt, bits of the number of rows)

    def tuner(self, rows: int, *, prompt: bool = False) -> ThreadTuner:
        """Return the tuner of steps of so many rows.

        Until a trial was decided, it has the most threads that any smaller work is done with.

        Args:
            rows: of the step.
            prompt: some are of prompts, most of which have no output: more work than any step of answers.
        """
        size = (prompt, rows.bit_length())
        tuner = self._tuners.get(size)
        if tuner is None or not tuner.settled:
            first = max((other.best for one, other in self._tuners.items() if one < size), default=self._first)
            if tuner is None or tuner.best < first:
                tuner = self._tuners[size] = ThreadTuner(first, self._most)
        return tuner
