"""Time as an argument: monotonic seconds for durations and deadlines, Unix seconds for what people read.

The monotonic clock is that of asyncio's loops, so a deadline means the same everywhere in the process. On Linux it
counts from boot, so together with the boot id it is also valid across restarts of the process: the cache computes an
entry's age from it, even if the wall clock was set in between. Between two boots only a wall clock that is
synchronised says how much time has passed.
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
    """The boot id, or "" where the kernel provides none: then only the wall clock is valid across restarts."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def is_synchronised() -> bool:
    """Return whether the kernel knows that the wall clock is synchronised, as NTP clients tell it (adjtimex(2)).

    A date that is set by hand ends it, and so does a boot. Other systems than Linux do not tell: True.
    """
    if not sys.platform.startswith("linux"):
        return True
    state = int(_libc().adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES)))  # all zeros: read only
    return state >= 0 and state != _TIME_ERROR


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


class Clock(msgspec.Struct, frozen=True):
    """Both clocks, and the boot in which `monotonic` counts. Tests pass their own functions.

    `synchronised`: whether the wall clock can be trusted across boots.
    """

    monotonic: Callable[[], float] = time.monotonic
    unix: Callable[[], float] = time.time
    boot_id: str = ""
    synchronised: Callable[[], bool] = lambda: True


def system_clock() -> Clock:
    return Clock(boot_id=read_boot_id(), synchronised=is_synchronised)
