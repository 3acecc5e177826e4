"""A finished answer that can be delivered again: merged chunks, stored bytes, and a pre-encoded body.

streamed chunks → coalesce → one chunk per choice → CachedAnswer (each delivery needs only a new id and time)
chunks ↔ bytes for a cache on disk: encode_chunks, decode_chunks
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from ..errors import StreamBroken
from ..tool_calls.schema import with_own_ids
from ..types import Chunk, Confidence, FinishReason, Request, TokenLogprob, ToolCallDelta, Usage
from .answer import (
    DONE,
    EVENT_END,
    event_head,
    format_of,
    has_content,
    identity,
    model_json,
    usage_json,
    whole_head,
    whole_rest,
    with_resume,
)
from .request_body import merged_extra

VERSION: Final = 4
"""The version of `encode_chunks`' format: increase it when Chunk, or a struct inside it, changes its fields."""


class StoredChunk(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Chunk without field names, a third of the size. A test compares the fields of the two."""

    text: str
    index: int
    tokens: int
    tool_calls: tuple[ToolCallDelta, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None
    confidence: Confidence | None
    usage: Usage | None
    refusal: str | None
    resume: str
    reasoning: str
    extra: str
    note: str


class _Stored(msgspec.Struct, array_like=True):
    version: int
    chunks: list[StoredChunk]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Stored)


def encode_chunks(chunks: Iterable[Chunk]) -> bytes:
    """Encode chunks as versioned msgpack, for a cache on disk. Lossless."""
    return _ENCODER.encode(_Stored(VERSION, [StoredChunk(*msgspec.structs.astuple(chunk)) for chunk in chunks]))


def decode_chunks(data: bytes) -> tuple[Chunk, ...]:
    """Invert `encode_chunks`. Raises ValueError for any other bytes, those of another version included."""
    try:
        stored = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not stored chunks: {error}") from None
    if stored.version != VERSION:
        raise ValueError(f"stored chunks of version {stored.version}, this is version {VERSION}")
    return tuple([Chunk(*msgspec.structs.astuple(chunk)) for chunk in stored.chunks])


class CachedAnswer:
    """A finished answer that can be delivered many times, each time with its own id and time.

    A hit costs the joining of a few byte strings. A replay streams each choice as one piece: the rhythm of the tokens
    is not kept.

    Raises:
        StreamBroken: the chunks are no finished answer, so a broken one cannot be cached.
    """

    def __init__(self, request: Request, model: str, chunks: Iterable[Chunk]) -> None:
        self.model = model
        self._shape = Request(kind=request.kind, model=model, logprobs=request.logprobs)  # without its content
        self.choices, self.usage = coalesce(chunks)
        self.has_calls = any(choice.tool_calls for choice in self.choices)
        self._format = format_of(request.kind, request.logprobs)
        self._model = model_json(model)
        self._rest = whole_rest(self._format, self._model, self.choices, self.usage)
        self._events: dict[bool, tuple[bytes, ...]] = {}  # include_usage → each event after its head

    @property
    def size_bytes(self) -> int:
        """Approximate memory use: the text as values, whole, and in each streamed form."""
        return 512 + len(self._rest) * 4

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The answer as chunks: one per choice, then the usage."""
        return (*self.choices, Chunk(usage=self.usage))

    def with_own_ids(self, identity: str) -> CachedAnswer:
        """Return the answer with the tool-call ids of another request."""
        return CachedAnswer(self._shape, self.model, [with_own_ids(chunk, identity) for chunk in self.chunks])

    def whole(self, answer_id: str, created: int) -> bytes:
        """Return the same bytes as `AnswerEncoder.whole`. `created` is Unix time in seconds."""
        return whole_head(self._format, *identity(answer_id, created)) + self._rest

    def stream(self, answer_id: str, created: int, *, include_usage: bool = False) -> bytes:
        """Return all events, from the role to ``[DONE]``. `created` is Unix time in seconds."""
        events = self._events.get(include_usage)
        if events is None:
            events = self._events[include_usage] = self._encode_events(include_usage)
        head = event_head(self._format, *identity(answer_id, created), self._model)
        return head.join(events) + DONE

    def _encode_events(self, include_usage: bool) -> tuple[bytes, ...]:
        """Encode the events without their heads. The first is empty, so that joining puts a head before each."""
        tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        openings = [self._format.opening(choice.index) for choice in self.choices]
        events = [opening + tail for opening in openings if opening]
        for choice in self.choices:
            content, end = _split(choice)
            events += [self._format.delta(content, 0) + tail] if has_content(content) else []
            last = self._format.delta(end, 0) + tail  # has no token, so no offset
            events.append(with_resume(last, end.resume, EVENT_END) if end.resume else last)
        if include_usage:
            events.append(b'],"usage":' + usage_json(self.usage) + b"}\n\n")
        return (b"", *events)


def _split(choice: Chunk) -> tuple[Chunk, Chunk]:
    """Split a choice into its content and its end."""
    content = msgspec.structs.replace(choice, finish_reason=None, resume="")
    return content, Chunk(index=choice.index, finish_reason=choice.finish_reason, resume=choice.resume)


def coalesce(chunks: Iterable[Chunk]) -> tuple[tuple[Chunk, ...], Usage]:
    """Merge a streamed answer into one finished chunk per choice, by index, and the usage of all choices.

    Without a reported usage the streamed tokens are counted.

    Raises:
        StreamBroken: a choice has no finish_reason, or there is no choice.
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
    # A chunk with only the usage has index 0, which may be no choice of this answer.
    whole = tuple([choice.end(index) for index, choice in sorted(choices.items()) if choice.seen])
    if not whole:
        raise StreamBroken("The answer has no choice. Send the request again.", phase="stream")
    return whole, usage or Usage(completion_tokens=sum(chunk.tokens for chunk in whole))


def is_keepable(request: Request, choices: Iterable[Chunk], usage: Usage) -> bool:
    """Return whether a cache may replay an answer: another try would not give a better one.

    1. A refusal, a filtered answer, or one without a word and a call: the next try may answer.
    2. Cut at a length that the request did not ask for: the server's own limit, which may be another one next time.
    """
    for choice in choices:
        if choice.refusal is not None or choice.finish_reason == "content_filter":
            return False  # (1)
        if not (choice.text.strip() or choice.tool_calls):
            return False  # (1)
        asked = request.max_tokens
        if choice.finish_reason == "length" and (asked is None or usage.completion_tokens < asked):
            return False  # (2)
    return True


class _MergedCall:
    __slots__ = ("arguments", "extra", "id", "name")

    def __init__(self) -> None:
        self.extra: list[str] = []
        self.id: str | None = None
        self.name: str | None = None
        self.arguments: list[str] = []


class _MergedChoice(msgspec.Struct):
    seen: bool = False
    text: list[str] = []
    tokens: int = 0
    calls: dict[int, _MergedCall] = {}
    logprobs: list[TokenLogprob] = []
    finish_reason: FinishReason | None = None
    confidence: Confidence | None = None
    refusal: list[str] = []
    refused: bool = False
    resume: str = ""
    reasoning: list[str] = []
    extra: list[str] = []
    note: str = ""

    def add(self, chunk: Chunk) -> None:
        if chunk.text:
            self.text.append(chunk.text)
        if chunk.reasoning:
            self.reasoning.append(chunk.reasoning)
        if chunk.extra:
            self.extra.append(chunk.extra)
        self.note = chunk.note or self.note
        self.tokens += chunk.tokens
        if chunk.logprobs:
            self.logprobs.extend(chunk.logprobs)
        for delta in chunk.tool_calls:
            self._add_call(delta)
        if chunk.refusal is not None:
            self.refusal.append(chunk.refusal)
            self.refused = True
        self.confidence = chunk.confidence or self.confidence
        self.finish_reason = chunk.finish_reason or self.finish_reason
        self.resume = chunk.resume or self.resume
        self.seen = self.seen or chunk.usage is None or bool(chunk.text or chunk.finish_reason or chunk.tokens)

    def _add_call(self, delta: ToolCallDelta) -> None:
        call = self.calls.setdefault(delta.index, _MergedCall())
        call.id = call.id or delta.id
        call.name = call.name or delta.name
        call.arguments.append(delta.arguments)
        if delta.extra:
            call.extra.append(delta.extra)

    def end(self, index: int) -> Chunk:
        if self.finish_reason is None:
            raise StreamBroken(f"Choice {index} stopped before its end. Send the request again.", phase="stream")
        return Chunk(
            text="".join(self.text),
            index=index,
            tokens=self.tokens,
            tool_calls=tuple(
                [
                    ToolCallDelta(at, "".join(call.arguments), call.id, call.name, _merged(call.extra))
                    for at, call in sorted(self.calls.items())
                ]
            ),
            logprobs=tuple(self.logprobs),
            finish_reason=self.finish_reason,
            confidence=self.confidence,
            refusal="".join(self.refusal) if self.refused else None,
            resume=self.resume,
            reasoning="".join(self.reasoning),
            extra=_merged(self.extra),
            note=self.note,
        )


def _merged(parts: list[str]) -> str:
    return merged_extra(parts) if parts else ""
