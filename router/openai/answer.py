"""The encoding of Chunks as OpenAI's answers, whole or as server-sent events, for chat and legacy completions.

An answer consists of a head (id, created, model), the choices, and the usage. Two deliveries of the same answer differ
only in id and created, so `CachedAnswer`, a finished answer that can be delivered again, keeps the rest encoded:
streamed chunks → coalesce → one chunk per choice → CachedAnswer; encode_chunks and decode_chunks for a cache on disk.
OpenAI's error object (as a body
with its headers, and as the last event of a stream) and the lists of models are encoded here, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final, TypeVar

import msgspec

from ..errors import AuthenticationFailed, CausewayError, CloudRejected, MethodNotAllowed, StreamBroken
from ..tool_calls.schema import with_own_ids
from ..types import Chunk, Request, TokenAlternative, TokenLogprob, ToolCallDelta, Usage, replace_surrogates
from .completions import TokenOffsets, completion_logprobs, finite
from .request_body import merged_extra, with_extra

_encode = msgspec.json.Encoder().encode
DONE: Final = b"data: [DONE]\n\n"
EVENT_END: Final = b"}\n\n"


class AnswerEncoder:
    """Encodes one answer to one request: either `whole`, or `start`, then `chunk` for each chunk, then `end`.
    `created`: Unix s. An unfinished answer is never encoded as finished: `coalesce`, which prepares `whole`, raises
    StreamBroken, and `end` returns an error event without ``[DONE]``.
    """

    def __init__(self, request: Request, answer_id: str, model: str, created: int) -> None:
        self._format = format_of(request.kind, request.logprobs)
        self._identity = (answer_id, created)
        self._model = model_json(model)
        self._choices = request.n * max(1, len(request.prompts))
        # With include_usage each event carries `usage`: null, until the last one brings the numbers.
        self._tail = b'],"usage":null}\n\n' if request.include_usage else b"]}\n\n"
        self._include_usage = request.include_usage
        self._head = b""  # of every event, once the stream has begun
        self._offsets: dict[int, int] = {}  # choice → characters sent so far, counted where offsets are needed
        self.around: dict[int, tuple[bytes, bytes]] = {}
        """The bytes of an event around a text, by begun choice. Text that is sent this way is added to `tokens`."""
        self._unfinished: set[int] = set()
        self.tokens = 0  # streamed so far
        self._usage: Usage | None = None

    def whole(self, choices: Sequence[Chunk], usage: Usage) -> bytes:
        """Encode the whole answer as one JSON object, from what `coalesce` returns."""
        return whole_head(self._format, *self._identity) + whole_rest(self._format, self._model, choices, usage)

    def start(self) -> bytes:
        """Encode the events before the first token: each choice's role."""
        self._head = event_head(self._format, *self._identity, self._model)
        deltas = [self._format.opening(index) for index in range(self._choices)]
        return b"".join([self._head + delta + self._tail for delta in deltas if delta])

    def chunk(self, chunk: Chunk) -> bytes:
        """Encode the event of a chunk; empty if it has nothing for the client (only usage, half a character)."""
        self.tokens += chunk.tokens
        if chunk.index in self.around and is_text_alone(chunk):  # nearly every token
            before, after = self.around[chunk.index]
            return before + _encode(chunk.text) + after
        if chunk.usage is not None:
            self._usage = chunk.usage
        if not has_content(chunk):
            return b""
        index = chunk.index
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + len(chunk.text)
        if chunk.finish_reason is not None:
            self._unfinished.discard(index)
            self.around.pop(index, None)
        elif index not in self._unfinished:
            self._unfinished.add(index)
            if (around := self._format.around(index)) is not None:
                self.around[index] = (self._head + around[0], around[1] + self._tail)
        return self._head + self._format.delta(chunk, offset) + self._tail

    @property
    def finished(self) -> bool:
        """Whether every choice has its finish reason, so that only the usage and ``[DONE]`` may follow."""
        return not self._unfinished and len(self._offsets) == self._choices

    def end(self) -> bytes:
        """Encode the usage, if requested, and ``[DONE]``; an error event if a choice has no end."""
        if self._unfinished or not self._offsets:
            broken = StreamBroken("The answer stopped before its end. Send the request again.", phase="stream")
            return error_event(broken)
        if not self._include_usage:
            return DONE
        # If no usage was reported, our own count of the streamed tokens is used.
        usage = self._usage or Usage(completion_tokens=self.tokens)
        return self._head + b'],"usage":' + usage_json(usage) + b"}\n\n" + DONE


