"""The verdict on a stage at one look: pass, fail or inconclusive, from canary and control over the same time."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from .interval import Difference, difference_of_shares
from .randomisation import binomial_tail, randomisation_p, sampling_tail
from .settings import LATENCY, MetricLimit, RolloutSettings

ROLLED_BACK, SILENT = "rolled_back", "silent"


class Outcome(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class Observations:
    """One side's boxes, over the time since the look before.

    Canary: reachable members, counted under the new bundle. Control: boxes outside the share that were reachable when
    the stage began, counted over the same time. Cloned, pinned and held boxes are in neither.

    Attributes:
        requests: int64 [boxes].
        events: For each counted metric the requests that had it, int64 [boxes].
        latency: Requests by latency bucket, int64 [boxes, buckets], with the same bounds on all boxes.
        silent: bool [boxes], seen before the stage and not since `silence_s`.
        rolled_back: Boxes whose own trial undid the bundle; 0 for the control.
        pending: Reachable members that may change now and neither run the bundle nor rolled it back; 0 for the control.
    """

    requests: NDArray[np.int64]
    events: dict[str, NDArray[np.int64]]
    latency: NDArray[np.int64]
    silent: NDArray[np.bool_]
    rolled_back: int = 0
    pending: int = 0

    @property
    def boxes(self) -> int:
        return int(self.requests.size)


@dataclass(frozen=True, slots=True)
class MetricVerdict:
    """One metric: its outcome, the shares with their interval, the p-value against the level of this look."""

    name: str
    outcome: Outcome
    reason: str
    difference: Difference | None = None
    p: float = 1.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome, and what each metric had to say."""

    outcome: Outcome
    metrics: tuple[MetricVerdict, ...] = field(default=())

    @property
    def reasons(self) -> tuple[str, ...]:
        """The reasons of the metrics that decided: those with this outcome."""
        return tuple(metric.reason for metric in self.metrics if metric.outcome is self.outcome)


def judge(canary: Observations, control: Observations, settings: RolloutSettings, level: float) -> Verdict:
    """Judge a stage.

    1. Any metric fails: fail. A metric fails if it is worse by more than its margin and a random draw of boxes would
       be as bad with a probability of at most `level`.
    2. All metrics pass, and the quorum of members has taken the bundle: pass. A metric passes if the upper end of its
       interval is within the margin.
    3. Else inconclusive: too little data, or in between.

    Without a control (the last stage of 100 %, and the soak) only boxes that roll back or go silent are judged.

    Args:
        canary: The members.
        control: The boxes that stay as they are, with no boxes if there are none.
        settings: Of the cohort.
        level: Error probability that each test may spend, `RolloutSettings.level`.
    """
    metrics = [_rolled_back(canary, settings, level), _silent(canary, control, settings, level)]
    if control.boxes:
        metrics += [_metric(canary, control, limit, settings, level) for limit in settings.metrics]
    metrics.append(_quorum(canary, settings))
    outcomes = {metric.outcome for metric in metrics}
    for outcome in (Outcome.FAIL, Outcome.INCONCLUSIVE):  # (1), (3)
        if outcome in outcomes:
            return Verdict(outcome, tuple(metrics))
    return Verdict(Outcome.PASS, tuple(metrics))  # (2)


def _rolled_back(canary: Observations, settings: RolloutSettings, level: float) -> MetricVerdict:
    """A control box cannot roll back, so the comparison is with the share of trials that fail by chance."""
    tried, failed = canary.boxes + canary.rolled_back, canary.rolled_back
    share = failed / tried if tried else 0.0
    p = binomial_tail(tried, failed, settings.false_rollback)
    margin = settings.false_rollback + settings.lost_margin
    text = f"{failed} of {tried} boxes rolled back"
    return _decide(ROLLED_BACK, text, share, share, margin, Difference(share, 0.0, share, share), p, level)


def _silent(canary: Observations, control: Observations, settings: RolloutSettings, level: float) -> MetricVerdict:
    lost, drawn, total = int(canary.silent.sum()), canary.boxes, canary.boxes + control.boxes
    share = lost / drawn if drawn else 0.0
    other = float(control.silent.mean()) if control.boxes else 0.0
    p = sampling_tail(lost + int(control.silent.sum()), drawn, lost, total) if control.boxes else 1.0
    text = f"{lost} of {drawn} boxes went silent" + (f" ({other:.1%} of the control)" if control.boxes else "")
    worse = share - other
    return _decide(SILENT, text, worse, worse, settings.lost_margin, Difference(share, other, worse, worse), p, level)


def _metric(
    canary: Observations, control: Observations, limit: MetricLimit, settings: RolloutSettings, level: float
) -> MetricVerdict:
    active, others = (side.requests >= settings.least_requests for side in (canary, control))
    if not active.any() or not others.any():
        return MetricVerdict(limit.name, Outcome.INCONCLUSIVE, f"{limit.name}: too few boxes with requests to compare")
    bound = _quantile_bucket(control.latency[others], limit.quantile)
    sides = [
        (_events(side, limit.name, bound)[kept], side.requests[kept])
        for side, kept in ((canary, active), (control, others))
    ]
    difference = difference_of_shares(sides[0], sides[1], limit.margin, settings.confidence)
    p = randomisation_p(*(events / requests for events, requests in sides))
    text = f"{limit.name}: {difference.canary:.2%} on {int(active.sum())} boxes, control {difference.control:.2%}"
    return _decide(limit.name, text, difference.worse_by, difference.high, limit.margin, difference, p, level)


def _quorum(canary: Observations, settings: RolloutSettings) -> MetricVerdict:
    members = canary.boxes + canary.rolled_back + canary.pending
    done = members - canary.pending
    outcome = Outcome.PASS if done and done >= settings.quorum * members else Outcome.INCONCLUSIVE
    return MetricVerdict("quorum", outcome, f"{done} of {members} reachable members have the bundle")


def _decide(
    name: str, text: str, worse_by: float, at_most: float, margin: float, difference: Difference, p: float, level: float
) -> MetricVerdict:
    if worse_by > margin and p <= level:
        return MetricVerdict(name, Outcome.FAIL, f"{text}; worse by more than {margin:.1%} (p {p:.1g})", difference, p)
    outcome = Outcome.PASS if at_most <= margin else Outcome.INCONCLUSIVE
    return MetricVerdict(name, outcome, text, difference, p)


def _quantile_bucket(latency: NDArray[np.int64], quantile: float) -> int:
    """The first bucket that lies beyond the control's quantile."""
    counts = latency.sum(axis=0)
    return int(np.searchsorted(np.cumsum(counts), quantile * counts.sum())) + 1


def _events(side: Observations, name: str, bound: int) -> NDArray[np.int64]:
    if name == LATENCY:
        return np.asarray(side.latency[:, bound:].sum(axis=1), dtype=np.int64)
    return side.events[name]
