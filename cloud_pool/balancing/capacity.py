"""How much work a tier's endpoints take, counted in endpoints. Pure.

active      counts by its slow start's ramp, from 0.1 to 1
slow        counts nothing: it gets probes, and requests only where every other endpoint has more load
ejected, draining   count nothing

The calls that are still open at endpoints without capacity hold no permit that another endpoint could use.
"""

from __future__ import annotations

import msgspec

from .config import LoadBalancingConfig
from .endpoint_selection import ramp
from .state import Endpoint, PoolState


class PoolCapacity(msgspec.Struct, frozen=True):
    """`endpoints`: as many as take requests, at least 1. `away`: open calls of this process at the other endpoints."""

    endpoints: float
    away: int = 0


def capacity_of(state: PoolState, now: float, settings: LoadBalancingConfig) -> PoolCapacity:
    """Return the capacity at monotonic time `now`, s.

    Without any endpoint it is that of one: requests must not wait for a tier that is down, but fail.
    """
    serving = [one for one in state.endpoints if _serves(one)]
    if not serving:
        return PoolCapacity(1.0)
    away = sum(one.outstanding for one in state.endpoints if not _serves(one))
    return PoolCapacity(max(1.0, sum(ramp(one, now, settings) for one in serving)), away)


def _serves(endpoint: Endpoint) -> bool:
    return endpoint.phase == "active" and not endpoint.slow
