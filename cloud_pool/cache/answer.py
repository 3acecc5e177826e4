"""What the cache says about an answer, and what it keeps of one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Literal

import msgspec

from router.types import Chunk

from ..call import Call, Head, Piece

Status = Literal["hit", "stale", "miss", "coalesced", "bypass"]
Make = Callable[[Call], AsyncGenerator[Piece, None]]
"""The service: a Head, then Chunks. Raises CausewayError; closing it stops the work."""


class Kept(msgspec.Struct, frozen=True):
    """An answer from Redis, each choice in one piece."""

    head: Head
    chunks: tuple[Chunk, ...]
    age_s: float
