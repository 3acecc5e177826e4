"""Adam (Kingma and Ba 2014, arXiv 1412.6980) in numpy, for what is too small to need torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Reals = NDArray[np.float32]
Rows = NDArray[np.int64]


class Adam:
    """One array that learns. `value` is its own and changes in place."""

    def __init__(self, value: Reals, *, decay: float = 0.0) -> None:
        """`decay`: how much of the value a step of rate 1 would take away (Loshchilov and Hutter 2017, AdamW)."""
        self.value = value.astype(np.float32).copy()
        self._decay = decay
        self._mean, self._square = np.zeros_like(self.value), np.zeros_like(self.value)
        self._steps = np.zeros((len(value), *[1] * (value.ndim - 1)), np.float32)

    def step(self, gradient: Reals, rate: float, rows: Rows | slice = slice(None)) -> None:
        """`rows`: which rows the gradient is of (no row twice); the others stay as they are."""
        self._steps[rows] += 1
        mean = self._mean[rows] = 0.9 * self._mean[rows] + 0.1 * gradient
        square = self._square[rows] = 0.999 * self._square[rows] + 0.001 * gradient**2
        steps = self._steps[rows]
        step = (mean / (1 - 0.9**steps)) / (np.sqrt(square / (1 - 0.999**steps)) + 1e-8)
        self.value[rows] -= rate * (step + self._decay * self.value[rows])
