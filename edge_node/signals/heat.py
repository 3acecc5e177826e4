"""A model of the device's heat, fitted on its own readings."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from causeway_server.router.trackers import Ewma

_TIME_CONSTANTS_S: Final = 15.0 * 2.0 ** np.arange(8)
_FIT_S, _FITTED_S = 1800.0, 540.0  # half-life of the readings that the heat is fitted to; how many it needs
_SHORTEST_S: Final = 120.0  # time in which the limit must not be reached


class HeatModel:
    """The device's temperature after its draw: of first order, with the time constant whose least squares fit best."""

    def __init__(self) -> None:
        self._smooth_w = np.full_like(_TIME_CONSTANTS_S, np.nan)  # the draw, smoothed with each time constant
        self._sums = np.zeros((6, len(_TIME_CONSTANTS_S)))
        self._now = Ewma(10.0)
        self._best, self._resistance = 0, 0.0  # index of the time constant; °C/W, 0: not fitted

    def observe(self, temperature_c: float | None, power_w: float, dt: float, now: float) -> None:
        """Take readings into account. `dt`: seconds since the last ones; `now`: monotonic seconds."""
        before_w = np.nan_to_num(self._smooth_w, nan=power_w)
        x = self._smooth_w = power_w + (before_w - power_w) * np.exp(-dt / _TIME_CONSTANTS_S)
        if temperature_c is not None:
            self._now.add(temperature_c, now)
            y = np.full_like(x, temperature_c)
            new = np.stack([np.ones_like(x), x, y, x * x, x * y, y * y])
            self._sums = self._sums * 0.5 ** (dt / _FIT_S) + new * dt

    def fit(self) -> None:
        """Choose the time constant whose error is least; without one the last choice stays."""
        if self._sums[0, 0] < _FITTED_S:
            return
        x, y, xx, xy, yy = self._sums[1:] / self._sums[0]
        variance = xx - x * x
        resistance = (xy - x * y) / np.maximum(variance, 1e-9)
        errors = yy - y * y - resistance**2 * variance
        errors[(variance < 0.05) | (resistance < 0.1) | (resistance > 50.0)] = np.inf
        best = int(errors.argmin())
        if math.isfinite(errors[best]):
            self._best, self._resistance = best, float(resistance[best])

    def allowed(self, limit_c: float, now: float) -> tuple[float, float] | None:
        """Return the draw, W, that reaches a temperature after so many seconds, and these; None if it is unknown."""
        temperature, time_constant_s = self._now.value(now), float(_TIME_CONSTANTS_S[self._best])
        if not self._resistance or temperature is None:
            return None
        window_s = max(_SHORTEST_S, time_constant_s)
        rise = (limit_c - temperature) / -math.expm1(-window_s / time_constant_s)
        return float(self._smooth_w[self._best]) + rise / self._resistance, window_s

    def reaches_in_s(self, limit_c: float, power_w: float, now: float) -> float | None:
        """Return the seconds after which a draw reaches a temperature; None if it does not, or it is unknown."""
        temperature = self._now.value(now)
        if temperature is None:
            return None
        left, rise = limit_c - temperature, self._resistance * (power_w - float(self._smooth_w[self._best]))
        if left <= 0.0:
            return 0.0
        return None if rise <= left else -float(_TIME_CONSTANTS_S[self._best]) * math.log1p(-left / rise)
