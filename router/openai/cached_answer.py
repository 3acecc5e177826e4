"""Finished answers that can be delivered again: merged chunks, stored bytes, and a pre-encoded body.

streamed chunks → coalesce → one chunk per choice → CachedAnswer (each delivery needs only a new id and time)
chunks ↔ bytes for a cache on disk: encode_chunks, decode_chunks
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeVar

import msgspec

from ..errors import StreamBroken
from ..tool_calls.schema import with_own_ids
from ..types import Chunk, Request, ToolCallDelta, Usage
from .answer import (
    DONE,
    EVENT_END,
    event_head,
    format_of,
    has_content,
    model_json,
    usage_json,
    whole_head,
    whole_rest,
    with_resume,
)
from .request_body import merged_extra

T = TypeVar("T")
VERSION: Final = 4
"""The version of `encode_chunks`' format: increase it when Chunk, or a struct inside it, changes its fields."""

StoredChunk = msgspec.defstruct(
    "StoredChunk",
    [(field.name, field.type) for field in msgspec.structs.fields(Chunk)],
    array_like=True,
    forbid_unknown_fields=True,
)
"""A Chunk without field names, a third of the size; each field must be present."""
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(tuple[int, list[StoredChunk]])  # type: ignore[valid-type]


def encode_chunks(chunks: Iterable[Chunk]) -> bytes:
    """Encode chunks losslessly as versioned msgpack, for a cache on disk."""
    return _ENCODER.encode((VERSION, [msgspec.structs.astuple(chunk) for chunk in chunks]))


def decode_chunks(data: bytes) -> tuple[Chunk, ...]:
    """Decode the bytes of `encode_chunks`. Raises ValueError for any other bytes, those of another version included."""
    try:
        version, stored = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not stored chunks: {error}") from None
    if version != VERSION:
        raise ValueError(f"stored chunks of version {version}, this is version {VERSION}")
    return tuple([Chunk(*msgspec.structs.astuple(chunk)) for chunk in stored])


class CachedAnswer:
    """A finished answer that can be delivered many times, each time with its own id and time.

    A hit costs the joining of a few byte strings. A replay streams each choice as one piece: the timing of the tokens
    is not kept.

    Raises:
        StreamBroken: The chunks are not a finished answer.
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
        """Approximate memory use in bytes: the text as values, whole, and in each streamed form."""
        return 512 + len(self._rest) * 4

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The answer as chunks: one per choice, then the usage."""
        return (*self.choices, Chunk(usage=self.usage))

    def with_own_ids(self, identity: str) -> CachedAnswer:
        """Return the answer with new tool-call ids, for another request."""
        return CachedAnswer(self._shape, self.model, [with_own_ids(chunk, identity) for chunk in self.chunks])

    def whole(self, answer_id: str, created: int) -> bytes:
        """Return the same bytes as `AnswerEncoder.whole`. `created` is Unix time in seconds."""
        return whole_head(self._format, answer_id, created) + self._rest

    def stream(self, answer_id: str, created: int, *, include_usage: bool = False) -> bytes:
        """Return all events, from the role to ``[DONE]``. `created` is Unix time in seconds."""
        events = self._events.get(include_usage)
        if events is None:
            events = self._events[include_usage] = self._encode_events(include_usage)
        head = event_head(self._format, answer_id, created, self._model)
        return head.join(events) + DONE

    def _encode_events(self, include_usage: bool) -> tuple[bytes, ...]:
        """Encode the events without their heads. The first entry is empty, so that joining puts a head before each
        event.
        """
        tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        openings = [self._format.opening(choice.index) for choice in self.choices]
        events = [opening + tail for opening in openings if opening]
        for choice in self.choices:
            content = msgspec.structs.replace(choice, finish_reason=None, resume="")
            end = Chunk(index=choice.index, finish_reason=choice.finish_reason, resume=choice.resume)
            events += [self._format.delta(content, 0) + tail] if has_content(content) else []
            last = self._format.delta(end, 0) + tail  # without a token, so without an offset
            events.append(with_resume(last, end.resume, EVENT_END) if end.resume else last)
        if include_usage:
            events.append(b'],"usage":' + usage_json(self.usage) + b"}\n\n")
        return (b"", *events)


