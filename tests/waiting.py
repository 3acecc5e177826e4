"""Wait for what runs beside a test: another task, another process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


async def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Poll a condition that no event tells of."""
    ends = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends, "it did not happen in time"
        await asyncio.sleep(0.005)
