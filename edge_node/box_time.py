"""The box's own time: seconds that pass also over restarts and reboots, whatever the wall clock does.

1. Within a boot the monotonic clock counts, also over restarts of the daemon.
2. The time between two boots is counted once the wall clock is synchronised (by NTP, as the kernel knows), from a
   moment at which it was before: a box without a battery clock starts in the past, or where it was switched off.
3. Where it never was, the time between two boots is not counted: what waits lives longer, and nothing is overdue.
"""

from __future__ import annotations

import msgspec

from .clock import Clock


class Anchor(msgspec.Struct, frozen=True):
    """A moment at which the wall clock was synchronised."""

    boot_id: str
    unix: float  # s
    elapsed: float  # the box's own time, s


class ClockMark(msgspec.Struct, frozen=True):
    """One moment on all clocks, as stored with each commit. `anchor`: the newest; None: there was none."""

    boot_id: str
    monotonic: float  # s
    unix: float  # s
    elapsed: float  # the box's own time, s
    anchor: Anchor | None = None


class BoxTime:
    """The box's own time since its file was made. `restore` comes first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._start = clock.monotonic()  # when it was 0, on the monotonic clock of this boot
        self._anchor: Anchor | None = None
        self._was_off = False  # the anchor is of an earlier boot, and the time since is not counted yet

    def restore(self, mark: ClockMark | None) -> None:
        """Continue after the last mark of an earlier run."""
        now = self._clock.monotonic()
        if mark is None:
            self._start = now
            return
        same_boot = bool(mark.boot_id) and mark.boot_id == self._clock.boot_id
        passed_s = now - mark.monotonic if same_boot else now if self._clock.boot_id else 0.0  # (1)
        self._start = now - mark.elapsed - max(0.0, passed_s)
        self._anchor = mark.anchor
        self._was_off = mark.anchor is not None and (not same_boot or mark.anchor.boot_id != mark.boot_id)

    def now(self) -> float:
        now = self._clock.monotonic()
        if self._was_off and self._anchor is not None and self._clock.synchronised():
            elapsed = self._anchor.elapsed + self._clock.unix() - self._anchor.unix  # (2)
            self._start = min(self._start, now - elapsed)  # the same from each thread
            self._was_off = False
        return now - self._start

    def unix(self) -> float:
        """The wall clock, for people."""
        return self._clock.unix()

    def mark(self) -> ClockMark:
        elapsed, unix = self.now(), self._clock.unix()
        if self._clock.synchronised():
            self._anchor = Anchor(self._clock.boot_id, unix, elapsed)
        return ClockMark(self._clock.boot_id, self._clock.monotonic(), unix, elapsed, self._anchor)
