"""An OpenAI-compatible server's answers → Chunks, whole or streamed, in the dialects of OpenAI, vLLM and NIM.

Tolerated: null or missing content, role and usage; usage on every chunk; a missing ``[DONE]`` after every choice has
ended; tool calls without index or id; thoughts as ``reasoning_content`` or ``reasoning``; unknown fields. Bytes that
are not an answer raise CloudFailed; an answer that stops before its end raises StreamBroken.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from ..errors import BackendError, CloudFailed, Phase, StreamBroken
from ..types import Chunk, FinishReason, TokenAlternative, TokenLogprob, ToolCallDelta, Usage
from .completions import read_token_text
from .event_template import EventTemplate, split_event


class _ReplyFunction(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ReplyCall(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: _ReplyFunction | None = None


class _ReplyMessage(msgspec.Struct):
    content: str | None = None
    tool_calls: list[_ReplyCall] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None  # DeepSeek, vLLM, our gateway
    reasoning: object = None  # newer releases of vLLM, OpenRouter

    @property
    def thought(self) -> str:
        return self.reasoning_content or (self.reasoning if isinstance(self.reasoning, str) else "")


class _ReplyAlternative(msgspec.Struct):
    token: str
    logprob: float | None = None
    bytes: tuple[int, ...] | None = None


class _ReplyToken(msgspec.Struct):
    token: str
    logprob: float | None = None
    bytes: tuple[int, ...] | None = None
    top_logprobs: list[_ReplyAlternative] | None = None


class _ReplyLogprobs(msgspec.Struct):
    content: list[_ReplyToken] | None = None  # chat
    tokens: list[str] | None = None  # completions: parallel lists
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class _ReplyChoice(msgspec.Struct):
    index: int = 0
    delta: _ReplyMessage | None = None
    message: _ReplyMessage | None = None
    text: str | None = None
    logprobs: _ReplyLogprobs | None = None
    finish_reason: str | None = None


class _ReplyDetail(msgspec.Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _ReplyUsage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _ReplyDetail | None = None
    completion_tokens_details: _ReplyDetail | None = None


class _Answer(msgspec.Struct):
    choices: list[_ReplyChoice] | None = None
    usage: _ReplyUsage | None = None
    error: object = None
    kind: str | None = msgspec.field(default=None, name="object")
    message: object = None  # vLLM's error is {"object": "error", "message": …}
    causeway: object = None  # our gateway's {"continue": token}, with the end of an answer that it cut short


_DECODER = msgspec.json.Decoder(_Answer)
_SPLITS: Final = 4  # events of a stream that may become its template; some servers vary a field from event to event
_PROBE: Final = "another text"

_FINISH: Final[dict[str, FinishReason]] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "content_filter": "content_filter",
    "function_call": "tool_calls",
    # The names of Text Generation Inference and other servers.
    "eos_token": "stop",
    "eos": "stop",
    "stop_sequence": "stop",
    "end_turn": "stop",
    "max_tokens": "length",
}


def decode_answer(body: bytes) -> list[Chunk]:
    """Decode a whole answer: one chunk per choice, then one with the usage if it is reported. Raises CloudFailed."""
    answer = _read(body, "first_token")
    if not answer.choices:
        raise CloudFailed("The target's answer has no choices.")
    usage = _usage(answer.usage)
    tokens = usage.completion_tokens if usage is not None and len(answer.choices) == 1 else 0
    chunks = [_whole(choice, tokens) for choice in answer.choices]
    chunks[0] = _with_token(chunks[0], answer)
    return chunks if usage is None else [*chunks, Chunk(usage=usage)]


class StreamDecoder:
    """Decodes a streamed answer, event by event: `feed` the data of each event, then `finish` at the end of the bytes.

    The usage comes once, as the last chunk, whether the target reports it at the end or with every chunk.
    """

    def __init__(self) -> None:
        self.done = False  # [DONE] was read: everything after it is ignored
        self._unfinished: set[int] = set()
        self._seen = False
        self._usage: Usage | None = None
        self._named: set[tuple[int, int]] = set()  # (choice, call) whose id was passed on
        self._template: EventTemplate | None = None  # of the events that are text alone
        self._framed: EventTemplate | None = None  # of the same as they are sent
        self._splits = 0

    def feed(self, event_data: bytes) -> list[Chunk]:
        """Return the chunks of one event. Raises CloudFailed for an error object, or for data that is not an answer."""
        if self.done:
            return []
        if self._template is not None and (text := self._template.text(event_data)):
            return [self._text(text, self._template.index)]
        if event_data == b"[DONE]" or event_data.strip() == b"[DONE]":
            return self._done()
        answer = _read(event_data, self._phase)
        if answer.usage is not None:
            self._usage = _usage(answer.usage)
        chunks = []
        for choice in answer.choices or ():
            chunk = self._chunk(choice)
            if chunk is not None:
                chunks.append(_with_token(chunk, answer))
        if len(chunks) == 1 and self._splits < _SPLITS:
            self._learn(event_data, answer, chunks[0])
        return chunks

    def feed_text(self, data: bytes) -> Chunk | None:
        """Return the chunk of `data` if that is one whole event of text alone, as it is sent; else do nothing."""
        if self._framed is None or self.done:
            return None
        text = self._framed.text(data)
        return self._text(text, self._framed.index) if text else None

    def _text(self, text: str, index: int) -> Chunk:
        self._unfinished.add(index)
        return Chunk(text, index, 1)

    def _learn(self, event_data: bytes, answer: _Answer, chunk: Chunk) -> None:
        """Remember an event of text alone, once it is certain that its bytes around the text mean the same."""
        if chunk != Chunk(chunk.text, chunk.index, 1) or answer.usage is not None or len(answer.choices or ()) != 1:
            return
        self._splits += 1
        template = split_event(event_data, chunk.text, chunk.index)
        if template is None:
            return
        probe = _read(template.filled(_PROBE), self._phase)
        if _with_text(probe, _PROBE, chunk.text) == answer:
            self._template, self._framed = template, template.framed()

    def finish(self) -> list[Chunk]:
        """Return the last chunks at the end of the bytes. Raises StreamBroken if a choice has no end, or none came."""
        if self.done:
            return []
        if self._unfinished or not self._seen:
            raise StreamBroken("The target's stream stopped before its end.", phase=self._phase)
        return self._done()

    @property
    def _phase(self) -> Phase:
        return "stream" if self._seen else "first_token"

    def _done(self) -> list[Chunk]:
        if not self._seen:
            raise CloudFailed("The target's stream has no choices.")
        self.done = True
        # The target reports that it is done, so a choice without finish_reason counts as finished.
        chunks = [Chunk(index=index, finish_reason="stop") for index in sorted(self._unfinished)]
        self._unfinished.clear()
        return chunks if self._usage is None else [*chunks, Chunk(usage=self._usage)]

    def _chunk(self, choice: _ReplyChoice) -> Chunk | None:
        index = choice.index
        finish = _finish(choice.finish_reason, self._phase)
        self._seen = True
        if finish is None:
            self._unfinished.add(index)
        else:
            self._unfinished.discard(index)
        delta = choice.delta
        text = (choice.text if delta is None else delta.content) or ""
        logprobs = () if choice.logprobs is None else _logprobs(choice.logprobs)
        calls = () if delta is None or not delta.tool_calls else self._calls(index, delta.tool_calls)
        refusal = None if delta is None else delta.refusal or None
        thought = "" if delta is None else delta.thought
        if not (text or logprobs or calls or finish or refusal or thought):
            return None  # only a role, or fields that are not passed on
        tokens = len(logprobs) or (1 if text or calls or thought else 0)
        return Chunk(text, index, tokens, calls, logprobs, finish, None, None, refusal, reasoning=thought)

    def _calls(self, choice: int, wire: list[_ReplyCall]) -> tuple[ToolCallDelta, ...]:
        calls = []
        for at, call in enumerate(wire):
            index = at if call.index is None else call.index
            first = (choice, index) not in self._named
            self._named.add((choice, index))
            calls.append(_call(call, index, first=first))
        return tuple(calls)


def _read(data: bytes, phase: Phase) -> _Answer:
    try:
        answer = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CloudFailed(f"The target's answer is malformed: {error}.", phase=phase) from None
    if answer.error is not None or answer.kind == "error":
        raise _reported_error(answer, phase)
    return answer


def _with_text(answer: _Answer, text: str, replacement: str) -> _Answer:
    """Replace the text of the only choice, if that is `text`."""
    for choice in answer.choices or ():
        if choice.delta is None and choice.text == text:
            choice.text = replacement
        elif choice.delta is not None and choice.delta.content == text:
            choice.delta.content = replacement
    return answer


def _with_token(chunk: Chunk, answer: _Answer) -> Chunk:
    """Attach the continue token to the end of the answer; such an answer has one choice."""
    token = answer.causeway.get("continue") if isinstance(answer.causeway, dict) else None
    if chunk.finish_reason != "length" or not isinstance(token, str):
        return chunk
    return msgspec.structs.replace(chunk, resume=token)


def _reported_error(answer: _Answer, phase: Phase) -> BackendError:
    message = answer.message if answer.error is None else answer.error
    if isinstance(message, dict):
        message = message.get("message", message.get("code", "no message"))
    return CloudFailed(f"The target reported: {str(message)[:500]}", phase=phase)


def _whole(choice: _ReplyChoice, tokens: int) -> Chunk:
    message = choice.message
    wire = [] if message is None else message.tool_calls or []
    calls = tuple([_call(call, at, first=True) for at, call in enumerate(wire)])
    logprobs = () if choice.logprobs is None else _logprobs(choice.logprobs)
    return Chunk(
        text=(choice.text if message is None else message.content) or "",
        index=choice.index,
        tokens=tokens or len(logprobs),
        tool_calls=calls,
        logprobs=logprobs,
        finish_reason=_finish(choice.finish_reason, "first_token") or ("tool_calls" if calls else "stop"),
        refusal=None if message is None else message.refusal,
        reasoning="" if message is None else message.thought,
    )


def _finish(reason: str | None, phase: Phase) -> FinishReason | None:
    if reason is None or reason == "":
        return None
    finish = _FINISH.get(reason)
    if finish is None:
        # "abort", "error", "insufficient_system_resource": reported as `stop`, half an answer would look complete.
        raise CloudFailed(f"The target ended its answer with finish_reason {reason[:64]!r}.", phase=phase)
    return finish


def _call(call: _ReplyCall, index: int, *, first: bool) -> ToolCallDelta:
    function = call.function or _ReplyFunction()
    identity = call.id or (f"call_{index}" if first else None)
    return ToolCallDelta(index, function.arguments or "", identity if first else None, function.name or None)


def _usage(wire: _ReplyUsage | None) -> Usage | None:
    if wire is None:
        return None
    cached = 0 if wire.prompt_tokens_details is None else wire.prompt_tokens_details.cached_tokens or 0
    thought = 0 if wire.completion_tokens_details is None else wire.completion_tokens_details.reasoning_tokens or 0
    return Usage(wire.prompt_tokens or 0, wire.completion_tokens or 0, cached, thought)


def _logprobs(wire: _ReplyLogprobs) -> tuple[TokenLogprob, ...]:
    if wire.content is not None:
        return tuple([_token(token) for token in wire.content])
    tokens = wire.tokens or []
    chosen = wire.token_logprobs or [None] * len(tokens)
    tops = wire.top_logprobs or [None] * len(tokens)
    # Lists of different lengths: only the common prefix is complete.
    return tuple(
        [_named_token(token, logprob, top or {}) for token, logprob, top in zip(tokens, chosen, tops, strict=False)]
    )


def _named_token(name: str, logprob: float | None, top: dict[str, float]) -> TokenLogprob:
    text, raw = read_token_text(name)
    return TokenLogprob(text, _number(logprob), raw, tuple([_named_alternative(*item) for item in top.items()]))


def _named_alternative(name: str, logprob: float) -> TokenAlternative:
    text, raw = read_token_text(name)
    return TokenAlternative(text, logprob, raw)


def _token(wire: _ReplyToken) -> TokenLogprob:
    top = tuple([TokenAlternative(t.token, _number(t.logprob), t.bytes) for t in wire.top_logprobs or ()])
    return TokenLogprob(wire.token, _number(wire.logprob), wire.bytes, top)


def _number(logprob: float | None) -> float:
    """NaN stands for no logprob (the first token of an echo)."""
    return math.nan if logprob is None else logprob
