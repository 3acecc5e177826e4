"""Adam and logistic regression in numpy, for models too small to need torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...signals.calibration import LinearLogit

Array32 = NDArray[np.float32]
Array64 = NDArray[np.float64]
Indices = NDArray[np.int64]
_RIDGE = 1e-4
_NEWTON_STEPS = 60


class Adam:
    """One array with its AdamW state (Kingma and Ba 2014, arXiv 1412.6980; Loshchilov and Hutter 2017).

    `value` is a copy that `step` updates in place.
    """

    def __init__(self, value: Array32, *, decay: float = 0.0) -> None:
        """`decay`: weight decay, the share of the value that a step at learning rate 1 would remove."""
        self.value = value.astype(np.float32).copy()
        self._decay = decay
        self._mean, self._square = np.zeros_like(self.value), np.zeros_like(self.value)
        self._steps = np.zeros((len(value), *[1] * (value.ndim - 1)), np.float32)

    def step(self, gradient: Array32, rate: float, rows: Indices | slice = slice(None)) -> None:
        """Apply a gradient of `rows` (no row twice); the other rows are unchanged."""
        self._steps[rows] += 1
        mean = self._mean[rows] = 0.9 * self._mean[rows] + 0.1 * gradient
        square = self._square[rows] = 0.999 * self._square[rows] + 0.001 * gradient**2
        steps = self._steps[rows]
        step = (mean / (1 - 0.9**steps)) / (np.sqrt(square / (1 - 0.999**steps)) + 1e-8)
        self.value[rows] -= rate * (step + self._decay * self.value[rows])


def fit_logistic(
    inputs: Array64, truth: NDArray[np.bool_], weights: Array64, ridges: Sequence[float] = ()
) -> LinearLogit:
    """Fit a logistic regression by Newton's method on standardised inputs.

    Args:
        inputs: [rows, inputs].
        truth: [rows].
        weights: [rows], of each row in the loss.
        ridges: one L2 penalty per input; default: a small one for all.
    """
    mean, spread = inputs.mean(axis=0), inputs.std(axis=0) + 1e-9
    scaled = np.concatenate([(inputs - mean) / spread, np.ones((len(inputs), 1))], axis=1)
    ridge = len(inputs) * np.diag([*(ridges or [_RIDGE] * inputs.shape[1]), 1e-6])
    line = np.zeros(scaled.shape[1])
    for _ in range(_NEWTON_STEPS):
        predicted = 1 / (1 + np.exp(-np.clip(scaled @ line, -30, 30)))
        hessian = (scaled * (weights * predicted * (1 - predicted))[:, None]).T @ scaled + ridge
        step = np.linalg.solve(hessian, scaled.T @ (weights * (predicted - truth)) + ridge @ line)
        line = line - step
        if float(np.abs(step).max()) < 1e-8:
            break
    slopes = line[:-1] / spread
    return LinearLogit(tuple(float(slope) for slope in slopes), float(line[-1] - slopes @ mean))
