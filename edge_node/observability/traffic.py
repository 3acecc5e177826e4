"""The box at one moment, with sums of its requests that can be subtracted: what a fleet compares over a change."""

from __future__ import annotations

import msgspec

from router.bundle.protocol import LATENCY_BOUNDS_S


class Traffic(msgspec.Struct, frozen=True):
    """Sums since the start of the daemon, or between two moments.

    Attributes:
        requests: Requests that were answered or failed; not those that clients cancelled.
        errors: Those that failed.
        degraded: Answers of a fallback.
        latency: Requests by bucket of `LATENCY_BOUNDS_S`, the last one for slower ones.
        restarts: Engine children that ended unexpectedly.
    """

    requests: int = 0
    errors: int = 0
    degraded: int = 0
    latency: tuple[int, ...] = (0,) * (len(LATENCY_BOUNDS_S) + 1)
    restarts: int = 0

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(
            self.requests - earlier.requests,
            self.errors - earlier.errors,
            self.degraded - earlier.degraded,
            tuple(late - early for late, early in zip(self.latency, earlier.latency, strict=True)),
            self.restarts - earlier.restarts,
        )


class BoxCondition(msgspec.Struct, frozen=True):
    """The box at one moment, or over a time.

    Attributes:
        problem: Why no target can answer; "" if one can.
        temperature_c: None: this box cannot read it; `throttled` likewise.
    """

    traffic: Traffic = Traffic()
    problem: str = ""
    temperature_c: float | None = None
    throttled: bool | None = None
