"""Select the endpoint of the next request. Pure: a frozen state, the time, and randomness as an argument.

(1) Candidates are active endpoints that are not excluded; without any, the result is None.
(2) Endpoints in the gateway's own zone, as long as one of them has room; else all.
(3) A slow endpoint on trial gets one request at a time. Retries skip this step: they have no time for it.
(4) Slow endpoints are left out, unless every other endpoint has more load.
(5) With a prefix key: the endpoint that has the prefix warm, within its load bound.
(6) Else the less loaded of two random endpoints (Mitzenmacher, "The Power of Two Choices", 2001).

Load counts in requests of a typical endpoint of the pool:

    load = (outstanding + 1) × slowness²

`slowness` is squared, because sharing work by speed alone would still give some callers a first token that takes ten
times as long. An endpoint that is new or returns gets its share at once: if it is cold, its slowness shows it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from .config import LoadBalancingConfig
from .prefix_affinity import preferred_endpoint
from .slowness import SLOW, late_after_s, median_ttft_s, slowness
from .state import Endpoint, PoolState


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
    loads = {one.address: (one.outstanding + 1) * slow[one.address] ** 2 for one in candidates}
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
        warm = _warm(state, usual or candidates, key, settings.load_factor)
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


def _warm(state: PoolState, among: Sequence[Endpoint], key: bytes, factor: float) -> Endpoint | None:
    loads = {one.address: one.outstanding for one in among}
    address = preferred_endpoint((one.address for one in state.members), loads, key, factor)
    return next((one for one in among if one.address == address), None)
