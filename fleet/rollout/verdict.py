"""The verdict on a stage at one look: pass, fail or inconclusive, from canary and control over the same time.

The verdict "fail" uses a randomisation test: are the canary's devices worse than a random draw of devices would be? The
salt of a rollout assigns devices to the canary at random. If the new bundle changes nothing, the canary is therefore a
simple random sample of the judged devices, however much devices differ, fail together by site, or send requests in
bursts. That is Fisher's test (Fisher, The Design of Experiments, 1935; Lehmann and Romano, Testing Statistical
Hypotheses, 2005, section 15.2): exact for any number of devices, with no model of how errors occur. A test that counts
requests as independent would abort good rollouts, because the errors of one device come together.

The verdict "pass" uses an interval: how much worse can the canary be than the control, at any look? Devices are the
unit, not requests: the variance is that of a ratio of sums over devices (Cochran, Sampling Techniques, 1977, section
6.3; Deng, Knoblich and Lu, "Applying the Delta Method in Metric Analytics", KDD 2018). The interval
is the confidence sequence of `router.variants.verdict`, valid at all looks together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from causeway_server.router.bundle.manifest import binomial_tail, log_choose
from causeway_server.router.variants.verdict import ShareDifference, VerdictOutcome, difference, variance_of_shares

from .settings import LATENCY, MetricLimit, RolloutSettings

UPPER_WHOLE = (0.5, 0.25, 0.1, 0.05, 0.01)
"""The fractions of worst devices tested (half, quarter, …), for a small harm to many or a large one to few."""
ROLLED_BACK, SILENT = "rolled_back", "silent"


def sampling_tail(marked: int, drawn: int, found: int, total: int) -> float:
    """Return the probability that `drawn` of `total` devices contain at least `found` of the `marked` ones.

    This is the upper tail of the hypergeometric distribution; 1 if `found` is at most the expected number.
    """
    if found * total <= marked * drawn:
        return 1.0
    if found > min(marked, drawn):
        return 0.0
    log_term = log_choose(marked, found) + log_choose(total - marked, drawn - found) - log_choose(total, drawn)
    # Beyond the expected number each term is smaller than the previous one.
    tail, ratio = 0.0, 1.0
    for count in range(found, min(marked, drawn) + 1):
        tail += ratio
        ratio *= (marked - count) * (drawn - count) / ((count + 1) * (total - marked - drawn + count + 1))
        if ratio < 1e-16 * tail:
            break
    return min(1.0, math.exp(log_term) * tail)


def randomisation_p(canary: NDArray[np.float64], control: NDArray[np.float64]) -> float:
    """Return the p-value of "the canary's scores are a random draw from all scores", against larger ones.

    The number of canary devices among the worst half, quarter and so on of all devices is compared with its exact
    distribution. Thresholds are order statistics of all scores together, which do not depend on the assignment; the
    smallest p-value is multiplied by the number of different thresholds (Bonferroni). It is 1 if a side has no devices.

    Args:
        canary, control: Float64 [devices], one score a device; larger is worse.
    """
    if not canary.size or not control.size:
        return 1.0
    pooled = np.concatenate([canary, control])
    # The score at each rank. Ties are left out of the upper part, so a share of 0.01 can mark fewer devices, or none.
    ranks = [min(pooled.size - 1, math.floor(pooled.size * (1 - upper))) for upper in UPPER_WHOLE]
    thresholds = {float(score) for score in np.partition(pooled, ranks)[ranks]}
    thresholds |= {float(np.nextafter(score, -np.inf)) for score in thresholds}
    smallest = min(
        sampling_tail(int((pooled > score).sum()), canary.size, int((canary > score).sum()), pooled.size)
        for score in thresholds
    )
    return min(1.0, len(thresholds) * smallest)


def difference_of_shares(
    canary: tuple[NDArray[np.int64], NDArray[np.int64]],
    control: tuple[NDArray[np.int64], NDArray[np.int64]],
    effect: float,
    confidence: float,
) -> ShareDifference:
    """Compare the share of events among requests between devices of the canary and of the control.

    Args:
        canary, control: (events, requests), each int64 [devices] with at least one device and one request.
        effect, confidence: See `half_width`.
    """
    share, other = (float(events.sum() / requests.sum()) for events, requests in (canary, control))
    return difference(share, other, _variance(canary, control), effect, confidence)


def _variance(*arms: tuple[NDArray[np.int64], NDArray[np.int64]]) -> float:
    """Return the larger of two variances: between devices, and of independent requests."""
    devices = sum(events.size for events, _ in arms)
    # One variance for both arms, as under the null hypothesis, because a canary of few devices could not estimate its
    # own.
    squares = sum(float(((events - events.sum() / requests.sum() * requests) ** 2).sum()) for events, requests in arms)
    of_a_device = squares / max(1, devices - len(arms))
    between = sum(events.size * of_a_device / float(requests.sum()) ** 2 for events, requests in arms)
    counts = ((float(events.sum()), float(requests.sum())) for events, requests in arms)
    return max(between, variance_of_shares(*counts))


@dataclass(frozen=True, slots=True)
class Observations:
    """The devices of canary or control, over the time since the previous look.

    The canary has the reachable members, counted under the new bundle. The control has the devices outside the share
    that were reachable when the stage began, counted over the same time. Cloned, pinned and held ones are in neither.
    """

    requests: NDArray[np.int64]  # int64 [devices]
    events: dict[str, NDArray[np.int64]]  # requests with the event, for each counted metric, int64 [devices]
    latency: NDArray[np.int64]  # by latency bucket, int64 [devices, buckets], with the same bounds on all devices
    silent: NDArray[np.bool_]  # bool [devices], seen before the stage and not since `silence_s`
    rolled_back: int = 0  # number of devices whose own trial rolled the bundle back; 0 for the control
    pending: int = 0  # reachable members that may change now, but have neither run nor rolled back; 0 for the control

    @property
    def devices(self) -> int:
        return int(self.requests.size)


@dataclass(frozen=True, slots=True)
class MetricVerdict:
    """The verdict on a metric: its outcome, the shares with their interval, the p-value, and the level of this look."""

    name: str
    outcome: VerdictOutcome
    reason: str
    difference: ShareDifference | None = None
    p: float = 1.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a stage: the outcome, and the verdict on each metric."""

    outcome: VerdictOutcome
    metrics: tuple[MetricVerdict, ...] = field(default=())

    @property
    def reasons(self) -> tuple[str, ...]:
        """The reasons of the metrics with this outcome."""
        return tuple(metric.reason for metric in self.metrics if metric.outcome is self.outcome)


