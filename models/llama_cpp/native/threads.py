"""How many threads to decode with: the cores that this process may use and that nobody else is using.

llama.cpp's threads meet at a barrier many times in each step; one that has to wait for its core stops them all, so a
thread too many costs far more than one too few.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup/cpu.max")
_WINDOW_S = 0.1


def allowed_cores() -> float:
    """Cores that affinity and the cgroup's quota leave to this process."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    return min(cores, cgroup_quota(_CGROUP))


def cgroup_quota(path: Path) -> float:
    """Cores from cgroup v2's `cpu.max` ("max 100000" or "150000 100000"); infinite where there is no limit."""
    try:
        quota, period = path.read_text().split()
        return float("inf") if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return float("inf")


def busy_cores(window_s: float = _WINDOW_S) -> float:
    """Cores' worth of work done by anyone on the cores we may use, over `window_s`."""
    mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    loads = psutil.cpu_percent(interval=window_s, percpu=True)
    return sum(load for core, load in enumerate(loads) if core in mine) / 100


def choose_threads(asked: int, allowed: float | None = None, busy: float | None = None) -> int:
    """`asked` if it is given (never more than allowed); else the free cores less one, which stays with the daemon."""
    allowed = allowed_cores() if allowed is None else allowed
    if asked > 0:
        return max(1, min(asked, round(allowed)))
    free = allowed - (busy_cores() if busy is None else busy)
    physical = psutil.cpu_count(logical=False) or round(allowed)
    # A core that is a quarter busy still counts as free: the sample contains our own start.
    return max(1, min(int(free + 0.25) - 1, physical))
