"""Chunks → OpenAI's answers, whole or as server-sent events, and the error object that every fault becomes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from ..errors import CausewayError, StreamBroken
from ..types import Chunk, Request, Usage
from .merge import coalesce
from .shapes import ChatShape, CompletionShape, Shape, usage_json

_ENCODER = msgspec.json.Encoder()
DONE: Final = b"data: [DONE]\n\n"
EVENT_END: Final = b"}\n\n"


class AnswerEncoder:
    """One answer to one request: either `whole`, or `start`, then `chunk` for each, then `end`.

    `created` is unix time, s. Both forms refuse to call an answer finished that is not: `whole` raises StreamBroken,
    and `end` gives an error event, without ``[DONE]``.
    """

    def __init__(
        self, request: Request, answer_id: str, model: str, created: int, *, system_fingerprint: str | None = None
    ) -> None:
        self._shape = shape_of(request.kind, request.logprobs)
        self._identity = identity(answer_id, created)
        self._model = model_json(model, system_fingerprint)
        self._choices = request.n * max(1, len(request.prompts))
        # Each event ends with the answer's usage or with the promise of it, as the caller asked.
        self._tail = b'],"usage":null}\n\n' if request.include_usage else b"]}\n\n"
        self._include_usage = request.include_usage
        self._head = event_head(self._shape, *self._identity, self._model)
        self._offsets: dict[int, int] = {}  # choice → characters sent so far
        self._unfinished: set[int] = set()
        self._tokens = 0
        self._usage: Usage | None = None

    def whole(self, chunks: Iterable[Chunk]) -> bytes:
        """The whole answer as one JSON object. Raises StreamBroken if a choice has no end."""
        choices, usage = coalesce(chunks)
        return whole_head(self._shape, *self._identity) + whole_rest(self._shape, self._model, choices, usage)

    def start(self) -> bytes:
        """The events before the first token: each choice's role."""
        pieces = [self._shape.opening(index) for index in range(self._choices)]
        return b"".join([self._head + piece + self._tail for piece in pieces if piece])

    def chunk(self, chunk: Chunk) -> bytes:
        """The event for one chunk; empty when it has nothing for the client (usage alone, half a character)."""
        self._tokens += chunk.tokens
        if chunk.usage is not None:
            self._usage = chunk.usage
        if not has_content(chunk):
            return b""
        index = chunk.index
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + len(chunk.text)
        if chunk.finish_reason is None:
            self._unfinished.add(index)
        else:
            self._unfinished.discard(index)
        event = self._head + self._shape.piece(chunk, offset) + self._tail
        return with_resume(event, chunk.resume, EVENT_END) if chunk.resume else event

    def end(self) -> bytes:
        """The usage if it was asked for, and ``[DONE]``; an error event if a choice was left without its end."""
        if self._unfinished or not self._offsets:
            return error_event(unfinished())
        if not self._include_usage:
            return DONE
        # A target that reports no usage leaves us with our own count of what was streamed.
        usage = self._usage or Usage(completion_tokens=self._tokens)
        return self._head + b'],"usage":' + usage_json(usage) + b"}\n\n" + DONE


def has_content(chunk: Chunk) -> bool:
    return bool(chunk.text or chunk.finish_reason or chunk.tool_calls or chunk.logprobs or chunk.refusal is not None)


def unfinished() -> StreamBroken:
    return StreamBroken("The answer stopped before its end. Ask again.", phase="stream")


def shape_of(kind: str, logprobs: int | None) -> Shape:
    return ChatShape(logprobs=logprobs) if kind == "chat" else CompletionShape(logprobs=logprobs)


def identity(answer_id: str, created: int) -> tuple[bytes, bytes]:
    """An answer's own part of its head: id and unix time (s) as JSON."""
    return _ENCODER.encode(answer_id), b"%d" % created


def model_json(model: str, system_fingerprint: str | None = None) -> bytes:
    fingerprint = b"" if system_fingerprint is None else b',"system_fingerprint":' + _ENCODER.encode(system_fingerprint)
    return b',"model":' + _ENCODER.encode(model) + fingerprint + b',"choices":['


def event_head(shape: Shape, answer_id: bytes, created: bytes, model: bytes) -> bytes:
    return b'data: {"id":%b,"object":"%b","created":%b%b' % (answer_id, shape.chunk_object, created, model)


def whole_head(shape: Shape, answer_id: bytes, created: bytes) -> bytes:
    return b'{"id":%b,"object":"%b","created":%b' % (answer_id, shape.whole_object, created)


def whole_rest(shape: Shape, model: bytes, choices: Sequence[Chunk], usage: Usage) -> bytes:
    """All of a whole answer that does not depend on its id and time."""
    body = model + b",".join([shape.choice(choice) for choice in choices]) + b'],"usage":' + usage_json(usage) + b"}"
    resume = next((choice.resume for choice in choices if choice.resume), "")
    return with_resume(body, resume, b"}") if resume else body


def with_resume(data: bytes, token: str, end: bytes) -> bytes:
    """An object that closes with `end`, and in it our own field: how to ask for the rest of an answer cut short."""
    return data.removesuffix(end) + b',"causeway":{"continue":%b}' % _ENCODER.encode(token) + end


class _Error(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str


class _Envelope(msgspec.Struct):
    error: _Error


def encode_error(error: CausewayError) -> bytes:
    """OpenAI's error object. Characters that no JSON text can hold (lone surrogates) are replaced."""
    try:
        return _ENCODER.encode(_Envelope(_Error(error.message, error.type, error.param, error.code)))
    except UnicodeEncodeError:
        param = None if error.param is None else _clean(error.param)
        return _ENCODER.encode(_Envelope(_Error(_clean(error.message), error.type, param, error.code)))


def error_event(error: CausewayError) -> bytes:
    """A fault after the first byte went out: the stream's last event. No ``[DONE]`` may follow it."""
    return b"data: " + encode_error(error) + b"\n\n"


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")


class _Model(msgspec.Struct):
    id: str
    owned_by: str
    created: int
    object: str = "model"


class _Models(msgspec.Struct):
    data: list[_Model]
    object: str = "list"


def encode_models(models: Iterable[tuple[str, str, int]]) -> bytes:
    """`GET /v1/models`. Each model is (id, owned_by, created: unix s)."""
    return _ENCODER.encode(_Models([_Model(name, owner, created) for name, owner, created in models]))


def encode_model(name: str, owned_by: str, created: int) -> bytes:
    """`GET /v1/models/{id}`."""
    return _ENCODER.encode(_Model(name, owned_by, created))
