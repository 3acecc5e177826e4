"""Time as an argument: monotonic seconds for durations and deadlines, Unix seconds for what people read.

The monotonic clock is that of asyncio's loops, so a deadline means the same everywhere in the process. On Linux it
counts from boot, so together with the boot id it is also valid across restarts of the process: the cache computes an
entry's age from it, even if the wall clock was set in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def read_boot_id() -> str:
    """The boot id, or "" where the kernel provides none: then only the wall clock is valid across restarts."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


class Clock(msgspec.Struct, frozen=True):
    """Both clocks, and the boot in which `monotonic` counts. Tests pass their own functions."""

    monotonic: Callable[[], float] = time.monotonic
    unix: Callable[[], float] = time.time
    boot_id: str = ""


def system_clock() -> Clock:
    return Clock(boot_id=read_boot_id())
