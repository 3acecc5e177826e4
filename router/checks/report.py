"""The result of a replay, and its latency estimates, which come from the observed times of each target.

Every list has a fixed order: the same records and policies give the same report.

Requests that stay where they were keep their own times. Requests that move to a target get the times observed there,
weighted by their number. Quantiles of such a weighted sample get Woodruff intervals (R. S. Woodruff, "Confidence
intervals for medians and other position measures", JASA 47, 1952): the standard error of the share below the quantile,
turned back into times. They are deterministic and need no resampling. They express how well the records determine the
estimate, and not whether the target would be as fast under the new load.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Final, Literal

import msgspec

from ..types import AudioKind, DecisionRecord, Kind
from .possible import Place

MIN_OBSERVED: Final = 20  # minimum number of observed times for an estimate
_Z: Final = 1.96  # 95 %


class Interval(msgspec.Struct, frozen=True):
    """An estimate with its 95 % interval, milliseconds."""

    value: float
    low: float
    high: float


class Stratum(msgspec.Struct, frozen=True):
    """Times (ms) observed in one place, and the number of requests that they represent."""

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
    reached = list(accumulate(weight for _, _, weight in points))  # share up to each time

    def position(share: float) -> int:
        """Return the place of the first time at which the share is reached."""
        return min(bisect_left(reached, share - 1e-12), len(points) - 1)

    result = []
    for share in shares:
        below = Counter(index for _, index, _ in points[: position(share) + 1])
        error = _standard_error(strata, below, total)
        value, low, high = (points[position(at)][0] for at in (share, share - _Z * error, share + _Z * error))
        result.append(Interval(round(value, 3), round(low, 3), round(high, 3)))
    return tuple(result)


def _standard_error(strata: Sequence[Stratum], below: Mapping[int, int], total: int) -> float:
    """Return the standard error of the share below a quantile. `below`: each stratum's times up to it."""
    variance = 0.0
    for index, stratum in enumerate(strata):
        observed = len(stratum.times)
        share = below.get(index, 0) / observed
        variance += (stratum.requests / total) ** 2 * share * (1.0 - share) / max(1, observed - 1)
    return math.sqrt(variance)


Cause = Literal["leaves", "may_leave", "unknown"]
"""The reason for which a request counts as leaving the device. - leaves: it goes to the cloud. - may_leave: a cloud
target can now answer it after a failure or a handoff, and none could before. - unknown: whether it leaves depends on a
signal that was not recorded.
"""


class LeavingRequest(msgspec.Struct, frozen=True):
    """A request that stayed on the device, and that would or might leave it."""

    position: int  # position of its record, from 0
    id: str
    created: float  # Unix seconds
    kind: Kind | AudioKind
    client: str
    tags: tuple[str, ...]
    cause: Cause
    before: str  # previous target
    after: str  # new target, or all possible ones
    rule: str  # rule of the new policy
    bound_by: tuple[str, ...]  # constraints, or the client's preference, that kept the request on the device
    hangs_on: tuple[str, ...]


class Move(msgspec.Struct, frozen=True):
    """Requests with the same places and rules before and after. `moved`: False if model and location stay."""

    before: str
    after: str
    rule_before: str
    rule_after: str
    requests: int
    moved: bool


class UnknownOutcome(msgspec.Struct, frozen=True):
    """Requests whose place depends on a value that was not recorded."""

    before: str
    possible: tuple[str, ...]
    hangs_on: tuple[str, ...]
    requests: int


class CostChange(msgspec.Struct, frozen=True):
    """Cost in USD of the same tokens. Unknown outcomes give a range from their lowest to their highest cost."""

    before_usd: float
    after_least_usd: float
    after_most_usd: float


class LatencyRow(msgspec.Struct, frozen=True):
    time: Literal["first token", "whole answer"]
    share: float  # quantile; 0.5 is the median
    before: Interval  # milliseconds
    after: Interval


class LatencyChange(msgspec.Struct, frozen=True):
    """The change in latency, estimated from `requests` with a known outcome. `not_estimated`: requests that move to a
    place with too few observed answers.
    """

    requests: int
    not_estimated: int
    rows: tuple[LatencyRow, ...]


class ObservedTarget(msgspec.Struct, frozen=True):
    """The observed times of a model at a location, ms."""

    at: str
    model: str
    answers: int
    first_token_p50: Interval
    first_token_p95: Interval
    answer_p50: Interval
    answer_p95: Interval


