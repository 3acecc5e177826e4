"""The refit of a pair's calibrated signals on the labels of one device: a small correction, proposed and watched.

The weights stay. A logistic regression corrects the log odds of each signal: by a common slope, and an offset for each
kind of prompts, with penalties that pull both towards no correction. It is adopted only if

1. the newest third of the labels, which the fit did not see, is at least `_LEAST_RATIO` times as likely under it as
   under the correction in use: if the latter is true, that happens with a probability of at most 1 / `_LEAST_RATIO`,
   for any number of labels (an e-value);
2. the labels speak for it also once those of any one client are left out, if that leaves `_LEAST_OTHERS` of that
   third: their part of the evidence must be at least their part of the labels, so none brings it about alone. The
   same holds once the labels of earlier runs, which may be anyone's, are left out as well;
3. the golden answers of the pair's file do not become less likely by more than `_TOLERANCE` nats on average, whatever
   the labels say: that bounds what wrong labels can do.

While it is in use, each further label multiplies an e-value against it (`watched`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from causeway_server.models.signals.calibration import MAX_OFFSET, MAX_SLOPE, Correction, Refit
from causeway_server.models.signals.pair import GoldenAnswer

WINDOW: Final = 1000  # newest labels that a fit takes into account
LEAST: Final = 200  # labels before the first fit
EVERY: Final = 100  # labels between two fits
REFUTED: Final = 1000.0  # e-value at which a refit is given up
RESTORED: Final = -1  # the source of all named clients' labels of earlier runs, whose sources are unknown
_LEAST_GOLDEN: Final = 50
_TOLERANCE: Final = 0.1
_SEEN: Final = 2 / 3  # share of the labels that the fit sees
_LEAST_RATIO: Final = 100.0
_SLOPE_PENALTY, _COMMON_PENALTY, _KIND_PENALTY = 20.0, 3.0, 6.0
_STEPS: Final = 25
_LEAST_OTHERS: Final = 20

Refusal = Literal["not_better", "one_client", "golden"]
Array64 = NDArray[np.float64]


class RefitLabel(msgspec.Struct, frozen=True, gc=False):
    """A label: both signals as the pair's file states them, in log odds, and whether the device's answer was good.
    `source` tells clients apart.
    """

    kind: int
    quality: float
    confidence: float | None
    good: bool
    source: int = 0


Label = RefitLabel | GoldenAnswer


def propose(
    labels: Sequence[RefitLabel], golden: Sequence[GoldenAnswer], using: Refit | None, sha256: str, at: float
) -> Refit | Refusal:
    """Fit a correction on labels, oldest first, and return it if it is to be adopted. It takes some milliseconds.

    Args:
        golden: The golden answers of the pair's file.
        using: The refit in use.
        sha256, at: Digest of the pair's file and Unix seconds, for the refit.
    """
    current = using or Refit(sha256, 0, at, 0, 0.0, Correction(), Correction())
    judged = [label for label in labels if label.confidence is not None]
    quality, first_gain = _judged([one.quality for one in labels], labels, current.quality)
    confidence, gain = _judged([one.confidence or 0.0 for one in judged], judged, current.confidence)
    if not isinstance(quality, Correction) and not isinstance(confidence, Correction):
        return "one_client" if "one_client" in (quality, confidence) else "not_better"
    refit = Refit(
        sha256,
        current.number + 1,
        at,
        len(labels),
        gain or first_gain,
        quality if isinstance(quality, Correction) else current.quality,
        confidence if isinstance(confidence, Correction) else current.confidence,
    )
    return "golden" if fails_golden(refit, golden) else refit


def fails_golden(refit: Refit, golden: Sequence[GoldenAnswer]) -> bool:
    """Return whether the golden answers are too few, or become less likely by more than `_TOLERANCE`."""
    if len(golden) < _LEAST_GOLDEN:
        return True
    states = (refit.quality, [one.quality for one in golden]), (refit.confidence, [one.confidence for one in golden])
    return any(
        (_losses(correction, odds, golden) - _losses(Correction(), odds, golden)).mean() > _TOLERANCE
        for correction, odds in states
    )


def watched(against: float, refit: Refit, label: RefitLabel) -> float:
    """Return the e-value against a refit after one more label; `against`: before it, 1 at first (an e-detector)."""
    signals = [(refit.quality, label.quality)]
    if label.confidence is not None:
        signals.append((refit.confidence, label.confidence))
    ratios = [
        math.exp(float((_losses(correction, [odds], [label]) - _losses(Correction(), [odds], [label]))[0]))
        for correction, odds in signals
    ]
    return max(1.0, against) * sum(ratios) / len(ratios)


def _judged(
    odds: Sequence[float], labels: Sequence[RefitLabel], using: Correction
) -> tuple[Correction | Refusal, float]:
    """Return the correction of one signal, or why there is none, and its gain per label that the fit did not see."""
    if len(labels) < LEAST:
        return "not_better", 0.0
    seen = int(len(labels) * _SEEN)
    fitted, unseen = _fit(odds[:seen], labels[:seen]), (odds[seen:], labels[seen:])
    gains = _losses(using, *unseen) - _losses(fitted, *unseen)
    if gains.sum() < math.log(_LEAST_RATIO):  # (1)
        return "not_better", 0.0
    sources = np.array([label.source for label in labels[seen:]])
    others = [gains[sources != source] for source in np.unique(sources)]
    others += [gains[(sources != source) & (sources != RESTORED)] for source in np.unique(sources)]
    needed = math.log(_LEAST_RATIO) / len(gains)
    if any(len(one) >= _LEAST_OTHERS and one.sum() < needed * len(one) for one in others):  # (2)
        return "one_client", 0.0
    return fitted, float(gains.mean())


def _fit(odds: Sequence[float], labels: Sequence[Label]) -> Correction:
    """Fit by Newton's method, with steps of at most 1."""
    stated, good = np.array(odds), np.array([label.good for label in labels])
    kinds = np.eye(max(label.kind for label in labels) + 1)[[label.kind for label in labels]]
    inputs = np.concatenate([stated[:, None], np.ones((len(stated), 1)), kinds], axis=1)
    penalties = np.array([_SLOPE_PENALTY, _COMMON_PENALTY, *[_KIND_PENALTY] * kinds.shape[1]])
    line = np.zeros(len(penalties))
    for _ in range(_STEPS):
        expected = 1 / (1 + np.exp(-np.clip(stated + inputs @ line, -30, 30)))
        hessian = (inputs * (expected * (1 - expected))[:, None]).T @ inputs + np.diag(penalties)
        line -= np.clip(np.linalg.solve(hessian, inputs.T @ (expected - good) + penalties * line), -1, 1)
    offset, *by_kind = np.clip(line[1:], -MAX_OFFSET, MAX_OFFSET).tolist()
    return Correction(float(np.clip(1 + line[0], 1 / MAX_SLOPE, MAX_SLOPE)), offset, tuple(by_kind))


def _losses(correction: Correction, odds: Sequence[float], labels: Sequence[Label]) -> Array64:
    """Return the log loss of each label, nats."""
    each = zip(odds, labels, strict=True)
    against = [correction.odds(value, one.kind) * (-1 if one.good else 1) for value, one in each]
    losses: Array64 = np.logaddexp(0.0, against)
    return losses
