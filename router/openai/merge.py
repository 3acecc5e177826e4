"""A streamed answer put together, one chunk per choice: what a whole answer is made from, and what a cache keeps."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import StreamBroken
from ..types import Chunk, Confidence, FinishReason, TokenLogprob, ToolCallDelta, Usage


def coalesce(chunks: Iterable[Chunk]) -> tuple[tuple[Chunk, ...], Usage]:
    """One finished chunk per choice, by index, and the usage of all.

    Without a reported usage the streamed tokens are counted. Raises StreamBroken if a choice has no finish_reason, or
    there is no choice.
    """
    choices: dict[int, _MergedChoice] = {}
    usage: Usage | None = None
    for chunk in chunks:
        if chunk.usage is not None:
            usage = chunk.usage
        choice = choices.get(chunk.index)
        if choice is None:
            choice = choices[chunk.index] = _MergedChoice()
        choice.add(chunk)
    # A chunk that has nothing but the usage says index 0, which may be no choice of this answer.
    whole = tuple([choice.end(index) for index, choice in sorted(choices.items()) if choice.seen])
    if not whole:
        raise StreamBroken("The answer has no choice. Ask again.", phase="stream")
    return whole, usage or Usage(completion_tokens=sum(chunk.tokens for chunk in whole))


class _MergedCall:
    __slots__ = ("arguments", "id", "name")

    def __init__(self) -> None:
        self.id: str | None = None
        self.name: str | None = None
        self.arguments: list[str] = []


class _MergedChoice:
    __slots__ = (
        "calls",
        "confidence",
        "finish_reason",
        "logprobs",
        "refusal",
        "refused",
        "resume",
        "seen",
        "text",
        "tokens",
    )

    def __init__(self) -> None:
        self.seen = False
        self.text: list[str] = []
        self.tokens = 0
        self.calls: dict[int, _MergedCall] = {}
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None
        self.confidence: Confidence | None = None
        self.refusal: list[str] = []
        self.refused = False
        self.resume = ""

    def add(self, chunk: Chunk) -> None:
        if chunk.text:
            self.text.append(chunk.text)
        self.tokens += chunk.tokens
        if chunk.logprobs:
            self.logprobs.extend(chunk.logprobs)
        for delta in chunk.tool_calls:
            self._call(delta)
        if chunk.refusal is not None:
            self.refusal.append(chunk.refusal)
            self.refused = True
        self.confidence = chunk.confidence or self.confidence
        self.finish_reason = chunk.finish_reason or self.finish_reason
        self.resume = chunk.resume or self.resume
        self.seen = self.seen or chunk.usage is None or bool(chunk.text or chunk.finish_reason or chunk.tokens)

    def _call(self, delta: ToolCallDelta) -> None:
        call = self.calls.setdefault(delta.index, _MergedCall())
        call.id = call.id or delta.id
        call.name = call.name or delta.name
        call.arguments.append(delta.arguments)

    def end(self, index: int) -> Chunk:
        if self.finish_reason is None:
            raise StreamBroken(f"Choice {index} stopped before its end. Ask again.", phase="stream")
        return Chunk(
            text="".join(self.text),
            index=index,
            tokens=self.tokens,
            tool_calls=tuple(
                [
                    ToolCallDelta(at, "".join(call.arguments), call.id, call.name)
                    for at, call in sorted(self.calls.items())
                ]
            ),
            logprobs=tuple(self.logprobs),
            finish_reason=self.finish_reason,
            confidence=self.confidence,
            refusal="".join(self.refusal) if self.refused else None,
            resume=self.resume,
        )
