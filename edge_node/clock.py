"""Time as an argument: monotonic seconds for durations and deadlines, Unix seconds for display.

The monotonic clock is the one that asyncio's loops use, so a deadline means the same everywhere in the process. On
Linux it counts from boot, so together with the boot id it is also valid across restarts of the process: the cache
computes an entry's age from it, even if the wall clock was set in between. Between two boots only a synchronised wall
clock tells how much time has passed.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

_TIMEX_BYTES = 512  # the kernel's structure has 208
_TIME_ERROR = 5
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def read_boot_id() -> str:
    """Return the boot id; "" if the kernel provides none, and only the wall clock is valid across restarts."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def is_synchronised() -> bool:
    """Return whether the kernel says that the wall clock is synchronised, as NTP clients tell it (adjtimex(2)). A boot
    clears that, and setting the date by hand. True on other systems than Linux.
    """
    if not sys.platform.startswith("linux"):
        return True
    state = int(_libc().adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES)))  # all zeros: read only
    return state >= 0 and state != _TIME_ERROR


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


class Clock(msgspec.Struct, frozen=True):
    """Both clocks, and the id of the boot of `monotonic`. `synchronised`: whether the wall clock can be trusted."""

    monotonic: Callable[[], float] = time.monotonic
    unix: Callable[[], float] = time.time
    boot_id: str = ""
    synchronised: Callable[[], bool] = lambda: True


def system_clock() -> Clock:
    return Clock(boot_id=read_boot_id(), synchronised=is_synchronised)


class Anchor(msgspec.Struct, frozen=True):
    """A moment at which the wall clock was synchronised."""

    boot_id: str
    unix: float  # Unix seconds
    elapsed: float  # device time, seconds


class ClockMark(msgspec.Struct, frozen=True):
    """A moment on all clocks, as stored with each commit. `anchor`: the newest; None if there was none."""

    boot_id: str
    monotonic: float  # monotonic seconds
    unix: float  # Unix seconds
    elapsed: float  # device time, seconds
    anchor: Anchor | None = None


class DeviceTime:
    """The device's own time since its file was created: seconds that also pass over restarts and reboots.

    Call `restore` first. It does not depend on jumps of the wall clock:

    1. Within a boot the monotonic clock counts, also over restarts of the daemon.
    2. The time between two boots is counted once the wall clock is synchronised (by NTP, according to the kernel),
       from a moment at which it was synchronised before: a device without a battery clock starts in the past.
    3. If it never is synchronised, the time between two boots is not counted: entries live longer, none expires early.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._start = clock.monotonic()  # time 0 on the monotonic clock of this boot
        self._anchor: Anchor | None = None
        self._was_off = False  # set if the anchor is of an earlier boot, and the time since has not been counted yet

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
            self._start = min(self._start, now - elapsed)  # idempotent, so that each thread may run it
            self._was_off = False
        return now - self._start

    def unix(self) -> float:
        """Return the wall clock, Unix seconds, for display."""
        return self._clock.unix()

    def mark(self) -> ClockMark:
        elapsed, unix = self.now(), self._clock.unix()
        if self._clock.synchronised():
            self._anchor = Anchor(self._clock.boot_id, unix, elapsed)
        return ClockMark(self._clock.boot_id, self._clock.monotonic(), unix, elapsed, self._anchor)
