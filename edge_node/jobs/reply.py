"""The answer of a job, as a `Reply` of the service: collected, and encoded as OpenAI's body."""

from __future__ import annotations

from router.openai import AnswerEncoder, CachedAnswer, coalesce
from router.types import Chunk, Embeddings, Request

from ..serving.reply import AnswerHead, Piece


class JobReply:
    """Collects one answer. `body` follows `end`."""

    def __init__(self, request: Request, decision: str, created: int) -> None:
        self._request = request
        self._id = ("chatcmpl-" if request.kind == "chat" else "cmpl-") + decision
        self._created = created
        self._chunks: list[Chunk] = []
        self._cached: bytes | None = None
        self.head: AnswerHead | None = None

    async def commit(self, head: AnswerHead) -> None:
        self.head = head

    async def send(self, piece: Piece) -> None:
        if isinstance(piece, Chunk):
            self._chunks.append(piece)

    @property
    def finished(self) -> bool:
        return False

    async def replay(self, head: AnswerHead, answer: CachedAnswer | Embeddings) -> None:
        self.head = head
        if isinstance(answer, CachedAnswer):
            self._cached = answer.whole(self._id, self._created)

    async def end(self) -> None:
        """Nothing is left to send."""

    def body(self) -> bytes:
        """The complete answer, JSON."""
        if self._cached is not None:
            return self._cached
        assert self.head is not None
        encoder = AnswerEncoder(self._request, self._id, self.head.model, self._created)
        return encoder.whole(*coalesce(self._chunks))
