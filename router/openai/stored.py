"""A finished answer that can be given again: as stored bytes, and as a template that needs only a new id and time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from ..types import Chunk, Confidence, FinishReason, Request, TokenLogprob, ToolCallDelta, Usage
from .answer import (
    DONE,
    EVENT_END,
    event_head,
    has_content,
    identity,
    model_json,
    shape_of,
    whole_head,
    whole_rest,
    with_resume,
)
from .merge import coalesce
from .shapes import usage_json

VERSION: Final = 2
"""Of `encode_chunks`' format: raise it when Chunk, or what it holds, changes its fields."""


class _Row(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Chunk's twin without field names, a third of the size. A test holds the two together."""

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


class _Stored(msgspec.Struct, array_like=True):
    version: int
    rows: list[_Row]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Stored)


def encode_chunks(chunks: Iterable[Chunk]) -> bytes:
    """Chunks as versioned msgpack, for a cache on disk. Lossless."""
    return _ENCODER.encode(_Stored(VERSION, [_Row(*msgspec.structs.astuple(chunk)) for chunk in chunks]))


def decode_chunks(data: bytes) -> tuple[Chunk, ...]:
    """The inverse of `encode_chunks`. Raises ValueError for anything else, another version's bytes included."""
    try:
        stored = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not stored chunks: {error}") from None
    if stored.version != VERSION:
        raise ValueError(f"stored chunks of version {stored.version}, this is version {VERSION}")
    return tuple([Chunk(*msgspec.structs.astuple(row)) for row in stored.rows])


class CachedAnswer:
    """An answer ready to be given again, each time with an id and time of its own.

    A hit costs the joining of a few byte strings. Raises StreamBroken when the chunks are no finished answer, so that a
    broken one cannot be cached. A replay streams each choice as one piece: the tokens' rhythm is not kept.
    """

    def __init__(self, request: Request, model: str, chunks: Iterable[Chunk]) -> None:
        self.model = model
        self.choices, self.usage = coalesce(chunks)
        self._shape = shape_of(request.kind, request.logprobs)
        self._model = model_json(model)
        self._rest = whole_rest(self._shape, self._model, self.choices, self.usage)
        self._events: dict[bool, tuple[bytes, ...]] = {}  # include_usage → each event after its head

    @property
    def size_bytes(self) -> int:
        """About what this holds in memory: the text as values, whole, and in each streamed form."""
        return 512 + len(self._rest) * 4

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The answer as a backend would have streamed it, at its coarsest."""
        return (*self.choices, Chunk(usage=self.usage))

    def whole(self, answer_id: str, created: int) -> bytes:
        """The same bytes as `AnswerEncoder.whole`. `created`: unix time, s."""
        return whole_head(self._shape, *identity(answer_id, created)) + self._rest

    def stream(self, answer_id: str, created: int, *, include_usage: bool = False) -> bytes:
        """All events, from the role to ``[DONE]``."""
        events = self._events.get(include_usage)
        if events is None:
            events = self._events[include_usage] = self._frames(include_usage)
        head = event_head(self._shape, *identity(answer_id, created), self._model)
        return head.join(events) + DONE

    def _frames(self, include_usage: bool) -> tuple[bytes, ...]:
        """The events without their heads; the first is empty, so that joining puts a head before each."""
        tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        openings = [self._shape.opening(choice.index) for choice in self.choices]
        events = [opening + tail for opening in openings if opening]
        for choice in self.choices:
            said, end = _split(choice)
            events += [self._shape.piece(said, 0) + tail] if has_content(said) else []
            last = self._shape.piece(end, 0) + tail  # has no token, so no offset
            events.append(with_resume(last, end.resume, EVENT_END) if end.resume else last)
        if include_usage:
            events.append(b'],"usage":' + usage_json(self.usage) + b"}\n\n")
        return (b"", *events)


def _split(choice: Chunk) -> tuple[Chunk, Chunk]:
    """What was said, and that it ended."""
    said = msgspec.structs.replace(choice, finish_reason=None, resume="")
    return said, Chunk(index=choice.index, finish_reason=choice.finish_reason, resume=choice.resume)