def encode_whole(request: Request, answer_id: str, model: str, created: int, chunks: Sequence[Chunk]) -> bytes:
    """Encode the whole answer as `AnswerEncoder.whole`. Raises StreamBroken as `coalesce`."""
    first = chunks[0]
    if len(chunks) == 1 and first.usage is not None and first.finish_reason is not None and not first.tool_calls:
        choices, usage = chunks, first.usage
        if request.kind == "chat" and first.refusal is None and not _has_more(first):
            return _TEXT_WHOLE % (
                *(_encode(answer_id), created, model_json(model)),
                *(first.index, _encode(first.text), _encode(first.finish_reason), usage_json(usage)),
            )
    else:
        choices, usage = coalesce(chunks)
    form = format_of(request.kind, request.logprobs)
    return whole_head(form, answer_id, created) + whole_rest(form, model_json(model), choices, usage)


def has_content(chunk: Chunk) -> bool:
    said = chunk.text or chunk.tool_calls or chunk.reasoning or chunk.refusal is not None
    return bool(said or chunk.finish_reason or chunk.logprobs or chunk.extra)


def is_text_alone(chunk: Chunk) -> bool:
    """Return whether the event of this chunk differs from that of another chunk only in its text."""
    more = chunk.logprobs or chunk.tool_calls or chunk.reasoning or chunk.refusal is not None
    return bool(chunk.text) and not (more or chunk.finish_reason or chunk.usage or chunk.extra)


@lru_cache(64)
def model_json(model: str) -> bytes:
    return b',"model":' + _encode(model) + b',"choices":['


def event_head(form: ChoiceFormat, answer_id: str, created: int, model: bytes) -> bytes:
    """Encode the fields before the choices. `created`: Unix time in seconds."""
    return b'data: {"id":%b,"object":"%b","created":%d%b' % (_encode(answer_id), form.chunk_object, created, model)


def whole_head(form: ChoiceFormat, answer_id: str, created: int) -> bytes:
    return b'{"id":%b,"object":"%b","created":%d' % (_encode(answer_id), form.whole_object, created)


def whole_rest(form: ChoiceFormat, model: bytes, choices: Sequence[Chunk], usage: Usage) -> bytes:
    """Encode the part of a whole answer that does not depend on its id and time."""
    return model + b",".join([form.choice(choice) for choice in choices]) + b'],"usage":' + usage_json(usage) + b"}"


# --- the usage and the two formats of a choice -----------------------------------------------------------------------


class _PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class _CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class AnswerUsage(msgspec.Struct, omit_defaults=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: _PromptTokensDetails
    completion_tokens_details: _CompletionTokensDetails | None = None  # only for an answer with reasoning


def usage_json(usage: Usage) -> bytes:
    prompt, completion = usage.prompt_tokens, usage.completion_tokens
    thought = b',"completion_tokens_details":{"reasoning_tokens":%d}' % usage.reasoning_tokens
    return b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,"prompt_tokens_details":%b%b}' % (
        prompt,
        completion,
        prompt + completion,
        b'{"cached_tokens":%d}' % usage.cached_tokens,
        thought if usage.reasoning_tokens else b"",
    )


class _Alternative(msgspec.Struct):
    token: str
    logprob: float
    bytes: tuple[int, ...] | None


class AnswerToken(msgspec.Struct):
    token: str
    logprob: float
    bytes: tuple[int, ...] | None
    top_logprobs: list[_Alternative]


class _FunctionDelta(msgspec.Struct, omit_defaults=True):
    arguments: str
    name: str | None = None


class AnswerCallDelta(msgspec.Struct, omit_defaults=True):
    index: int
    function: _FunctionDelta
    id: str | None = None
    type: str | None = None


class AnswerCall(msgspec.Struct):
    id: str
    function: _FunctionDelta
    type: str = "function"


