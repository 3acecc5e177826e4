"""Deltas to chunks: each choice's text and tool calls, and the usage. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from router.errors import CausewayError, CloudFailed, StreamBroken
from router.reasoning import ReasoningParser, Thinking, thinks
from router.tool_calls.parser import ToolCallParser
from router.types import Chunk, FinishReason, Request, TokenLogprob, ToolCallDelta, Usage

from ..upstreams.triton.tensors import Delta

_FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


class AnswerBuilder:
    """The chunks of one answer: a choice for each sequence, n for each of the request's prompts.

    `thinking`: how the model thinks before its answers. `answer_id`: of the request, for the ids of its calls.
    """

    def __init__(self, request: Request, thinking: Thinking = "", answer_id: str = "") -> None:
        self._request = request
        if thinking and not thinks(request, thinking):
            thinking = ""
        self._choices = [_ChoiceBuilder(request, index, thinking, answer_id) for index in range(request.sequences)]
        self._completion_tokens = 0
        self._prompt_tokens = 0

    def echo(self) -> list[Chunk]:
        """Return the prompts as chunks if the request wants them echoed."""
        request = self._request
        if not request.echo:
            return []
        texts = [prompt for prompt in request.prompts if isinstance(prompt, str) for _ in range(request.n)]
        return [Chunk(text=text, index=index) for index, text in enumerate(texts) if text]

    def add(self, sequence: int, delta: Delta) -> list[Chunk]:
        """Return the chunks of one response to this sequence of the request. Raises CloudFailed."""
        if not delta.texts:
            return []
        self._completion_tokens += delta.new_tokens[0]
        choice = self._choices[sequence]
        chunks = choice.add(delta)
        if choice.ended and not choice.prompt_tokens and sequence % self._request.n == 0:
            # The backend sends the prompt's length with each response or with the last one only: count it once, and for
            # only one of the n sequences of a prompt.
            choice.prompt_tokens = delta.input_tokens
            self._prompt_tokens += delta.input_tokens
        return chunks

    @property
    def tokens(self) -> int:
        """Tokens of prompts and choices so far."""
        return self._prompt_tokens + self._completion_tokens

    @contextmanager
    def unless_ended(self) -> Iterator[None]:
        """Suppress an error once every choice has its finish reason: the answer is whole, and has no other end."""
        try:
            yield
        except CausewayError:
            if not self._ended:
                raise

    @property
    def _ended(self) -> bool:
        return all(choice.ended for choice in self._choices)

    def end(self) -> Chunk:
        """Return the usage chunk. Raises StreamBroken if a choice has no finish reason."""
        if not self._ended:
            raise StreamBroken("the model ended without a finish reason", phase="stream")
        thoughts = sum(choice.reasoning_tokens for choice in self._choices)
        return Chunk(usage=Usage(self._prompt_tokens, self._completion_tokens, reasoning_tokens=thoughts))


class _ChoiceBuilder:
    """Choice `index` of the answer: its text becomes text and tool calls."""

    def __init__(self, request: Request, index: int, thinking: Thinking, answer_id: str) -> None:
        self._index = index
        self._reasoning = ReasoningParser(inside=thinking == "open") if thinking else None
        self._parser = ToolCallParser(request, index, answer_id) if request.tools else None
        self.ended = False
        self.prompt_tokens = 0  # 0: not known yet, or counted for another choice

    def add(self, delta: Delta) -> list[Chunk]:
        """Return the chunks of a response. Raises CloudFailed for an unknown finish reason."""
        if self.ended:
            return []
        text, tokens, logprobs, name = delta.texts[0], delta.new_tokens[0], delta.logprobs[0], delta.finish_reasons[0]
        reason = None if name is None else _finish_reason(name)
        self.ended = reason is not None
        if self._parser is not None or self._reasoning is not None:
            return self._parse(text, tokens, logprobs, reason)
        if not (text or reason or tokens or logprobs):
            return []
        return [Chunk(text=text, index=self._index, tokens=tokens, logprobs=logprobs, finish_reason=reason)]

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self._reasoning is None else self._reasoning.tokens

    def _parse(
        self,
        text: str,
        tokens: int,
        logprobs: tuple[TokenLogprob, ...],
        reason: FinishReason | None,
    ) -> list[Chunk]:
        thought, calls = "", tuple[ToolCallDelta, ...]()
        if self._reasoning is not None:
            thought, text = self._reasoning.feed(text, tokens)
            if reason is not None:
                last_thought, rest = self._reasoning.finish()
                thought, text = thought + last_thought, text + rest
        if self._parser is not None:
            text, calls = self._parser.feed(text)
            if reason is not None:
                rest, last = self._parser.finish(cut=reason == "length")
                text, calls = text + rest, (*calls, *last)
            if reason == "stop" and self._parser.called:
                reason = "tool_calls"
        if not (text or thought or calls or reason or tokens or logprobs):
            return []
        chunk = Chunk(text=text, index=self._index, tokens=tokens, logprobs=logprobs, finish_reason=reason)
        return [msgspec.structs.replace(chunk, tool_calls=calls, reasoning=thought) if calls or thought else chunk]


def _finish_reason(name: str) -> FinishReason:
    reason = _FINISH_REASONS.get(name)
    if reason is None:
        raise CloudFailed(f"the model ended the answer with {name!r}", phase="stream")
    return reason
