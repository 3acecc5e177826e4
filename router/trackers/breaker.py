"""A circuit breaker: stops requests to a target that fails, and probes it until it is back.

One owner, explicit monotonic time, bounded memory. It opens on `failures` in a row, or on a share of failures among the
calls of the last `window_s`. After `open_s` one call at a time may probe; each failed probe doubles the pause.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

BreakerState = Literal["closed", "open", "half_open"]
_WINDOW_CALLS = 256  # outcomes that are kept, the newest


class Breaker:
    """Call `allow` before a request, and exactly one of `success`, `failure` or `cancelled` after it."""

    def __init__(
        self,
        *,
        failures: int = 5,
        rate: float = 0.5,
        window_s: float = 30.0,
        min_calls: int = 10,
        open_s: float = 5.0,
        max_open_s: float = 60.0,
        probe_s: float = 60.0,
    ) -> None:
        """Configure the breaker. Times are in seconds.

        Args:
            failures: failures in a row that open it.
            rate: share of failures in `window_s` that opens it, once there are `min_calls`.
            open_s: the first pause; each failed probe doubles it, up to `max_open_s`.
            probe_s: after this time without a result, another call may probe.
        """
        self._failures = failures
        self._rate = rate
        self._window_s = window_s
        self._min_calls = min_calls
        self._open_s = open_s
        self._max_open_s = max_open_s
        self._probe_s = probe_s
        self._consecutive = 0
        self._calls: deque[tuple[float, bool]] = deque(maxlen=_WINDOW_CALLS)  # (when, failed)
        self._opened: float | None = None  # None: closed
        self._pause = open_s
        self._probe: float | None = None  # when the current probe started

    @property
    def recorded_calls(self) -> int:
        """The number of outcomes that the share of failures is computed from, at most 256."""
        return len(self._calls)

    def state(self, now: float) -> BreakerState:
        if self._opened is None:
            return "closed"
        return "half_open" if now >= self._opened + self._pause else "open"

    def allow(self, now: float) -> bool:
        """Return whether a call may be made. In half-open the first call is the probe; it must report its result."""
        state = self.state(now)
        if state != "half_open":
            return state == "closed"
        if self._probe is not None and now < self._probe + self._probe_s:
            return False
        self._probe = now
        return True

    def success(self, now: float) -> None:
        """Record an answer. While open it belongs to an earlier call, which does not prove that the target is back."""
        if self.state(now) == "open":
            return
        if self._opened is not None:
            self._close()
        self._consecutive = 0
        self._calls.append((now, False))

    def failure(self, now: float) -> None:
        state = self.state(now)
        if state == "open" or (state == "half_open" and self._probe is None):
            return  # an earlier call; the target's failure is already known
        if state == "half_open":
            self._open(now, min(self._pause * 2.0, self._max_open_s))
            return
        self._consecutive += 1
        self._calls.append((now, True))
        if self._consecutive >= self._failures or self._rate_exceeded(now):
            self._open(now, self._open_s)

    def cancelled(self, now: float) -> None:
        """Record a call that says nothing about the target. In half-open, another call may probe."""
        if self.state(now) == "half_open":
            self._probe = None

    def retry_after_s(self, now: float) -> float:
        """Return the seconds until a call may be tried; 0 if it may be tried now."""
        return 0.0 if self._opened is None else max(0.0, self._opened + self._pause - now)

    def _rate_exceeded(self, now: float) -> bool:
        recent = [failed for when, failed in self._calls if when > now - self._window_s]
        return len(recent) >= self._min_calls and sum(recent) >= self._rate * len(recent)

    def _open(self, now: float, pause_s: float) -> None:
        self._opened = now
        self._pause = pause_s
        self._probe = None
        self._consecutive = 0
        self._calls.clear()

    def _close(self) -> None:
        self._opened = None
        self._pause = self._open_s
        self._probe = None
        self._calls.clear()