_TEXT_CHOICE: Final = (
    b'{"index":%d,"message":{"role":"assistant","content":%b,"refusal":%b},"logprobs":null,"finish_reason":%b}'
)


_TEXT_WHOLE: Final = (
    b'{"id":%b,"object":"chat.completion","created":%d%b{"index":%d,"message":{"role":"assistant","content":%b,'
    b'"refusal":null},"logprobs":null,"finish_reason":%b}],"usage":%b}'
)


def _has_more(chunk: Chunk) -> bool:
    """Return whether a whole choice without tool calls and refusal has more than a text and its end."""
    return bool(chunk.logprobs or chunk.reasoning or chunk.extra or chunk.stop)


class ChatChoiceFormat:
    """The JSON form of an element of a chat's ``choices``."""

    whole_object = b"chat.completion"
    chunk_object = b"chat.completion.chunk"

    def __init__(self, *, logprobs: int | None) -> None:
        self._logprobs = logprobs is not None

    def opening(self, index: int) -> bytes:
        """Encode the first streamed delta of choice `index`."""
        return b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' % index

    def around(self, index: int) -> tuple[bytes, bytes] | None:
        """Return the JSON before and after the text of a chunk that has only text."""
        return b'{"index":%d,"delta":{"content":' % index, b'},"logprobs":null,"finish_reason":null}'

    def delta(self, chunk: Chunk, offset: int) -> bytes:
        """Encode a chunk of a stream."""
        if chunk.tool_calls or chunk.refusal is not None or chunk.reasoning or chunk.extra:
            delta = _chat_delta(chunk)
        else:
            delta = b'"content":' + _encode(chunk.text) if chunk.text else b""
        logprobs = _chat_logprobs(chunk.logprobs) if self._logprobs and chunk.logprobs else b"null"
        return b'{"index":%d,"delta":{%b},"logprobs":%b,"finish_reason":%b}' % (
            chunk.index,
            delta,
            logprobs,
            _end(chunk),
        )

    def choice(self, chunk: Chunk) -> bytes:
        """Encode a whole choice."""
        if not (chunk.tool_calls or chunk.refusal or chunk.logprobs or chunk.reasoning or chunk.extra):
            return _TEXT_CHOICE % (chunk.index, _encode(chunk.text), _encode(chunk.refusal), _end(chunk))
        content = b"null" if not chunk.text and (chunk.tool_calls or chunk.refusal) else _encode(chunk.text)
        refusal = _encode(chunk.refusal)
        calls = b',"tool_calls":' + _encode([_call(call) for call in chunk.tool_calls]) if chunk.tool_calls else b""
        logprobs = _chat_logprobs(chunk.logprobs) if self._logprobs and chunk.logprobs else b"null"
        thought = b',"reasoning_content":' + _encode(chunk.reasoning) if chunk.reasoning else b""
        extra = b"," + chunk.extra[1:-1].encode() if chunk.extra else b""
        message = b'"role":"assistant","content":%b,"refusal":%b%b%b%b' % (content, refusal, thought, calls, extra)
        return b'{"index":%d,"message":{%b},"logprobs":%b,"finish_reason":%b}' % (
            chunk.index,
            message,
            logprobs,
            _end(chunk),
        )


class CompletionChoiceFormat:
    """The JSON form of an element of a legacy completion's `choices`."""

    whole_object = b"text_completion"
    chunk_object = b"text_completion"

    def __init__(self, *, logprobs: int | None) -> None:
        self._logprobs = logprobs
        self._offsets: dict[int, TokenOffsets] = {}  # by choice, from its first token to its end

    def opening(self, index: int) -> bytes:
        """Return nothing, because such a stream begins with the first text."""
        return b""

    def around(self, index: int) -> tuple[bytes, bytes] | None:
        """Return the JSON around the text of a chunk that has only text; None if an offset must be counted."""
        if self._logprobs is not None:
            return None
        return b'{"index":%d,"text":' % index, b',"logprobs":null,"finish_reason":null}'

    def delta(self, chunk: Chunk, offset: int) -> bytes:
        """Encode a chunk. `offset`: the number of characters of this choice's text that were sent before."""
        logprobs = b"null"
        if self._logprobs is not None and chunk.logprobs:
            offsets = self._offsets.get(chunk.index)
            if offsets is None:
                offsets = self._offsets[chunk.index] = TokenOffsets(chunk, offset)
            logprobs = completion_logprobs(chunk.logprobs, self._logprobs, offsets)
        if chunk.finish_reason is not None:
            self._offsets.pop(chunk.index, None)
        return b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}' % (
            chunk.index,
            _encode(chunk.text),
            logprobs,
            _end(chunk),
        )

    def choice(self, chunk: Chunk) -> bytes:
        return self.delta(chunk, 0)


