"""The test behind a verdict of fail: are the canary's boxes worse than a random draw of boxes would be?

The salt of a rollout assigns boxes to the canary at random. If the new bundle changes nothing, the canary is therefore
a simple random sample of the judged boxes, however much boxes differ, fail together by site, or send requests in
bursts. That is Fisher's randomisation test (Fisher, The Design of Experiments, 1935; Lehmann and Romano, Testing
Statistical Hypotheses, 2005, section 15.2): exact for any number of boxes, with no model of how errors occur. A test
that counts requests as independent would abort good rollouts, because the errors of one box come together.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

UPPER_WHOLE = (0.5, 0.25, 0.1, 0.05, 0.01)
"""The worst half of all boxes, their worst quarter and so on: a small harm to all boxes, or a large one to a few."""


def sampling_tail(marked: int, drawn: int, found: int, total: int) -> float:
    """Return the probability that a draw without replacement holds at least `found` marked boxes.

    The upper tail of the hypergeometric distribution; 1 where `found` is no more than expected.

    Args:
        marked: Marked boxes among all.
        drawn: Boxes in the draw.
        found: Marked boxes in the draw.
        total: All boxes.
    """
    if found * total <= marked * drawn:
        return 1.0
    if found > min(marked, drawn):
        return 0.0
    log_term = _log_choose(marked, found) + _log_choose(total - marked, drawn - found) - _log_choose(total, drawn)
    # Beyond the expected number each term is smaller than the one before.
    tail, ratio = 0.0, 1.0
    for count in range(found, min(marked, drawn) + 1):
        tail += ratio
        ratio *= (marked - count) * (drawn - count) / ((count + 1) * (total - marked - drawn + count + 1))
        if ratio < 1e-16 * tail:
            break
    return min(1.0, math.exp(log_term) * tail)


def binomial_tail(trials: int, found: int, probability: float) -> float:
    """Return the probability of at least `found` successes, 1 where `found` is no more than expected."""
    if found <= trials * probability:
        return 1.0
    log_term = _log_choose(trials, found) + found * math.log(probability) + (trials - found) * math.log1p(-probability)
    tail, ratio, odds = 0.0, 1.0, probability / (1 - probability)
    for count in range(found, trials + 1):
        tail += ratio
        ratio *= (trials - count) / (count + 1) * odds
        if ratio < 1e-16 * tail:
            break
    return min(1.0, math.exp(log_term) * tail)


def randomisation_p(canary: NDArray[np.float64], control: NDArray[np.float64]) -> float:
    """Return the p-value of "the canary's scores are a random draw from all scores", against larger ones.

    Counts how many boxes of the canary are among the worst half, quarter, ... of all boxes, and compares each count
    with its exact distribution. Thresholds are order statistics of all scores together, which do not depend on the
    assignment; the smallest p-value is multiplied by the number of different thresholds (Bonferroni).

    Args:
        canary: float64 [boxes], one score a box; larger is worse.
        control: float64 [boxes].

    Returns:
        The p-value; 1 if either side has no boxes.
    """
    if not canary.size or not control.size:
        return 1.0
    pooled = np.concatenate([canary, control])
    # The score at each rank; ties stay out of the upper part, so that a share of 0.01 can mark fewer boxes, or none.
    ranks = [min(pooled.size - 1, math.floor(pooled.size * (1 - upper))) for upper in UPPER_WHOLE]
    thresholds = {float(score) for score in np.partition(pooled, ranks)[ranks]}
    thresholds |= {float(np.nextafter(score, -np.inf)) for score in thresholds}
    smallest = min(
        sampling_tail(int((pooled > score).sum()), canary.size, int((canary > score).sum()), pooled.size)
        for score in thresholds
    )
    return min(1.0, len(thresholds) * smallest)


def _log_choose(whole: int, part: int) -> float:
    return math.lgamma(whole + 1) - math.lgamma(part + 1) - math.lgamma(whole - part + 1)
