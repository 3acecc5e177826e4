"""A fixed piece of interpreter work, so that a limit means the same on a fast and on a slow machine.

Limits of short operations are multiples of this loop, measured in the same run: about 5 us on a server core of 2024.
"""

from __future__ import annotations

import functools
import json
import statistics
import time

_DOCUMENT = {"model": "auto", "messages": [{"role": "user", "content": "wake me up at six"}] * 4, "n": 1}
_ROUNDS, _TIMES = 25, 400


def _work() -> None:
    json.loads(json.dumps(_DOCUMENT))


@functools.cache
def yardstick_us() -> float:
    """The loop's median time on this machine, in microseconds; measured once per run."""
    rounds = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        for _ in range(_TIMES):
            _work()
        rounds.append((time.perf_counter() - started) / _TIMES * 1e6)
    return statistics.median(rounds)
