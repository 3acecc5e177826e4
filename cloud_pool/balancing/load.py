"""How much work an endpoint has, in requests of a usual endpoint of its pool. Pure.

    load = (outstanding + 1) × slowness² / ramp

slowness   see `slowness`. Squared: work that is shared by speed alone would still give some callers a first token
           that takes ten times as long
ramp       from a tenth to 1 after its return: a cold cache does not get a full share (slow start)
"""

from __future__ import annotations

from .config import LoadBalancingConfig
from .state import Endpoint

_FIRST_RAMP = 0.1


def ramp(endpoint: Endpoint, now: float, settings: LoadBalancingConfig) -> float:
    if settings.slow_start_s <= 0.0:
        return 1.0
    return min(1.0, max(_FIRST_RAMP, (now - endpoint.since) / settings.slow_start_s))


def load(endpoint: Endpoint, slow: float, now: float, settings: LoadBalancingConfig) -> float:
    """`slow` is its slowness."""
    return (endpoint.outstanding + 1) * slow**2 / ramp(endpoint, now, settings)
