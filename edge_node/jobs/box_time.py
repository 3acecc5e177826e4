"""The box's own time: seconds that pass also over restarts and reboots, whatever the wall clock does.

Within a boot the monotonic clock counts, also over restarts of the daemon. The time between two boots is what the wall
clock says, and 0 if that went backwards: a box without a battery clock starts in the past.
"""

from __future__ import annotations

import msgspec

from ..clock import Clock


class ClockMark(msgspec.Struct, frozen=True):
    """One moment on all clocks, as stored with each commit."""

    boot_id: str
    monotonic: float  # s
    unix: float  # s
    elapsed: float  # the box's own time, s


class BoxTime:
    """The box's own time since its outbox was made. `restore` comes first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._start = clock.monotonic()  # when it was 0, on the monotonic clock of this boot

    def restore(self, mark: ClockMark | None) -> None:
        """Continue after the last mark of an earlier run."""
        now = self._clock.monotonic()
        if mark is None:
            self._start = now
            return
        unix = self._clock.unix()
        if not self._clock.boot_id:
            passed_s = unix - mark.unix
        elif mark.boot_id == self._clock.boot_id:
            passed_s = now - mark.monotonic
        else:
            passed_s = now + max(0.0, unix - now - mark.unix)
        self._start = now - mark.elapsed - max(0.0, passed_s)

    def now(self) -> float:
        return self._clock.monotonic() - self._start

    def unix(self) -> float:
        """The wall clock, for people."""
        return self._clock.unix()

    def mark(self) -> ClockMark:
        now = self._clock.monotonic()
        return ClockMark(self._clock.boot_id, now, self._clock.unix(), now - self._start)
