"""Delay before a job's next attempt. Pure: the random number is an argument."""

from __future__ import annotations


def job_retry_delay_s(attempts: int, chance: float, *, base_s: float, max_s: float) -> float:
    """Return an exponential delay with full jitter: uniform in (0, min(max_s, base_s · 2^(attempts-1))].

    Args:
        attempts: attempts so far, at least 1
        chance: uniform in [0, 1)
    """
    ceiling = min(max_s, base_s * 2.0 ** min(attempts - 1, 32))
    return ceiling * (1.0 - chance)
