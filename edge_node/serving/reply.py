"""The seam between the service and whoever reads the answer: a streaming client, a whole body, a flight's listeners."""

from __future__ import annotations

from typing import Protocol

import msgspec

from router.openai import CachedAnswer
from router.types import CacheStatus, Chunk, Embeddings, Route

Piece = Chunk | Embeddings


class AnswerHead(msgspec.Struct, frozen=True):
    """What the ``x-causeway-*`` headers say; complete when the first byte leaves."""

    id: str
    policy: str  # name@revision
    route: Route
    target: str
    model: str
    reason: str
    cache: CacheStatus
    degraded: bool = False


class Sink(Protocol):
    """`commit` once, before the first `send`: from there on no other target may answer.

    Both may block while the reader is slow, and raise ClientGone when nobody reads any more.
    """

    async def commit(self, head: AnswerHead) -> None: ...

    async def send(self, piece: Piece) -> None: ...


class Reply(Sink, Protocol):
    """A client's side. It also takes an answer that is there already, at once; `end` lets the last byte go."""

    async def replay(self, head: AnswerHead, answer: CachedAnswer | Embeddings) -> None: ...

    async def end(self) -> None: ...
