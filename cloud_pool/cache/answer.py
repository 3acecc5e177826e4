"""What travels: an answer's head, its pieces, and where they came from."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Literal

import msgspec

from router.types import Chunk

from ..service import Call

Status = Literal["hit", "stale", "miss", "coalesced", "bypass"]


class Head(msgspec.Struct, frozen=True):
    """What is known once the first piece is: response headers about the answer, the same for all who get it.

    `keep` False: an answer of second choice, for those who wait for it and not for later ones. `stale_s`: the age of an
    old answer that stands in for a refusal.
    """

    headers: tuple[tuple[str, str], ...] = ()
    keep: bool = True
    stale_s: float | None = None


class Kept(msgspec.Struct, frozen=True):
    """An answer from Redis, each choice in one piece."""

    head: Head
    chunks: tuple[Chunk, ...]
    age_s: float


Piece = Head | Chunk
Make = Callable[[Call], AsyncGenerator[Piece, None]]
"""The service: a Head, then Chunks. Raises CausewayError; closing it stops the work."""
