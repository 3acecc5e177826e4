"""Logistic regression in numpy, and what a mix of traffic weighs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...signals.calibration import LinearLogit
from .graded_answers import GradedAnswer

OWN_SHARE = 0.7  # of the traffic for which probabilities are calibrated: the device's own domain
_RIDGE = 1e-4

Reals = NDArray[np.float64]


def fit_line(
    seen: Reals, truth: NDArray[np.bool_], weights: Reals, steps: int = 60, ridges: Sequence[float] = ()
) -> LinearLogit:
    """Logistic regression by Newton's method on standardised inputs, with a small ridge, or one for each input."""
    mean, spread = seen.mean(axis=0), seen.std(axis=0) + 1e-9
    scaled = np.concatenate([(seen - mean) / spread, np.ones((len(seen), 1))], axis=1)
    ridge = len(seen) * np.diag([*(ridges or [_RIDGE] * seen.shape[1]), 1e-6])
    line = np.zeros(scaled.shape[1])
    for _ in range(steps):
        told = 1 / (1 + np.exp(-np.clip(scaled @ line, -30, 30)))
        curve = (scaled * (weights * told * (1 - told))[:, None]).T @ scaled + ridge
        step = np.linalg.solve(curve, scaled.T @ (weights * (told - truth)) + ridge @ line)
        line = line - step
        if float(np.abs(step).max()) < 1e-8:
            break
    slopes = line[:-1] / spread
    return LinearLogit(tuple(float(slope) for slope in slopes), float(line[-1] - slopes @ mean))


def mix_weights(judged: Sequence[GradedAnswer]) -> Reals:
    """Of each row, so that the device's own make OWN_SHARE of all; they sum to the number of rows."""
    own = np.array([one.own for one in judged])
    if own.all() or not own.any():
        return np.ones(len(own))
    return np.where(own, OWN_SHARE / own.mean(), (1 - OWN_SHARE) / (1 - own.mean()))