class ReplayReport(msgspec.Struct, frozen=True):
    """The effect that a policy would have had. `leaving`: requests that stayed on the device and would leave it."""

    policy: str  # the new policy, name@revision
    old: str  # the policy it is compared with; "" for what was recorded
    requests: int  # number of replayed records
    undecided: int  # the number of requests that were refused before a decision (rate, queue); they are not replayed
    leaving: tuple[LeavingRequest, ...]
    unchanged: int  # requests that stay where they were
    moves: tuple[Move, ...]  # all known outcomes, those that moved first, largest first
    unknown: tuple[UnknownOutcome, ...]  # unknown outcomes, largest first
    cost: CostChange
    latency: LatencyChange
    targets: tuple[ObservedTarget, ...]


_SHARES = (0.5, 0.95)
_NAMES: tuple[Literal["first token", "whole answer"], ...] = ("first token", "whole answer")

_Key = tuple[str, str]  # location, model
_Times = tuple[list[float], list[float]]  # to the first token, and of the whole answer, ms
_OWN: _Key = ("", "")  # answered where it was recorded: its own times count


class Times:
    """The times of answered requests with a known outcome."""

    def __init__(self) -> None:
        self._observed: defaultdict[_Key, _Times] = defaultdict(lambda: ([], []))
        self._moves: defaultdict[tuple[_Key, _Key], _Times] = defaultdict(lambda: ([], []))

    def add(self, record: DecisionRecord, fact: Place, before: Place | None, after: Place | None) -> None:
        """Add a request. `fact`: the place where it was answered; `before` and `after` are None if unknown."""
        outcome = record.outcome
        if outcome.status != "ok" or outcome.ttft_ms is None:
            return
        if fact.at and len(outcome.attempts) == 1 and outcome.cache != "coalesced":
            _append(self._observed[fact.at, fact.model], outcome.ttft_ms, outcome.total_ms)
        if before is None or after is None:
            return
        keys = tuple(
            [_OWN if place == fact or _same(place, fact) else (place.at, place.model) for place in (before, after)]
        )
        if all(key == _OWN or key[0] for key in keys):
            _append(self._moves[keys[0], keys[1]], outcome.ttft_ms, outcome.total_ms)

    def change(self) -> LatencyChange:
        moves = sorted(self._moves.items())
        known = [(keys, times) for keys, times in moves if all(self._is_estimated(key) for key in keys)]
        requests = sum(len(times[0]) for _, times in known)
        sides = [
            [quantiles(self._strata(known, side, time), _SHARES) for side in (0, 1)] for time in range(len(_NAMES))
        ]
        rows = tuple(
            LatencyRow(name, share, before, after)
            for name, (all_before, all_after) in zip(_NAMES, sides, strict=True)
            for share, before, after in zip(_SHARES, all_before, all_after, strict=False)
        )
        return LatencyChange(requests, sum(len(times[0]) for _, times in moves) - requests, rows)

    def targets(self) -> tuple[ObservedTarget, ...]:
        rows = []
        for (at, model), times in sorted(self._observed.items()):
            found = [one for each in times for one in quantiles((Stratum(each, len(each)),), _SHARES)]
            rows.append(ObservedTarget(at, model, len(times[0]), *found))
        return tuple(rows)

    def _is_estimated(self, key: _Key) -> bool:
        return key == _OWN or (key in self._observed and len(self._observed[key][0]) >= MIN_OBSERVED)

    def _strata(self, known: list[tuple[tuple[_Key, _Key], _Times]], side: int, time: int) -> list[Stratum]:
        own_times: list[float] = []
        moved: defaultdict[_Key, int] = defaultdict(int)
        for keys, times in known:
            if keys[side] == _OWN:
                own_times += times[time]
            else:
                moved[keys[side]] += len(times[time])
        strata = [Stratum(self._observed[key][time], requests) for key, requests in sorted(moved.items())]
        return [Stratum(own_times, len(own_times)), *strata]


def _same(place: Place, fact: Place) -> bool:
    return bool(place.at) and (place.at, place.model) == (fact.at, fact.model)


def _append(times: _Times, first_token_ms: float, whole_ms: float) -> None:
    times[0].append(first_token_ms)
    times[1].append(whole_ms)
