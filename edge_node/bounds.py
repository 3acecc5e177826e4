"""A deadline around awaits: `async with timeout_at(when)`, which raises `asyncio.TimeoutError`.

It is asyncio's own, which Python 3.10 has under another name; a request passes several, and anyio's scopes cost three
times as much.
"""

from __future__ import annotations

import sys

__all__ = ["Timeout", "move", "timeout_at"]

if sys.version_info >= (3, 11):
    from asyncio import Timeout, timeout_at

    def move(bound: Timeout, when: float) -> None:
        """From now on it ends at `when`."""
        bound.reschedule(when)

else:  # aiohttp brings it along there
    from async_timeout import Timeout, timeout_at

    def move(bound: Timeout, when: float) -> None:
        bound.update(when)
