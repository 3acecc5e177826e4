"""Estimated latency: what each target was observed to take, in the proportions of a policy, with intervals.

Requests that stay where they were keep their own times. For each target that others move to, the times observed there
stand for them with the weight of the requests that move. Quantiles of such a weighted sample get Woodruff intervals
(R. S. Woodruff, "Confidence intervals for medians and other position measures", JASA 47, 1952): the standard error of
the share below the quantile, turned back into times. They are deterministic, need no resampling, and say how well the
records determine the estimate, not whether the target would be as fast under the new load.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec

LEAST_OBSERVED: Final = 20  # times of a target from which it is estimated
_Z: Final = 1.96  # 95 %


class Interval(msgspec.Struct, frozen=True):
    """An estimate with its 95 % interval, milliseconds."""

    value: float
    low: float
    high: float


class Stratum(msgspec.Struct, frozen=True):
    """Times (ms) that were observed in one place, and the number of requests that they stand for."""

    times: Sequence[float]
    requests: int


def quantiles(strata: Sequence[Stratum], shares: Sequence[float]) -> tuple[Interval, ...]:
    """Return the quantile of the mixture at each share (0.5 is the median), with its interval; () without times."""
    strata = [stratum for stratum in strata if stratum.times and stratum.requests]
    total = sum(stratum.requests for stratum in strata)
    if not total:
        return ()
    points = sorted(
        (time, index, stratum.requests / len(stratum.times) / total)
        for index, stratum in enumerate(strata)
        for time in stratum.times
    )
    below = [0] * len(strata)  # number of times of each stratum up to here
    reached = 0.0
    curve: list[tuple[float, float]] = []  # (share up to here, time)
    at: dict[float, list[int]] = {}
    left = list(shares)
    for time, index, weight in points:
        reached += weight
        below[index] += 1
        curve.append((reached, time))
        while left and reached >= left[0] - 1e-12:
            at[left.pop(0)] = list(below)
    result = []
    for share in shares:
        error = _standard_error(strata, at.get(share, below), total)
        value, low, high = (_time_at(curve, point) for point in (share, share - _Z * error, share + _Z * error))
        result.append(Interval(round(value, 3), round(low, 3), round(high, 3)))
    return tuple(result)


def _standard_error(strata: Sequence[Stratum], below: Sequence[int], total: int) -> float:
    """Return the standard error of the share below a quantile, of a stratified sample."""
    variance = 0.0
    for stratum, count in zip(strata, below, strict=True):
        observed = len(stratum.times)
        share = count / observed
        variance += (stratum.requests / total) ** 2 * share * (1.0 - share) / max(1, observed - 1)
    return math.sqrt(variance)


def _time_at(curve: Sequence[tuple[float, float]], share: float) -> float:
    """Return the first time at which the share is reached."""
    low, high = 0, len(curve) - 1
    while low < high:
        middle = (low + high) // 2
        if curve[middle][0] >= share - 1e-12:
            high = middle
        else:
            low = middle + 1
    return curve[low][1]