def _end(chunk: Chunk) -> bytes:
    """Encode the finish reason, and the stop string that ended the text under vLLM's name for it."""
    reason = _encode(chunk.finish_reason)
    return reason + b',"stop_reason":' + _encode(chunk.stop) if chunk.stop else reason


ChoiceFormat = ChatChoiceFormat | CompletionChoiceFormat


_CHAT: Final = ChatChoiceFormat(logprobs=None)


def format_of(kind: str, logprobs: int | None) -> ChoiceFormat:
    if kind != "chat":
        return CompletionChoiceFormat(logprobs=logprobs)
    return _CHAT if logprobs is None else ChatChoiceFormat(logprobs=logprobs)


def _chat_delta(chunk: Chunk) -> bytes:
    parts = []
    if chunk.reasoning:
        parts.append(b'"reasoning_content":' + _encode(chunk.reasoning))
    if chunk.text:
        parts.append(b'"content":' + _encode(chunk.text))
    if chunk.refusal is not None:
        parts.append(b'"refusal":' + _encode(chunk.refusal))
    if chunk.tool_calls:
        parts.append(b'"tool_calls":' + _encode([_call_delta(call) for call in chunk.tool_calls]))
    if chunk.extra:
        parts.append(chunk.extra[1:-1].encode())
    return b",".join(parts)


def _call_delta(call: ToolCallDelta) -> AnswerCallDelta | msgspec.Raw:
    function = _FunctionDelta(call.arguments, call.name)
    wire = AnswerCallDelta(call.index, function, call.id, None if call.id is None else "function")
    return with_extra(_encode(wire), call.extra) if call.extra else wire


def _call(call: ToolCallDelta) -> AnswerCall | msgspec.Raw:
    wire = AnswerCall(call.id or "", _FunctionDelta(call.arguments, call.name or ""))
    return with_extra(_encode(wire), call.extra) if call.extra else wire


def _chat_logprobs(tokens: Iterable[TokenLogprob]) -> bytes:
    content = [AnswerToken(t.token, finite(t.logprob), t.bytes, [_alternative(top) for top in t.top]) for t in tokens]
    return b'{"content":%b,"refusal":null}' % _encode(content)


def _alternative(top: TokenAlternative) -> _Alternative:
    return _Alternative(top.token, finite(top.logprob), top.bytes)


# --- errors and lists of models ---------------------------------------------------------------------------------------


def error_fields(error: CausewayError) -> dict[str, str | None]:
    """Return the inner object of OpenAI's error. Characters that JSON cannot hold (lone surrogates) are replaced."""
    param = None if error.param is None else replace_surrogates(error.param)
    return {"message": replace_surrogates(error.message), "type": error.type, "param": param, "code": error.code}


def encode_error(error: CausewayError) -> bytes:
    """Encode OpenAI's error object."""
    return _encode({"error": error_fields(error)})


def error_headers(error: CausewayError) -> dict[str, str]:
    """Return the headers of an error: Retry-After, x-should-retry, WWW-Authenticate and Allow, where they apply."""
    headers = {}
    if error.retry_after_s is not None:
        # RFC 9110 allows only whole seconds: round up, so that the client does not retry too early.
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, CloudRejected):
        headers["x-should-retry"] = "false"  # OpenAI's clients repeat a 502 unless this says no
    if isinstance(error, AuthenticationFailed):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, MethodNotAllowed):
        headers["Allow"] = error.allow
    return headers


def error_event(error: CausewayError) -> bytes:
    """Encode an error that happens after the first byte was sent: the stream's last event, without ``[DONE]``."""
    return b"data: " + encode_error(error) + b"\n\n"


