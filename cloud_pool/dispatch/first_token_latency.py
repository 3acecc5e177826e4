"""Recent times to first token of each endpoint: whether an attempt can still be in time. Pure, monotonic time."""

from __future__ import annotations

from router.trackers import Window

_WINDOW_S = 5.0  # short: an estimate from a rush must not reject requests once it is over
_MIN_SAMPLES = 8
_QUANTILE = 0.05
_CACHED_S = 0.25  # a quantile sorts its window


class FirstTokenLatency:
    """Estimates, for each endpoint, the time below which it gives no first token."""

    def __init__(self) -> None:
        self._endpoints: dict[str, _EndpointLatency] = {}

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The endpoints that are remembered."""
        return tuple(self._endpoints)

    def first_token(self, endpoint: str, seconds: float, now: float) -> None:
        """Record a first token, `seconds` after its attempt began.

        Endpoints come and go with DNS: when a new one comes, those without a recent sample are dropped.
        """
        if endpoint not in self._endpoints:
            self._endpoints = {address: one for address, one in self._endpoints.items() if one.window.count(now)}
            self._endpoints[endpoint] = _EndpointLatency()
        self._endpoints[endpoint].window.add(seconds, now)

    def fastest_s(self, endpoint: str, now: float) -> float:
        """Return the time below which `endpoint` plausibly gives no first token; 0: too few samples."""
        known = self._endpoints.get(endpoint)
        return 0.0 if known is None else known.fastest_s(now)


class _EndpointLatency:
    def __init__(self) -> None:
        self.window = Window(_WINDOW_S)
        self._fastest_s = 0.0
        self._computed_at = float("-inf")

    def fastest_s(self, now: float) -> float:
        if now - self._computed_at >= _CACHED_S:
            self._computed_at = now
            is_enough = self.window.count(now) >= _MIN_SAMPLES
            self._fastest_s = (self.window.quantile(_QUANTILE, now) or 0.0) if is_enough else 0.0
        return self._fastest_s
