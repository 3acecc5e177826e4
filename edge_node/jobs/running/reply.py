"""The answer of a job, as a `Reply` of the service: collected, shown while it is made, and encoded as OpenAI's body."""

from __future__ import annotations

import msgspec

from router.openai import AnswerEncoder, CachedAnswer, coalesce
from router.types import Chunk, Embeddings, Request

from ...serving.reply import AnswerHead, Piece
from ..feed import RunningText


class JobReply:
    """Collects one answer. `body` follows `end`. `text` shows it, if there is one choice."""

    def __init__(self, request: Request, decision: str, created: int, text: RunningText) -> None:
        self._request = msgspec.structs.replace(request, stream=False)
        self._id = ("chatcmpl-" if request.kind == "chat" else "cmpl-") + decision
        self._created = created
        self._text = text if request.sequences == 1 else None
        self._unfinished = request.sequences
        self._chunks: list[Chunk] = []
        self._cached: bytes | None = None
        self.head: AnswerHead | None = None

    async def commit(self, head: AnswerHead) -> None:
        self.head = head

    async def send(self, piece: Piece) -> None:
        if not isinstance(piece, Chunk):
            return
        self._chunks.append(piece)
        self._unfinished -= piece.finish_reason is not None
        if self._text is not None and piece.text:
            self._text.append(piece.text)

    @property
    def finished(self) -> bool:
        return self._unfinished <= 0

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
