"""Who gets the next request. Pure: a frozen state, and chance as an argument."""

from __future__ import annotations

from collections.abc import Collection

from .state import Endpoint, PoolState


def choose(state: PoolState, draw: float, excluding: Collection[str] = ()) -> Endpoint | None:
    """The less loaded of two drawn at random (Mitzenmacher 2001). `draw` is in [0, 1). None: nobody can take it."""
    open_to = [one for one in state.endpoints if one.phase == "in" and one.address not in excluding]
    if len(open_to) < 2:
        return open_to[0] if open_to else None
    one, other = two_of(open_to, draw)
    return one if one.outstanding <= other.outstanding else other


def two_of(among: list[Endpoint], draw: float) -> tuple[Endpoint, Endpoint]:
    """Two different ones; each ordered pair is as likely as any other."""
    others = len(among) - 1
    at, second = divmod(int(draw * len(among) * others), others)
    return among[at], among[second + (second >= at)]