class ModelUse(msgspec.Struct):
    """Our own fields of a model. `endpoints`: the paths that accept the model; absent if every path does. `store`:
    whether a response is stored if its request has no `store`; absent if responses are never stored.
    """

    endpoints: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    store: bool | msgspec.UnsetType = msgspec.UNSET


class ModelObject(msgspec.Struct):
    """A model. `created`: Unix time in seconds. `causeway`: absent if there is nothing to tell."""

    id: str
    owned_by: str
    created: int
    object: str = "model"
    causeway: ModelUse | msgspec.UnsetType = msgspec.UNSET


class ModelList(msgspec.Struct):
    data: list[ModelObject]
    object: str = "list"


def encode_models(models: Iterable[ModelObject]) -> bytes:
    return _encode(ModelList([*models]))


def encode_model(model: ModelObject) -> bytes:
    return _encode(model)


T = TypeVar("T")
VERSION: Final = 6
"""The version of the format of `encode_chunks`. Increase it when Chunk, or a struct inside it, changes its fields."""

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
        raise ValueError(f"the bytes are not stored chunks of an answer: {error}") from None
    if version != VERSION:
        raise ValueError(f"the stored chunks have version {version}, but this program reads version {VERSION}")
    return tuple([Chunk(*msgspec.structs.astuple(chunk)) for chunk in stored])


class CachedAnswer:
    """A finished answer that can be delivered many times, each with its own id and time, for the joining of a few byte
    strings. A replay streams each choice as one piece. Raises StreamBroken if the chunks are not a finished answer.
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
        """Encode the events without heads. The first entry is empty, so that joining puts a head before each."""
        tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        openings = [self._format.opening(choice.index) for choice in self.choices]
        events = [opening + tail for opening in openings if opening]
        for choice in self.choices:
            content = msgspec.structs.replace(choice, finish_reason=None, stop="")
            end = Chunk(index=choice.index, finish_reason=choice.finish_reason, stop=choice.stop)
            events += [self._format.delta(content, 0) + tail] if has_content(content) else []
            events.append(self._format.delta(end, 0) + tail)  # without a token, so without an offset
        if include_usage:
            events.append(b'],"usage":' + usage_json(self.usage) + b"}\n\n")
        return (b"", *events)


def coalesce(chunks: Iterable[Chunk]) -> tuple[tuple[Chunk, ...], Usage]:
    """Merge a streamed answer into one finished chunk per choice, by index, and the usage of all choices; without a
    report of it the tokens are counted. Raises StreamBroken if a choice has no finish_reason, or there is no choice.
    """
    choices: dict[int, list[Chunk]] = {}
    usage: Usage | None = None
    for chunk in chunks:
        usage = chunk.usage or usage
        if chunk.usage is None or has_content(chunk) or chunk.tokens:  # else it belongs to no choice
            choices.setdefault(chunk.index, []).append(chunk)
    whole = tuple([_merged_choice(at, found) for at, found in sorted(choices.items())])
    if not whole:
        raise StreamBroken("The answer has no choice. Send the request again.", phase="stream")
    return whole, usage or Usage(completion_tokens=sum(chunk.tokens for chunk in whole))


def is_keepable(request: Request, choices: Iterable[Chunk], usage: Usage) -> bool:
    """Return whether a cache may replay an answer. It may not if another attempt could give a better answer:

    1. The answer is a refusal, was filtered, or has neither text nor a call.
    2. The answer was truncated at the server's own limit instead of one that the request set; that limit may change.
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


def _merged_choice(index: int, chunks: list[Chunk]) -> Chunk:
    if len(chunks) == 1 and chunks[0].finish_reason and not chunks[0].tool_calls:  # the answer came whole
        return chunks[0] if chunks[0].usage is None else msgspec.structs.replace(chunks[0], usage=None)
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
        reasoning="".join([chunk.reasoning for chunk in chunks]),
        extra=merged_extra([chunk.extra for chunk in chunks if chunk.extra]),
        note=_last([chunk.note for chunk in chunks]) or "",
        stop=_last([chunk.stop for chunk in chunks]) or "",
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
