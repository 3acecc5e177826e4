"""The sequential test of this project: how much worse can one arm be than the other, at any look?

The interval is a confidence sequence, valid at all looks together: the normal mixture of Robbins (Annals of
Mathematical Statistics 41, 1970) in the form of Johari, Koomen, Pekelis and Walsh ("Always Valid Inference",
Operations Research 70, 2022), which holds asymptotically for means of any distribution (Waudby-Smith, Arbour, Sinha,
Kennedy and Ramdas, "Time-uniform central limit theory and asymptotic confidence sequences", Annals of Statistics 52,
2024). `fleet.rollout` compares devices with it, `trials` the variants of a model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from .settings import VerdictMetric

FALSE_STOP: Final = 0.01
"""The largest probability that an equal variant is ever stopped, over all metrics and looks."""
PASS_CONFIDENCE: Final = 0.95
EFFECT: Final = 0.05
"""The worsening, as a difference of shares, for which the interval is narrowest."""


class VerdictOutcome(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class ShareDifference:
    """The shares of canary and control, and their difference, canary minus control, with its interval."""

    canary: float
    control: float
    low: float
    high: float

    @property
    def worse_by(self) -> float:
        return self.canary - self.control


def half_width(variance: float, effect: float, confidence: float) -> float:
    """Return half the width of the normal-mixture confidence sequence, √(V (V + τ²) / τ² · ln((V + τ²) / (V α²))), for
    the variance V of the difference at this look, the mixture's standard deviation τ (`effect`; the interval is
    narrowest for differences of about this size), and α, the error probability of all looks together (1 -
    `confidence`).
    """
    mixed = variance + effect**2
    return math.sqrt(variance * mixed / effect**2 * math.log(mixed / (variance * (1 - confidence) ** 2)))


def difference(canary: float, control: float, variance: float, effect: float, confidence: float) -> ShareDifference:
    """Return the difference of two shares with its interval; see `half_width`."""
    half = half_width(variance, effect, confidence)
    return ShareDifference(canary, control, canary - control - half, canary - control + half)


def variance_of_shares(*arms: tuple[float, float]) -> float:
    """Return the variance of a difference of shares of independent requests: events and requests of both sides. One
    event and one other request are added (Agresti and Caffo, The American Statistician 54, 2000), so that it is never
    0.
    """
    smoothed = [((events + 1) / (requests + 2), requests) for events, requests in arms]
    return sum(share * (1 - share) / requests for share, requests in smoothed)


class Tally:
    """Events (a bad answer is 1, a score of 0.7 is 0.3) and answers of one arm by group of units, so that the answers
    of one user or conversation may depend on each other: a unit is always in the same group.
    """

    GROUPS: Final = 64

    def __init__(self, events: list[float] | None = None, answers: list[float] | None = None) -> None:
        self.events = [0.0] * self.GROUPS if events is None else events
        self.answers = [0.0] * self.GROUPS if answers is None else answers

    def add(self, group: int, event: float, answers: float = 1.0) -> None:
        """Count an answer of a group; `event` is 0 to `answers`, the higher the worse."""
        self.events[group] += event
        self.answers[group] += answers

    @property
    def total(self) -> tuple[float, float]:
        """Events and answers of all groups."""
        return sum(self.events), sum(self.answers)

    @property
    def dispersion(self) -> float:
        """The variance between groups, as a multiple of that of independent answers; 0 if every answer is alike."""
        events, answers = self.total
        share = events / answers
        if not (expected := answers * share * (1 - share)):
            return 0.0
        used = sum(count > 0 for count in self.answers)
        pairs = zip(self.events, self.answers, strict=True)
        return sum((event - share * count) ** 2 for event, count in pairs) / expected * used / max(1, used - 1)


@dataclass(frozen=True, slots=True)
class MetricVerdict:
    """The verdict on one metric of a variant."""

    metric: str
    outcome: VerdictOutcome
    reason: str


def judge_metric(variant: Tally, baseline: Tally, metric: VerdictMetric, least: int, metrics: int) -> MetricVerdict:
    """Judge a metric of a variant against the `baseline` that it may replace, over the same time.

    1. Either arm has fewer than `least` answers: inconclusive.
    2. The variant is worse by more than the margin, and worse with a confidence that spends `FALSE_STOP` evenly over
       the `metrics`: fail.
    3. It is worse by at most the margin with `PASS_CONFIDENCE`: pass.
    4. Otherwise inconclusive.

    The variance is that of independent answers, times the larger dispersion that the groups of both arms show.
    """
    (events, answers), (other_events, others) = variant.total, baseline.total
    if min(answers, others) < least:  # (1)
        text = f"{metric.name}: {answers:.0f} answers, the baseline {others:.0f}; both need {least}"
        return MetricVerdict(metric.name, VerdictOutcome.INCONCLUSIVE, text)
    dispersion = max(1.0, variant.dispersion, baseline.dispersion)
    variance = dispersion * variance_of_shares((events, answers), (other_events, others))
    shares = events / answers, other_events / others
    spent = difference(*shares, variance, EFFECT, 1 - FALSE_STOP / metrics)
    text = f"{metric.name}: {shares[0]:.2%} of {answers:.0f} answers, the baseline {shares[1]:.2%}"
    if spent.worse_by > metric.margin and spent.low > 0:  # (2)
        return MetricVerdict(metric.name, VerdictOutcome.FAIL, f"{text}; worse by more than {metric.margin:.1%}")
    high = difference(*shares, variance, EFFECT, PASS_CONFIDENCE).high
    return MetricVerdict(
        metric.name, VerdictOutcome.PASS if high <= metric.margin else VerdictOutcome.INCONCLUSIVE, text
    )  # (3), (4)
