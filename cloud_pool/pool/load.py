"""How much work an endpoint has, in requests of a usual endpoint of its pool. Pure.

    load = (outstanding + 1) × slowness² / ramp

slowness   time to the first token over 1.5 times the pool's median, at least 1. What waits for one counts as measured
           so far, so that a stuck endpoint is avoided before anything was measured. A figure that is not renewed
           fades, or a slow endpoint would never be tried again. Squared: work that is shared by speed alone would
           still give some callers a first token that takes ten times as long.
ramp       from a tenth to 1 after its return: a cold cache does not get a full share (slow start).
"""

from __future__ import annotations

import math

import msgspec

from .settings import PoolConfig
from .state import Endpoint, PoolState

SLOW = 2.0  # times what is usual
_USUAL = 1.5  # times the median: times to the first token vary by as much with the prompts alone
_SLOWEST = 7.0
_LEAST_S = 0.005  # medians below it say nothing about slowness
_FIRST_RAMP = 0.1
_UP, _DOWN = 0.5, 0.3  # weights of a new figure: two slow answers are enough, forgiving takes a few more


def median_ttft_s(state: PoolState, now: float) -> float:
    """The lower median of the endpoints that take requests; 0 while nothing was measured."""
    seen = sorted(_raw_s(one, now) for one in state.endpoints if one.phase == "in" and one.ttft_s > 0.0)
    return max(_LEAST_S, seen[(len(seen) - 1) // 2]) if seen else 0.0


def slowness(endpoint: Endpoint, median_s: float, now: float, settings: PoolConfig) -> float:
    """Times what is usual, from 1 to 7."""
    if median_s <= 0.0:
        return 1.0
    measured = endpoint.ttft_s
    # Only one request at a time tries whether a slow endpoint still is.
    if measured > median_s and not endpoint.waiting:
        measured = median_s + (measured - median_s) * math.exp((endpoint.ttft_at - now) / settings.forget_s)
    times = max(measured, _waited_s(endpoint, now)) / (_USUAL * median_s)
    return min(max(1.0, times), _SLOWEST)


def ramp(endpoint: Endpoint, now: float, settings: PoolConfig) -> float:
    if settings.slow_start_s <= 0.0:
        return 1.0
    return min(1.0, max(_FIRST_RAMP, (now - endpoint.since) / settings.slow_start_s))


def load(endpoint: Endpoint, slow: float, now: float, settings: PoolConfig) -> float:
    """`slow` is its slowness."""
    return (endpoint.outstanding + 1) * slow**2 / ramp(endpoint, now, settings)


def measured(endpoint: Endpoint, seconds: float, now: float) -> Endpoint:
    """With one more time to the first token."""
    old = endpoint.ttft_s
    weight = 1.0 if old <= 0.0 else _UP if seconds > old else _DOWN
    return msgspec.structs.replace(endpoint, ttft_s=old + weight * (seconds - old), ttft_at=now)


def _raw_s(endpoint: Endpoint, now: float) -> float:
    return max(endpoint.ttft_s, _waited_s(endpoint, now))


def _waited_s(endpoint: Endpoint, now: float) -> float:
    return now - endpoint.waiting[0] if endpoint.waiting else 0.0
