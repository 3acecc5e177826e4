"""What the cache says about an answer, and what it keeps of one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Literal

import msgspec

from router.types import Chunk

from ..serving.request_context import AnswerHead, Piece, RequestContext

CacheStatus = Literal["hit", "stale", "miss", "coalesced", "bypass"]
Generate = Callable[[RequestContext], AsyncGenerator[Piece, None]]
"""The service: a Head, then Chunks. Raises CausewayError; closing it stops the work."""


class CachedAnswer(msgspec.Struct, frozen=True):
    """An answer from Redis, each choice in one piece."""

    head: AnswerHead
    chunks: tuple[Chunk, ...]
    age_s: float
