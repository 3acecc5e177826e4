"""Who gets the next request. Pure: a frozen state, the time, and chance as an argument.

(1) Those that take requests and are not excluded; none of them: nobody.
(2) Those of the gateway's own zone, as long as one of them has room; else all.
(3) Who was slow and is to show that it is no more, by one request at a time. Hedges and retries have no time for it.
(4) Of those without the slow ones; one that is slow only while all others have more load than it.
(5) With a key, and where prefixes count: the one that has it warm, within its bound.
(6) Else the less loaded of two that are drawn (Mitzenmacher, "The Power of Two Choices", 2001).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from .config import LoadBalancingConfig
from .load import load, ramp
from .prefix_affinity import RingShare, preferred_endpoint
from .slowness import SLOW, late_s, median_ttft_s, slowness
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
    """`draw` is in [0, 1); `key` is b"" where prefixes do not count; `zone` is the gateway's, "" where none is."""
    open_to = [one for one in state.endpoints if one.phase == "in" and one.address not in excluding]
    if len(open_to) < 2:
        return open_to[0] if open_to else None  # (1)
    median_s, late = median_ttft_s(state, now), late_s(state, now)
    slow = {one.address: slowness(one, median_s, late, now, settings) for one in open_to}
    loads = {one.address: load(one, slow[one.address], now, settings) for one in open_to}
    if zone:
        near = [one for one in open_to if one.zone == zone and loads[one.address] <= settings.zone_spill_requests]
        open_to = near or open_to  # (2)
    tried = next((one for one in open_to if one.trust == "tried" and not one.waiting), None)
    if tried is not None and not excluding:
        return tried  # (3)
    usual = [one for one in open_to if slow[one.address] < SLOW]
    least = min((loads[one.address] for one in usual), default=math.inf)
    open_to = [one for one in open_to if slow[one.address] < SLOW or loads[one.address] < least]  # (4)
    if key:
        # A warm prefix saves less than an endpoint loses that is several times slower than the others.
        warm = _warm(state, usual or open_to, key, now, settings)
        if warm is not None:
            return warm  # (5)
    if len(open_to) < 2:
        return open_to[0]
    one, other = draw_two(open_to, draw)
    return one if loads[one.address] <= loads[other.address] else other  # (6)


def draw_two(among: Sequence[Endpoint], draw: float) -> tuple[Endpoint, Endpoint]:
    """Two different ones; each ordered pair is as likely as any other."""
    others = len(among) - 1
    at, second = divmod(int(draw * len(among) * others), others)
    return among[at], among[second + (second >= at)]


def _warm(
    state: PoolState, among: Sequence[Endpoint], key: bytes, now: float, settings: LoadBalancingConfig
) -> Endpoint | None:
    shares = {one.address: RingShare(one.outstanding, ramp(one, now, settings)) for one in among}
    address = preferred_endpoint((one.address for one in state.members), shares, key, settings.load_factor)
    return next((one for one in among if one.address == address), None)
