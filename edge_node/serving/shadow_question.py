"""What a shadow request asks: an answer as it passed to its client, and the same question for the other target."""

from __future__ import annotations

from collections.abc import Awaitable

import msgspec

from router.serving.reply import AnswerHead, Piece, Reply
from router.types import Chunk, Confidence, Request, RoutingHints, Target

from ..backends.backend import UpstreamInfo
from .attempts import with_temperature
from .generation import Generation

_CONFIDENCE_TOKENS = 24  # where the route has no handoff
MOST_CHARACTERS = 32_768  # of a prompt or an answer that is compared
_LONGER, _MORE_TOKENS = 4, 64  # the other answer may have so many times the tokens, and so many more
_CHARACTERS_PER_TOKEN = 2  # nearly always more; for the most that a prompt may cost


class ShadowTap:
    """Passes an answer on to its reply, and keeps its text for the comparison."""

    def __init__(self, generation: Generation, reply: Reply[AnswerHead], prompt: str) -> None:
        self.generation = generation
        self.prompt = prompt
        self.answer = ShadowText()
        self._reply = reply

    async def commit(self, head: AnswerHead) -> None:
        await self._reply.commit(head)

    def send(self, piece: Piece) -> Awaitable[None] | None:
        if isinstance(piece, Chunk):
            self.answer.add(piece)
        return self._reply.send(piece)


class ShadowText:
    """An answer's text, and the confidence of its first tokens."""

    def __init__(self) -> None:
        self.tokens = 0
        self.confidence: Confidence | None = None
        self.ended = False  # `confidence` covers all tokens
        self.usage_tokens = 0
        self.degraded = False  # another model than the target's answered
        self._pieces: list[str] = []
        self._characters = 0
        self._finish_reason = ""

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def complete(self) -> bool:
        """Whether the model ended it, and it is short enough to be compared."""
        return self._finish_reason == "stop" and self._characters <= MOST_CHARACTERS

    def set_upstream(self, info: UpstreamInfo) -> None:
        self.degraded = info.degraded

    def add(self, chunk: Chunk) -> None:
        self.tokens += chunk.tokens
        if chunk.usage is not None:
            self.usage_tokens = chunk.usage.prompt_tokens + chunk.usage.completion_tokens
        if chunk.confidence is not None:
            self.confidence, self.ended = chunk.confidence, chunk.finish_reason is not None
        self._finish_reason = chunk.finish_reason or self._finish_reason
        self._characters += len(chunk.text)
        if self._characters <= MOST_CHARACTERS:
            self._pieces.append(chunk.text)


class ShadowQuestion(msgspec.Struct, frozen=True):
    """An answer that is complete, and the target that is asked the same. `since`: monotonic seconds."""

    generation: Generation
    prompt: str
    answer: ShadowText
    answered: Target
    other: Target
    since: float

    @property
    def route(self) -> str:
        return "" if self.generation.decision is None else self.generation.decision.rule

    @property
    def after(self) -> int:
        """The number of tokens that the route's handoff waits for, or would."""
        decision = self.generation.decision
        plans = () if decision is None else decision.attempts
        return next((plan.handoff.after_tokens for plan in plans if plan.handoff is not None), _CONFIDENCE_TOKENS)

    @property
    def answer_tokens(self) -> int:
        """The limit of the other answer: one that is much longer does not agree."""
        return _LONGER * max(self.answer.tokens, self.generation.usage.completion_tokens) + _MORE_TOKENS

    @property
    def most_usd(self) -> float:
        """The most that the other answer may cost, US dollars."""
        request = self.generation.request
        characters = sum(len(str(message.content or "")) for message in request.messages) + len(self.prompt)
        prompt_tokens = max(self.generation.usage.prompt_tokens, characters / _CHARACTERS_PER_TOKEN)
        return (prompt_tokens + self.answer_tokens) / 1000.0 * self.other.usd_per_1k_tokens

    @property
    def as_shadow(self) -> Request:
        """The request for the other target: whole, bulk, and with a bound that its price is known by."""
        request = with_temperature(self.generation.request, self.other)
        limit = self.answer_tokens if request.max_tokens is None else min(self.answer_tokens, request.max_tokens)
        hints = RoutingHints(tags=("bulk",))
        return msgspec.structs.replace(
            request, stream=False, include_usage=False, logprobs=None, max_tokens=limit, hints=hints
        )
