"""Deltas → chunks: each choice's text and tool calls, and what was used. Pure."""

from __future__ import annotations

import msgspec

from router.errors import CloudFailed, StreamBroken
from router.tool_calls.parser import ToolCallParser
from router.types import Chunk, FinishReason, Request, TokenLogprob, Usage

from ..upstreams.triton.tensors import Delta

_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


class AnswerBuilder:
    """The n choices of each of an ask's `prompts`."""

    def __init__(self, request: Request, prompts: int) -> None:
        self._request = request
        self._choices = [ChoiceBuilder(request, index) for index in range(prompts * request.n)]
        self._made = 0
        self._read = 0

    def echo(self) -> list[Chunk]:
        """The prompts, where they are asked back."""
        request = self._request
        if not request.echo:
            return []
        texts = [prompt for prompt in request.prompts if isinstance(prompt, str) for _ in range(request.n)]
        return [Chunk(text=text, index=at) for at, text in enumerate(texts) if text]

    def take(self, prompt: int, delta: Delta) -> list[Chunk]:
        """What this response says about the choices of prompt number `prompt`. Raises CloudFailed."""
        # The backend says the prompt's length with each response or with the last one only: count it once.
        if delta.final:
            self._read += delta.input_tokens
        if len(delta.texts) == 1:
            self._made += delta.new_tokens[0]
            return self._choices[prompt * self._request.n].take(delta, 0)
        self._made += sum(delta.new_tokens)
        first = prompt * self._request.n
        return [chunk for at in range(len(delta.texts)) for chunk in self._choices[first + at].take(delta, at)]

    @property
    def tokens(self) -> int:
        """Of prompts and choices, as far as they were told."""
        return self._read + self._made

    def end(self) -> Chunk:
        """What was used. Raises StreamBroken for an answer that has no end."""
        if not all(choice.ended for choice in self._choices):
            raise StreamBroken("the model ended without saying why", phase="stream")
        return Chunk(usage=Usage(self._read, self._made))


class ChoiceBuilder:
    """Choice `index` of the answer: its text becomes text and tool calls."""

    def __init__(self, request: Request, index: int) -> None:
        self._index = index
        self._parser = ToolCallParser(request) if request.tools else None
        self.ended = False

    def take(self, delta: Delta, at: int) -> list[Chunk]:
        """What sequence `at` of this response says. Raises CloudFailed for an end that is none."""
        if self.ended:
            return []
        text, tokens, logprobs = delta.texts[at], delta.new_tokens[at], delta.logprobs[at]
        said = delta.finish_reasons[at]
        reason = None if said is None else _finish_reason(said)
        self.ended = reason is not None
        if self._parser is not None:
            return self._parsed(text, tokens, logprobs, reason)
        if not (text or reason or tokens or logprobs):
            return []
        return [Chunk(text=text, index=self._index, tokens=tokens, logprobs=logprobs, finish_reason=reason)]

    def _parsed(
        self, text: str, tokens: int, logprobs: tuple[TokenLogprob, ...], reason: FinishReason | None
    ) -> list[Chunk]:
        assert self._parser is not None
        text, calls = self._parser.feed(text)
        if reason is not None:
            rest, last = self._parser.finish()
            text, calls = text + rest, (*calls, *last)
        if reason == "stop" and self._parser.called:
            reason = "tool_calls"
        if not (text or calls or reason or tokens or logprobs):
            return []
        chunk = Chunk(text=text, index=self._index, tokens=tokens, logprobs=logprobs, finish_reason=reason)
        return [msgspec.structs.replace(chunk, tool_calls=calls) if calls else chunk]


def _finish_reason(said: str) -> FinishReason:
    reason = _REASONS.get(said)
    if reason is None:
        raise CloudFailed(f"the model ended the answer with {said!r}", phase="stream")
    return reason