def judge(canary: Observations, control: Observations, settings: RolloutSettings, level: float) -> Verdict:
    """Judge a stage.

    1. Any metric fails: fail. A metric fails if it is worse by more than its margin and a random draw of devices would
       be as bad with a probability of at most `level` (see `RolloutSettings.level`).
    2. All metrics pass, and a quorum of members has the bundle: pass. A metric passes if the upper end of its interval
       is within the margin.
    3. Otherwise inconclusive: too little data, or a result in between.

    Without a control (the last stage of 100 %, and the soak) only devices that roll back or go silent are judged.
    """
    metrics = [_rolled_back(canary, settings, level), _silent(canary, control, settings, level)]
    if control.devices:
        metrics += [_metric(canary, control, limit, settings, level) for limit in settings.metrics]
    metrics.append(_quorum(canary, settings))
    outcomes = {metric.outcome for metric in metrics}
    for outcome in (VerdictOutcome.FAIL, VerdictOutcome.INCONCLUSIVE):  # (1), (3)
        if outcome in outcomes:
            return Verdict(outcome, tuple(metrics))
    return Verdict(VerdictOutcome.PASS, tuple(metrics))  # (2)


def _rolled_back(canary: Observations, settings: RolloutSettings, level: float) -> MetricVerdict:
    """Judge the devices that rolled back against trials that fail by chance; the control never does."""
    tried, failed = canary.devices + canary.rolled_back, canary.rolled_back
    share = failed / tried if tried else 0.0
    p = binomial_tail(tried, failed, settings.false_rollback)
    margin = settings.false_rollback + settings.lost_margin
    text = f"{failed} of {tried} devices rolled back"
    return _decide(ROLLED_BACK, text, share, share, margin, ShareDifference(share, 0.0, share, share), p, level)


