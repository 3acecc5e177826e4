"""The interface between serving and what takes an answer: a client, or the buffer of a shared generation."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol, TypeVar

import msgspec

from ..openai import CachedAnswer
from ..types import CacheStatus, Chunk, Embeddings, Route

Piece = Chunk | Embeddings
Head = TypeVar("Head", contravariant=True)


class AnswerHead(msgspec.Struct, frozen=True):
    """The content of the ``x-causeway-*`` response headers; final when the first byte is sent."""

    id: str  # of the decision
    policy: str  # name@revision
    route: Route
    target: str
    model: str
    reason: str
    cache: CacheStatus
    cache_reason: str = ""  # why the cache was bypassed
    degraded: bool = False
    loosened: str = ""  # offered tools whose arguments are not held to their schemas
    modalities: str = ""  # ``audio=ok,image=timeout``: of the parts that the target got as text or soft tokens


class Reply(Protocol[Head]):
    """Takes one answer: `commit` once, then `send` for each piece. After `commit` no other target may answer.

    Both wait while the consumer is slow, and raise ClientGone when it has disconnected. `send` returns what is to be
    awaited; None: the piece was taken at once, as nearly every token is.
    """

    async def commit(self, head: Head, /) -> None: ...

    def send(self, piece: Piece, /) -> Awaitable[None] | None: ...


class ClientReply(Reply[Head], Protocol[Head]):
    """The reply to one client, over HTTP or gRPC, in a live session or as a job's result."""

    @property
    def finished(self) -> bool:
        """Whether a streaming client has every choice's finish reason: only `end` may follow, and no error."""
        ...

    async def end(self) -> None:
        """Send what is left; the answer is complete."""
        ...


class ReplayingReply(ClientReply[AnswerHead], Protocol):
    """The reply to one client of a device, which also takes answers of the cache."""

    async def replay(self, head: AnswerHead, answer: CachedAnswer | Embeddings) -> None:
        """Take a complete answer from the cache, instead of `commit` and `send`."""
        ...
