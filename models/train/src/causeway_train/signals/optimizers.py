"""Adam in numpy, for models too small to need torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array32 = NDArray[np.float32]
Indices = NDArray[np.int64]


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
