"""How much work a tier's endpoints take, counted in endpoints. Pure.

active      counts, from its return on
slow        counts nothing: it gets probes, and requests only where every other endpoint has more load
ejected, draining   count nothing

The calls that are still open at endpoints without capacity hold no permit that another endpoint could use.
"""

from __future__ import annotations

import msgspec

from .state import Endpoint, PoolState


class PoolCapacity(msgspec.Struct, frozen=True):
    """`endpoints`: as many as take requests, at least 1. `away`: open calls of this process at the other endpoints."""

    endpoints: int
    away: int = 0


def capacity_of(state: PoolState) -> PoolCapacity:
    """Return the capacity.

    Without any endpoint it is that of one: requests must not wait for a tier that is down, but fail.
    """
    serving = [one for one in state.endpoints if _serves(one)]
    if not serving:
        return PoolCapacity(1)
    away = sum(one.outstanding for one in state.endpoints if not _serves(one))
    return PoolCapacity(len(serving), away)


def _serves(endpoint: Endpoint) -> bool:
    return endpoint.phase == "active" and not endpoint.slow
