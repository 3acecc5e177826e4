"""The parts of an answer as OpenAI writes them, in the two shapes: chat completions and legacy completions.

A frame is what stands between a body's head (id, created, model) and its end: ``"choices":[…]`` and the usage.
It does not depend on the answer's id or time, so a cached answer can keep its frames.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, Protocol

import msgspec

from ..types import Chunk, TokenAlternative, TokenLogprob, ToolCallDelta, Usage

_ENCODER = msgspec.json.Encoder()
_encode = _ENCODER.encode
LOWEST_LOGPROB: Final = -9999.0
"""What OpenAI writes for a token that is all but impossible; JSON has no infinity."""


class Shape(Protocol):
    """`piece` and `choice` are the JSON of one element of ``choices``, streamed and whole."""

    whole_object: bytes
    chunk_object: bytes

    def opening(self, index: int) -> bytes:
        """The first streamed piece of choice `index`; empty where there is none."""
        ...

    def piece(self, chunk: Chunk, offset: int) -> bytes:
        """`offset` is how many characters of this choice's text went before."""
        ...

    def choice(self, chunk: Chunk) -> bytes: ...


class _AnswerDetail(msgspec.Struct):
    cached_tokens: int


class _AnswerUsage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: _AnswerDetail


def usage_json(usage: Usage) -> bytes:
    total = usage.prompt_tokens + usage.completion_tokens
    return _encode(
        _AnswerUsage(usage.prompt_tokens, usage.completion_tokens, total, _AnswerDetail(usage.cached_tokens))
    )


class _AnswerAlternative(msgspec.Struct):
    token: str
    logprob: float
    bytes: tuple[int, ...] | None


class _AnswerToken(msgspec.Struct):
    token: str
    logprob: float
    bytes: tuple[int, ...] | None
    top_logprobs: list[_AnswerAlternative]


class _AnswerFunction(msgspec.Struct, omit_defaults=True):
    arguments: str
    name: str | None = None


class _CallDelta(msgspec.Struct, omit_defaults=True):
    index: int
    function: _AnswerFunction
    id: str | None = None
    type: str | None = None


class _AnswerCall(msgspec.Struct):
    id: str
    function: _AnswerFunction
    type: str = "function"


class _CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class ChatShape:
    whole_object = b"chat.completion"
    chunk_object = b"chat.completion.chunk"

    def __init__(self, *, logprobs: int | None) -> None:
        self._logprobs = logprobs is not None

    def opening(self, index: int) -> bytes:
        return b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' % index

    def piece(self, chunk: Chunk, offset: int) -> bytes:
        if chunk.tool_calls or chunk.refusal is not None:
            delta = _delta(chunk)
        else:
            delta = b'"content":' + _encode(chunk.text) if chunk.text else b""
        logprobs = _chat_logprobs(chunk.logprobs) if self._logprobs and chunk.logprobs else b"null"
        return b'{"index":%d,"delta":{%b},"logprobs":%b,"finish_reason":%b}' % (
            chunk.index,
            delta,
            logprobs,
            _finish(chunk),
        )

    def choice(self, chunk: Chunk) -> bytes:
        content = b"null" if not chunk.text and (chunk.tool_calls or chunk.refusal) else _encode(chunk.text)
        refusal = _encode(chunk.refusal)
        calls = (
            b',"tool_calls":' + _encode([_whole_call(call) for call in chunk.tool_calls]) if chunk.tool_calls else b""
        )
        logprobs = _chat_logprobs(chunk.logprobs) if self._logprobs and chunk.logprobs else b"null"
        message = b'"role":"assistant","content":%b,"refusal":%b%b' % (content, refusal, calls)
        return b'{"index":%d,"message":{%b},"logprobs":%b,"finish_reason":%b}' % (
            chunk.index,
            message,
            logprobs,
            _finish(chunk),
        )


class CompletionShape:
    whole_object = b"text_completion"
    chunk_object = b"text_completion"

    def __init__(self, *, logprobs: int | None) -> None:
        self._logprobs = logprobs

    def opening(self, index: int) -> bytes:
        return b""

    def piece(self, chunk: Chunk, offset: int) -> bytes:
        logprobs = b"null"
        if self._logprobs is not None and chunk.logprobs:
            logprobs = _completion_logprobs(chunk.logprobs, self._logprobs, offset)
        return b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}' % (
            chunk.index,
            _encode(chunk.text),
            logprobs,
            _finish(chunk),
        )

    def choice(self, chunk: Chunk) -> bytes:
        return self.piece(chunk, 0)


def _finish(chunk: Chunk) -> bytes:
    return b"null" if chunk.finish_reason is None else b'"' + chunk.finish_reason.encode() + b'"'


def _delta(chunk: Chunk) -> bytes:
    parts = []
    if chunk.text:
        parts.append(b'"content":' + _encode(chunk.text))
    if chunk.refusal is not None:
        parts.append(b'"refusal":' + _encode(chunk.refusal))
    if chunk.tool_calls:
        parts.append(b'"tool_calls":' + _encode([_call_delta(call) for call in chunk.tool_calls]))
    return b",".join(parts)


def _call_delta(call: ToolCallDelta) -> _CallDelta:
    function = _AnswerFunction(call.arguments, call.name)
    return _CallDelta(call.index, function, call.id, None if call.id is None else "function")


def _whole_call(call: ToolCallDelta) -> _AnswerCall:
    return _AnswerCall(call.id or "", _AnswerFunction(call.arguments, call.name or ""))


def _chat_logprobs(tokens: Iterable[TokenLogprob]) -> bytes:
    content = [_AnswerToken(t.token, finite(t.logprob), t.bytes, [_alternative(top) for top in t.top]) for t in tokens]
    return b'{"content":%b,"refusal":null}' % _encode(content)


def _alternative(top: TokenAlternative) -> _AnswerAlternative:
    return _AnswerAlternative(top.token, finite(top.logprob), top.bytes)


def _completion_logprobs(tokens: tuple[TokenLogprob, ...], k: int, offset: int) -> bytes:
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.token)
    return _encode(
        _CompletionLogprobs(
            [token.token for token in tokens],
            [finite(token.logprob) for token in tokens],
            [_alternatives(token) for token in tokens] if k else None,
            offsets,
        )
    )


def _alternatives(token: TokenLogprob) -> dict[str, float]:
    """OpenAI: the chosen token is always among them, so there may be one more than was asked for."""
    best = {top.token: finite(top.logprob) for top in token.top}
    best[token.token] = finite(token.logprob)
    return best


def finite(logprob: float) -> float:
    """NaN stays: it means that there is none (the first token of an echo), and is written as null."""
    return LOWEST_LOGPROB if math.isinf(logprob) else logprob
