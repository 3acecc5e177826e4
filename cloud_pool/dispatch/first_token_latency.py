"""Recent times to first token: when to hedge, and whether an attempt can still be in time. Pure, monotonic time.

A hedge is due when a healthy endpoint would have answered: each endpoint has its own quantile, and the tier's is their
median (the lower of two). Over all samples together, one slow replica of two would define what is slow and never be
hedged. An urgent hedge is due a little after the 99th percentile, or at twice the first threshold at most.

A quantile sorts its window, so its value is cached for a moment.
"""

from __future__ import annotations

from collections.abc import Iterable

from router.trackers.latency import Window

_HEDGE_WINDOW_S = 60.0
_FASTEST_WINDOW_S = 5.0  # short: an estimate from a rush must not reject requests once it is over
_HEDGE_SAMPLES = 20  # fewer say nothing about a tail
_URGENT_SAMPLES = 100
_FASTEST_SAMPLES = 8
_URGENT_QUANTILE = 0.99
_URGENT_FACTOR = 1.1
_FASTEST_QUANTILE = 0.05
_CACHED_S = 0.25


class FirstTokenLatency:
    """`quantile` (0..1): the share of first tokens after which a first token is late."""

    def __init__(self, quantile: float = 0.95) -> None:
        self._quantile = quantile
        self._endpoints: dict[str, _EndpointLatency] = {}

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The endpoints that are remembered."""
        return tuple(self._endpoints)

    def first_token(self, endpoint: str, seconds: float, now: float) -> None:
        """Record a first token, `seconds` after its attempt began."""
        known = self._known(endpoint, now)
        known.late.add(seconds, now)
        known.urgent.add(seconds, now)
        known.fastest.add(seconds, now)

    def abandoned(self, endpoint: str, seconds: float, now: float) -> None:
        """Record an attempt that was cancelled after that time because another one answered.

        It would have taken longer still; without it slow endpoints would look faster than they are.
        """
        known = self._known(endpoint, now)
        known.late.add(seconds, now)
        known.urgent.add(seconds, now)

    def hedge_after_s(self, now: float) -> float | None:
        """Return the wait after which a first token is late; None: too few samples."""
        return _median([one.late.value(now) for one in self._endpoints.values()])

    def urgent_hedge_after_s(self, now: float) -> float | None:
        """Return the wait after which a first token is very late; None: too few samples."""
        late_s = self.hedge_after_s(now)
        if late_s is None:
            return None
        urgent_s = _median([one.urgent.value(now) for one in self._endpoints.values()])
        return 2.0 * late_s if urgent_s is None else min(2.0 * late_s, max(late_s, _URGENT_FACTOR * urgent_s))

    def fastest_s(self, endpoint: str, now: float) -> float:
        """Return the time below which `endpoint` plausibly gives no first token; 0: too few samples."""
        known = self._endpoints.get(endpoint)
        return 0.0 if known is None else known.fastest.value(now) or 0.0

    def _known(self, endpoint: str, now: float) -> _EndpointLatency:
        """Endpoints come and go with DNS: when a new one comes, those without a recent sample are dropped."""
        if endpoint not in self._endpoints:
            self._endpoints = {address: one for address, one in self._endpoints.items() if one.late.count(now)}
            self._endpoints[endpoint] = _EndpointLatency(self._quantile)
        return self._endpoints[endpoint]


def _median(values: Iterable[float | None]) -> float | None:
    """Return the lower median of the known values."""
    known = sorted(value for value in values if value is not None)
    return known[(len(known) - 1) // 2] if known else None


class _EndpointLatency:
    def __init__(self, quantile: float) -> None:
        self.late = _Quantile(quantile, _HEDGE_WINDOW_S, _HEDGE_SAMPLES)
        self.urgent = _Quantile(_URGENT_QUANTILE, _HEDGE_WINDOW_S, _URGENT_SAMPLES)
        self.fastest = _Quantile(_FASTEST_QUANTILE, _FASTEST_WINDOW_S, _FASTEST_SAMPLES)


class _Quantile:
    def __init__(self, quantile: float, window_s: float, min_samples: int) -> None:
        self._quantile = quantile
        self._min_samples = min_samples
        self._window = Window(window_s)
        self._value: float | None = None
        self._computed_at = float("-inf")

    def add(self, seconds: float, now: float) -> None:
        self._window.add(seconds, now)

    def count(self, now: float) -> int:
        return self._window.count(now)

    def value(self, now: float) -> float | None:
        if now - self._computed_at >= _CACHED_S:
            self._computed_at = now
            is_enough = self._window.count(now) >= self._min_samples
            self._value = self._window.quantile(self._quantile, now) if is_enough else None
        return self._value