def _silent(canary: Observations, control: Observations, settings: RolloutSettings, level: float) -> MetricVerdict:
    lost, drawn, total = int(canary.silent.sum()), canary.devices, canary.devices + control.devices
    share = lost / drawn if drawn else 0.0
    other = float(control.silent.mean()) if control.devices else 0.0
    p = sampling_tail(lost + int(control.silent.sum()), drawn, lost, total) if control.devices else 1.0
    text = f"{lost} of {drawn} devices went silent" + (f" ({other:.1%} of the control)" if control.devices else "")
    worse = share - other
    return _decide(
        SILENT, text, worse, worse, settings.lost_margin, ShareDifference(share, other, worse, worse), p, level
    )


def _metric(
    canary: Observations, control: Observations, limit: MetricLimit, settings: RolloutSettings, level: float
) -> MetricVerdict:
    active, others = (side.requests >= settings.least_requests for side in (canary, control))
    if not active.any() or not others.any():
        return MetricVerdict(
            limit.name, VerdictOutcome.INCONCLUSIVE, f"{limit.name}: too few devices with requests to compare"
        )
    bound = _quantile_bucket(control.latency[others], limit.quantile)
    sides = [
        (_events(side, limit.name, bound)[kept], side.requests[kept])
        for side, kept in ((canary, active), (control, others))
    ]
    difference = difference_of_shares(sides[0], sides[1], limit.margin, settings.confidence)
    p = randomisation_p(*(events / requests for events, requests in sides))
    text = f"{limit.name}: {difference.canary:.2%} on {int(active.sum())} devices, control {difference.control:.2%}"
    return _decide(limit.name, text, difference.worse_by, difference.high, limit.margin, difference, p, level)


def _quorum(canary: Observations, settings: RolloutSettings) -> MetricVerdict:
    members = canary.devices + canary.rolled_back + canary.pending
    done = members - canary.pending
    outcome = VerdictOutcome.PASS if done and done >= settings.quorum * members else VerdictOutcome.INCONCLUSIVE
    return MetricVerdict("quorum", outcome, f"{done} of {members} reachable members have the bundle")


def _decide(
    name: str,
    text: str,
    worse_by: float,
    at_most: float,
    margin: float,
    difference: ShareDifference,
    p: float,
    level: float,
) -> MetricVerdict:
    if worse_by > margin and p <= level:
        return MetricVerdict(
            name, VerdictOutcome.FAIL, f"{text}; worse by more than {margin:.1%} (p {p:.1g})", difference, p
        )
    outcome = VerdictOutcome.PASS if at_most <= margin else VerdictOutcome.INCONCLUSIVE
    return MetricVerdict(name, outcome, text, difference, p)


def _quantile_bucket(latency: NDArray[np.int64], quantile: float) -> int:
    """Return the first latency bucket above the control's quantile."""
    counts = latency.sum(axis=0)
    return int(np.searchsorted(np.cumsum(counts), quantile * counts.sum())) + 1


def _events(side: Observations, name: str, bound: int) -> NDArray[np.int64]:
    if name == LATENCY:
        return np.asarray(side.latency[:, bound:].sum(axis=1), dtype=np.int64)
    return side.events[name]
