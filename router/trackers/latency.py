"""Recent latency: a mean that decays with time, and quantiles of a window. Explicit monotonic time, bounded memory."""

from __future__ import annotations

import math
from collections import deque

_UNKNOWN_WEIGHT = 1 / 64  # below it, six half-lives after one sample, the mean counts as unknown


class Ewma:
    """An exponentially weighted mean: the weight of a sample halves every `half_life_s`. Unit: that of the samples.

    Weights decay with time, not with the number of samples: ten samples at once weigh ten times as much as one, and
    without new samples the mean expires. Source: exponential decay by age, section 3 of
    https://dimacs.rutgers.edu/~graham/pubs/papers/fwddecay.pdf.
    """

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._sum = 0.0
        self._weight = 0.0
        self._at = 0.0

    def add(self, value: float, now: float) -> None:
        decay = self._decay(now)
        self._sum = self._sum * decay + value
        self._weight = self._weight * decay + 1.0
        self._at = max(self._at, now)

    def value(self, now: float) -> float | None:
        """Return the mean; None without recent samples."""
        if self._weight * self._decay(now) < _UNKNOWN_WEIGHT:
            return None
        return self._sum / self._weight

    def _decay(self, now: float) -> float:
        if self._weight == 0.0:
            return 0.0
        return float(0.5 ** (max(0.0, now - self._at) / self._half_life_s))


class Window:
    """The newest `size` samples of the last `window_s` seconds. Reading a quantile sorts them: O(size log size)."""

    def __init__(self, window_s: float, size: int = 512) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, float]] = deque(maxlen=size)  # (when, value)

    def add(self, value: float, now: float) -> None:
        self._samples.append((now, value))

    def count(self, now: float) -> int:
        return len(self._recent(now))

    def quantile(self, q: float, now: float) -> float | None:
        """Return the smallest sample that a share `q` (0..1) of the samples does not exceed; None without samples."""
        if not 0.0 <= q <= 1.0:
            raise ValueError(f"not a share: {q!r}")
        values = sorted(self._recent(now))
        if not values:
            return None
        rank = math.ceil(q * len(values) - 1e-9)  # 0.07 * 100 is slightly above 7 in floating point
        return values[max(0, rank - 1)]

    def _recent(self, now: float) -> list[float]:
        while self._samples and self._samples[0][0] <= now - self._window_s:
            self._samples.popleft()
        return [value for _, value in self._samples]
