"""Which boxes a share holds. The point of a device never changes within a rollout, so stages nest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

SHARES = 100_000
"""The whole: a share is an integer from 0 to this."""


def share_point(salt: str, device: str) -> int:
    """Return the device's place in 0..99,999: it is a member of every share that is larger.

    The salt is the rollout's own: each rollout tries other boxes first, and the split into canary and control is random
    (which the verdict's randomisation test relies on). A device that is enrolled later has a point like any other.
    """
    return int.from_bytes(hashlib.sha256(f"{salt}:{device}".encode()).digest(), "big") % SHARES


def stage_share(share: int, points: Iterable[int]) -> int:
    """Return `share`, or the least larger share that holds one box.

    Args:
        share: The stage's share as planned, of 100,000.
        points: `share_point` of each device that the rollout may change (neither pinned nor held).
    """
    first = min(points, default=None)
    return share if first is None else max(share, first + 1)
