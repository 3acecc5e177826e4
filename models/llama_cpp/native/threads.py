"""How many threads to decode with: the cores that this process may use and that are idle.

llama.cpp's threads meet at a barrier many times in each step; a thread that waits for its core stops all of them, so
one thread too many costs far more than one too few.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup/cpu.max")
_WINDOW_S = 0.1


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
