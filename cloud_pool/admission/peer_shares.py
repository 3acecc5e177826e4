"""The places of a tier that several gateways stand before: together they hand over what its Tritons can take. Pure.

Each is told what all of them have to do. Their places are divided so that nobody has more than it asks for while
another has less (max-min fairness), what nobody asks for in equal parts. Each keeps at least half of an equal part, so
that what comes to it between two looks has somewhere to go.
"""

from __future__ import annotations

from collections.abc import Mapping


def divide_permits(places: int, demands: Mapping[str, float]) -> dict[str, int]:
    """By the gateway's name; they add up to `places`, or are 1 each where there are more gateways than places."""
    if places <= len(demands):
        return dict.fromkeys(demands, 1)
    least = max(1.0, places / (2 * len(demands)))
    hints = {name: max(least, demand) for name, demand in demands.items()}
    left, given = float(places), {}
    for at, name in enumerate(sorted(hints, key=lambda one: (hints[one], one))):
        given[name] = min(hints[name], left / (len(hints) - at))
        left -= given[name]
    return _whole({name: part + left / len(given) for name, part in given.items()}, places)


def _whole(given: Mapping[str, float], places: int) -> dict[str, int]:
    """Rounded down, and one more for those with the largest remainders, of equals by name: all come to the same."""
    whole = {name: int(part) for name, part in given.items()}
    order = sorted(given, key=lambda name: (round(whole[name] - given[name], 6), name))
    for name in order[: places - sum(whole.values())]:
        whole[name] += 1
    return whole
