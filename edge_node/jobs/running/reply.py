"""The answer of a job, as a `Reply` of the service: collected, shown while it is made, and encoded as OpenAI's body."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from router.openai import AnswerEncoder, CachedAnswer, ResponseEncoder, coalesce, encode_embeddings
from router.serving.reply import AnswerHead, Piece
from router.types import Chunk, Embeddings, Request

from ..feed import RunningText

MakeEncoder = Callable[[Request, str, str, int], AnswerEncoder | ResponseEncoder]
"""Request, id, the model and the Unix time (s) → the encoder of its answer in text."""


class JobReply:
    """Collects one answer. `body` follows `end`. `text` shows it, if there is one choice."""

    def __init__(
        self, request: Request, make_encoder: MakeEncoder, decision: str, created: int, text: RunningText
    ) -> None:
        self._request = msgspec.structs.replace(request, stream=False)
        self._make_encoder = make_encoder
        self._decision = decision
        self._created = created
        self._text = text if request.sequences == 1 else None
        self._unfinished = request.sequences
        self._chunks: list[Chunk] = []
        self._cached: CachedAnswer | None = None
        self._embeddings: Embeddings | None = None
        self.head: AnswerHead | None = None

    async def commit(self, head: AnswerHead) -> None:
        self.head = head

    async def send(self, piece: Piece) -> None:
        if isinstance(piece, Embeddings):
            self._embeddings = piece
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
            self._cached = answer
        else:
            self._embeddings = answer

    async def end(self) -> None:
        """Nothing is left to send."""

    def body(self) -> bytes:
        """The complete answer, JSON."""
        assert self.head is not None
        if self._embeddings is not None:
            return encode_embeddings(self._request, self._embeddings, self.head.model)
        if self._cached is not None:
            encoder = self._make_encoder(self._request, self._decision, self._cached.model, self._created)
            return encoder.whole(self._cached.choices, self._cached.usage)
        encoder = self._make_encoder(self._request, self._decision, self.head.model, self._created)
        return encoder.whole(*coalesce(self._chunks))
