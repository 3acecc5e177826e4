"""Collects the times of replayed requests by where they are answered before and after."""

from __future__ import annotations

from collections import defaultdict
from typing import Literal

from ...types import DecisionRecord
from .expected import Place
from .latency import LEAST_OBSERVED, Interval, Stratum, quantiles
from .report import LatencyChange, LatencyRow, ObservedTarget

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
        """Add one request. `fact`: where it was answered; `before` and `after` None: not known."""
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
        return tuple(
            ObservedTarget(at, model, len(times[0]), *self._both(times[0]), *self._both(times[1]))
            for (at, model), times in sorted(self._observed.items())
        )

    def _both(self, times: list[float]) -> tuple[Interval, Interval]:
        first, second = quantiles((Stratum(times, len(times)),), _SHARES)
        return first, second

    def _is_estimated(self, key: _Key) -> bool:
        return key == _OWN or (key in self._observed and len(self._observed[key][0]) >= LEAST_OBSERVED)

    def _strata(self, known: list[tuple[tuple[_Key, _Key], _Times]], side: int, time: int) -> list[Stratum]:
        own: list[float] = []
        moved: defaultdict[_Key, int] = defaultdict(int)
        for keys, times in known:
            if keys[side] == _OWN:
                own += times[time]
            else:
                moved[keys[side]] += len(times[time])
        strata = [Stratum(self._observed[key][time], requests) for key, requests in sorted(moved.items())]
        return [Stratum(own, len(own)), *strata]


def _same(place: Place, fact: Place) -> bool:
    return bool(place.at) and (place.at, place.model) == (fact.at, fact.model)


def _append(times: _Times, first_token_ms: float, whole_ms: float) -> None:
    times[0].append(first_token_ms)
    times[1].append(whole_ms)