def coalesce(chunks: Iterable[Chunk]) -> tuple[tuple[Chunk, ...], Usage]:
    """Merge a streamed answer into one finished chunk per choice, by index, and the usage of all choices.

    If no usage was reported, the streamed tokens are counted.

    Raises:
        StreamBroken: A choice has no finish_reason, or there is no choice.
    """
    choices: dict[int, list[Chunk]] = {}
    usage: Usage | None = None
    for chunk in chunks:
        usage = chunk.usage or usage
        choices.setdefault(chunk.index, []).append(chunk)
    whole = tuple([_merged_choice(at, found) for at, found in sorted(choices.items()) if any(map(_has_choice, found))])
    if not whole:
        raise StreamBroken("The answer has no choice. Send the request again.", phase="stream")
    return whole, usage or Usage(completion_tokens=sum(chunk.tokens for chunk in whole))


def is_keepable(request: Request, choices: Iterable[Chunk], usage: Usage) -> bool:
    """Return whether a cache may replay an answer. It may not if another try could give a better one:

    1. The answer is a refusal, was filtered, or has neither text nor a call.
    2. The answer was cut at a length that the request did not set: the server's own limit, which may differ next time.
    """
    for choice in choices:
        if choice.refusal is not None or choice.finish_reason == "content_filter":
            return False  # (1)
        if not (choice.text.strip() or choice.tool_calls):
            return False  # (1)
        limit = request.max_tokens
        if choice.finish_reason == "length" and (limit is None or usage.completion_tokens < limit):
            return False  # (2)
    return True


def _has_choice(chunk: Chunk) -> bool:
    """Return whether a chunk belongs to a choice; a chunk with only the usage has index 0 but belongs to none."""
    return chunk.usage is None or bool(chunk.text or chunk.finish_reason or chunk.tokens)


def _merged_choice(index: int, chunks: list[Chunk]) -> Chunk:
    if len(chunks) == 1 and chunks[0].finish_reason and not chunks[0].tool_calls:  # the answer came whole
        return msgspec.structs.replace(chunks[0], usage=None)
    finish_reason = _last([chunk.finish_reason for chunk in chunks])
    if finish_reason is None:
        raise StreamBroken(f"Choice {index} stopped before its end. Send the request again.", phase="stream")
    calls: dict[int, list[ToolCallDelta]] = {}
    for chunk in chunks:
        for delta in chunk.tool_calls:
            calls.setdefault(delta.index, []).append(delta)
    refusal = [chunk.refusal for chunk in chunks if chunk.refusal is not None]
    return Chunk(
        text="".join([chunk.text for chunk in chunks]),
        index=index,
        tokens=sum([chunk.tokens for chunk in chunks]),
        tool_calls=tuple([_merged_call(at, calls[at]) for at in sorted(calls)]),
        logprobs=tuple([token for chunk in chunks for token in chunk.logprobs]),
        finish_reason=finish_reason,
        confidence=_last([chunk.confidence for chunk in chunks]),
        refusal="".join(refusal) if refusal else None,
        resume=_last([chunk.resume for chunk in chunks]) or "",
        reasoning="".join([chunk.reasoning for chunk in chunks]),
        extra=merged_extra([chunk.extra for chunk in chunks if chunk.extra]),
        note=_last([chunk.note for chunk in chunks]) or "",
    )


def _merged_call(index: int, deltas: list[ToolCallDelta]) -> ToolCallDelta:
    return ToolCallDelta(
        index,
        "".join([delta.arguments for delta in deltas]),
        next((delta.id for delta in deltas if delta.id), None),
        next((delta.name for delta in deltas if delta.name), None),
        merged_extra([delta.extra for delta in deltas if delta.extra]),
    )


def _last(values: list[T]) -> T | None:
    """Return the last value that is not empty; None if all are."""
    return next(filter(None, reversed(values)), None)
