"""The calibration error of stated probabilities, and the part of it that chance does not explain."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

Array64 = NDArray[np.float64]
BINS = 10
MIN_ANSWERS = 100  # fewer tell nothing of a drift


def bins_of(probabilities: Array64) -> NDArray[np.int64]:
    """Return which of `BINS` equal bins each probability is in."""
    return np.minimum((probabilities * BINS).astype(np.int64), BINS - 1)


class CalibrationDrift(msgspec.Struct, frozen=True):
    """The calibration of a signal."""

    answers: int  # the number of answers
    error: float  # the expected calibration error over ten equal bins (ECE)
    drift: float  # the error beyond the one that true probabilities would have with so few answers, at least 0


def calibration_error(probabilities: Array64, truth: NDArray[np.bool_], weights: Array64 | None = None) -> float:
    """Return the expected calibration error: the weighted mean of |probability - frequency| over equal bins."""
    shares = np.ones(len(probabilities)) if weights is None else weights
    bins = bins_of(probabilities)
    sums = [np.bincount(bins, weights=shares * values, minlength=BINS) for values in (probabilities, truth)]
    return float(np.abs(sums[0] - sums[1]).sum() / shares.sum()) if len(probabilities) else 0.0


def measure_drift(probabilities: Sequence[float], truth: Sequence[bool]) -> CalibrationDrift:
    """Compare stated probabilities with the outcomes.

    If they are true, the sum of the differences in a bin has mean 0 and variance Σ p (1 - p), and the mean of its
    absolute value is √(2/π) times its deviation, since it is nearly normal.
    """
    if not probabilities:
        return CalibrationDrift(0, 0.0, 0.0)
    stated = np.array(probabilities)
    error = calibration_error(stated, np.array(truth, bool))
    variances = np.bincount(bins_of(stated), weights=stated * (1 - stated), minlength=BINS)
    by_chance = math.sqrt(2 / math.pi) * float(np.sqrt(variances).sum()) / len(stated)
    return CalibrationDrift(len(stated), error, max(0.0, error - by_chance))
