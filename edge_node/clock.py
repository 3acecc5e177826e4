"""Time as an argument. Monotonic seconds for durations and deadlines, Unix seconds for what people read.

The monotonic clock is the one that asyncio's loops use, so a deadline means the same to everybody in the process.
On Linux it counts from boot, so with the boot's id it outlives the process too: `cache` relies on that to know an
entry's age even when the wall clock was set in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def read_boot_id() -> str:
    """This boot's id, or "" where the kernel tells none: then only the wall clock is left."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


class Clock(msgspec.Struct, frozen=True):
    """Both clocks and the boot in which `monotonic` counts. Tests pass their own functions."""

    monotonic: Callable[[], float] = time.monotonic
    unix: Callable[[], float] = time.time
    boot_id: str = ""


def system_clock() -> Clock:
    return Clock(boot_id=read_boot_id())
