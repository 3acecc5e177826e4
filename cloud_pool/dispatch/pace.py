"""How soon first tokens come: the tier's slowest tell when to hedge, an endpoint's fastest whether to start at all.

Pure state, explicit monotonic time. A quantile sorts its window, so it is kept for a moment.
"""

from __future__ import annotations

from router.latency import Window

_TIER_S = 60.0
# Short: an estimate from a rush must not keep asks away once it is over.
_ENDPOINT_S = 5.0
_ENOUGH = 20  # samples; fewer say nothing about a tail
_SOME = 8
_SOONEST = 0.05
_KEPT_S = 0.25


class Pace:
    """`slow` is the quantile (0..1) of the tier's times to first token that counts as slow."""

    def __init__(self, slow: float = 0.95) -> None:
        self._tier = _Quantile(slow, _TIER_S, _ENOUGH)
        self._endpoints: dict[str, _Quantile] = {}

    def first_token(self, endpoint: str, seconds: float, now: float) -> None:
        """`seconds` from the start of a try."""
        self._tier.add(seconds, now)
        if endpoint not in self._endpoints:
            self._forget(now)
            self._endpoints[endpoint] = _Quantile(_SOONEST, _ENDPOINT_S, _SOME)
        self._endpoints[endpoint].add(seconds, now)

    def given_up(self, seconds: float, now: float) -> None:
        """A try was cancelled after that time for another one's answer. It would have taken longer still; without it
        the slow would look rarer than they are."""
        self._tier.add(seconds, now)

    def slow_s(self, now: float) -> float | None:
        """None: not enough is known."""
        return self._tier.value(now)

    def soonest_s(self, endpoint: str, now: float) -> float:
        """With less time than this left, `endpoint` plausibly gives no first token; 0 if not enough is known."""
        known = self._endpoints.get(endpoint)
        return 0.0 if known is None else known.value(now) or 0.0

    def _forget(self, now: float) -> None:
        """Endpoints come and go with DNS: those without a recent sample are dropped."""
        self._endpoints = {address: one for address, one in self._endpoints.items() if one.count(now)}


class _Quantile:
    def __init__(self, q: float, window_s: float, enough: int) -> None:
        self._q = q
        self._enough = enough
        self._window = Window(window_s)
        self._value: float | None = None
        self._read_at = float("-inf")

    def add(self, seconds: float, now: float) -> None:
        self._window.add(seconds, now)

    def count(self, now: float) -> int:
        return self._window.count(now)

    def value(self, now: float) -> float | None:
        if now - self._read_at >= _KEPT_S:
            self._read_at = now
            self._value = self._window.quantile(self._q, now) if self._window.count(now) >= self._enough else None
        return self._value
