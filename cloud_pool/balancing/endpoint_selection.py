"""Select the endpoint of the next request. Pure: a frozen state, the time, and randomness as an argument.

(1) Candidates are active endpoints that are not excluded; without any, the result is None.
(2) Endpoints in the gateway's own zone, as long as one of them has room; else all.
(3) A slow endpoint on trial gets one request at a time. Hedges and retries skip this step: they have no time for it.
(4) Slow endpoints are left out, unless every other endpoint has more load.
(5) With a prefix key: the endpoint that has the prefix warm, within its load bound.
(6) Else the less loaded of two random endpoints (Mitzenmacher, "The Power of Two Choices", 2001).

Load counts in requests of a typical endpoint of the pool:

    load = (outstanding + 1) × slowness² / ramp

slowness   see `slowness`. Squared, because sharing work by speed alone would still give some callers a first token
           that takes ten times as long.
ramp       from 0.1 to 1 after an endpoint returns, so that a cold cache does not get a full share (slow start).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from .config import LoadBalancingConfig
from .prefix_affinity import RingShare, preferred_endpoint
from .slowness import SLOW, late_after_s, median_ttft_s, slowness
from .state import Endpoint, PoolState

_FIRST_RAMP = 0.1


def choose(
    state: PoolState,
    settings: LoadBalancingConfig,
    *,
    now: float,
    draw: float,
    key: bytes = b"",
    excluding: Collection[str] = (),
    zone: str = "",
) -> Endpoint | None:
    """Select an endpoint by the numbered steps of this module.

    Args:
        draw: A random number in [0, 1).
        key: Prefix key of the request, b"" where prefixes do not count.
        excluding: Addresses that must not be selected.
        zone: The gateway's zone, "" where it has none.

    Returns:
        The endpoint, or None when no active endpoint remains.
    """
    candidates = [one for one in state.endpoints if one.phase == "active" and one.address not in excluding]
    if len(candidates) < 2:
        return candidates[0] if candidates else None  # (1)
    median_s, late_s = median_ttft_s(state, now), late_after_s(state, now)
    slow = {one.address: slowness(one, median_s, late_s, now, settings) for one in candidates}
    loads = {one.address: load(one, slow[one.address], now, settings) for one in candidates}
    if zone:
        near = [one for one in candidates if one.zone == zone and loads[one.address] <= settings.zone_spill_requests]
        candidates = near or candidates  # (2)
    on_trial = next((one for one in candidates if one.trust == "on_trial" and not one.waiting_since), None)
    if on_trial is not None and not excluding:
        return on_trial  # (3)
    usual = [one for one in candidates if slow[one.address] < SLOW]
    least = min((loads[one.address] for one in usual), default=math.inf)
    candidates = [one for one in candidates if slow[one.address] < SLOW or loads[one.address] < least]  # (4)
    if key:
        # A warm prefix saves less than an endpoint loses that is several times slower than the others.
        warm = _warm(state, usual or candidates, key, now, settings)
        if warm is not None:
            return warm  # (5)
    if len(candidates) < 2:
        return candidates[0]
    first, second = draw_two(candidates, draw)
    return first if loads[first.address] <= loads[second.address] else second  # (6)


def draw_two(among: Sequence[Endpoint], draw: float) -> tuple[Endpoint, Endpoint]:
    """Return two different endpoints; each ordered pair is equally likely."""
    others = len(among) - 1
    at, second = divmod(int(draw * len(among) * others), others)
    return among[at], among[second + (second >= at)]


def ramp(endpoint: Endpoint, now: float, settings: LoadBalancingConfig) -> float:
    """Return the share, 0.1 to 1, that the endpoint gets during its slow start."""
    if settings.slow_start_s <= 0.0:
        return 1.0
    return min(1.0, max(_FIRST_RAMP, (now - endpoint.phase_since) / settings.slow_start_s))


def load(endpoint: Endpoint, slow: float, now: float, settings: LoadBalancingConfig) -> float:
    """Return the endpoint's load in requests of a typical endpoint; `slow` is its slowness."""
    return (endpoint.outstanding + 1) * slow**2 / ramp(endpoint, now, settings)


def _warm(
    state: PoolState, among: Sequence[Endpoint], key: bytes, now: float, settings: LoadBalancingConfig
) -> Endpoint | None:
    shares = {one.address: RingShare(one.outstanding, ramp(one, now, settings)) for one in among}
    address = preferred_endpoint((one.address for one in state.members), shares, key, settings.load_factor)
    return next((one for one in among if one.address == address), None)
