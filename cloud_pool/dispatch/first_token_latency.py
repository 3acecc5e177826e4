"""How soon first tokens come: what is late tells when to hedge, an endpoint's fastest whether to start at all.

Late is late for an endpoint that is well: each has its own quantile, and the tier's is their median (the lower one of
two). Over all samples together one slow replica of two would define what is slow, and never be hedged. Very late is
what one in a hundred needs and a little more, or at most twice what is late.

Pure state, explicit monotonic time. A quantile sorts its window, so it is kept for a moment.
"""

from __future__ import annotations

from collections.abc import Iterable

from router.decision.latency import Window

_LATE_S = 60.0
# Short: an estimate from a rush must not keep asks away once it is over.
_SOON_S = 5.0
_ENOUGH = 20  # samples; fewer say nothing about a tail
_MANY = 100
_SOME = 8
_LAST = 0.99
_BEYOND = 1.1
_SOONEST = 0.05
_KEPT_S = 0.25


class FirstTokenLatency:
    """`late` is the quantile (0..1) of the times to first token after which one is late."""

    def __init__(self, late: float = 0.95) -> None:
        self._q = late
        self._endpoints: dict[str, _Endpoint] = {}

    def first_token(self, endpoint: str, seconds: float, now: float) -> None:
        """`seconds` from the start of a try."""
        known = self._known(endpoint, now)
        known.late.add(seconds, now)
        known.last.add(seconds, now)
        known.soon.add(seconds, now)

    def given_up(self, endpoint: str, seconds: float, now: float) -> None:
        """A try was cancelled after that time for another one's answer. It would have taken longer still; without it
        the slow would look quicker than they are."""
        known = self._known(endpoint, now)
        known.late.add(seconds, now)
        known.last.add(seconds, now)

    def late_s(self, now: float) -> float | None:
        """None: not enough is known."""
        return _median([one.late.value(now) for one in self._endpoints.values()])

    def very_late_s(self, now: float) -> float | None:
        """None: not enough is known."""
        late_s = self.late_s(now)
        if late_s is None:
            return None
        last = _median([one.last.value(now) for one in self._endpoints.values()])
        return 2.0 * late_s if last is None else min(2.0 * late_s, max(late_s, _BEYOND * last))

    def fastest_s(self, endpoint: str, now: float) -> float:
        """With less time than this left, `endpoint` plausibly gives no first token; 0 if not enough is known."""
        known = self._endpoints.get(endpoint)
        return 0.0 if known is None else known.soon.value(now) or 0.0

    def _known(self, endpoint: str, now: float) -> _Endpoint:
        """Endpoints come and go with DNS: when a new one comes, those without a recent sample are dropped."""
        if endpoint not in self._endpoints:
            self._endpoints = {address: one for address, one in self._endpoints.items() if one.late.count(now)}
            self._endpoints[endpoint] = _Endpoint(self._q)
        return self._endpoints[endpoint]


def _median(values: Iterable[float | None]) -> float | None:
    """The lower one of two."""
    known = sorted(value for value in values if value is not None)
    return known[(len(known) - 1) // 2] if known else None


class _Endpoint:
    def __init__(self, late: float) -> None:
        self.late = _Quantile(late, _LATE_S, _ENOUGH)
        self.last = _Quantile(_LAST, _LATE_S, _MANY)
        self.soon = _Quantile(_SOONEST, _SOON_S, _SOME)


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
