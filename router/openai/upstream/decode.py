"""The decoding of answers of OpenAI-compatible servers into Chunks, whole or streamed, in the dialects of real servers.

Tolerated: content as a list of parts; null or missing content, role, index and usage; numbers as text; usage on every
chunk; a missing ``[DONE]`` after every choice has ended; finish reasons of other names, or twice; tool calls without
index or id, or all at one index; thoughts as ``reasoning_content``, ``reasoning`` or parts; a message instead of a
delta. Fields that we do not interpret are kept with their message or call. Bytes that are not an answer raise
CloudUnreadable; an answer that stops before its end raises StreamBroken.

`SSEParser` splits a stream into events, `StreamDecoder` decodes them, and `EventTemplate` decodes events of only text.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from ...errors import CloudUnreadable, Phase, StreamBroken
from ...types import Chunk, FinishReason, ToolCallDelta, Usage
from ..answer import coalesce
from ..request_body import JSONObject, inner_extra
from . import wire
from .wire import CallTracker

MAX_EVENT_BYTES: Final = 8 * 1024 * 1024
_BOM: Final = b"\xef\xbb\xbf"


class Event(msgspec.Struct, frozen=True):
    """A server-sent event. Several data lines are joined by newlines; `type` is empty for a plain message."""

    data: bytes
    type: bytes = b""
    id: bytes = b""


def event(data: bytes) -> bytes:
    """Encode `data` as an event. Each of its lines becomes a data line."""
    if b"\n" in data or b"\r" in data:
        data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").replace(b"\n", b"\ndata: ")
    return b"data: " + data + b"\n\n"


class SSEParser:
    """A parser of bytes, in pieces of any size, to events. Raises CloudUnreadable for an event above `max_event_bytes`.

    Source: https://html.spec.whatwg.org/multipage/server-sent-events.html
    """

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_bytes = max_event_bytes
        self._started = False  # False while the first bytes may be a byte order mark
        self._skip_newline = False  # the last byte was CR: a following LF belongs to it
        self._partial: list[bytes] = []  # pieces of the unfinished line
        self._size = 0  # bytes held for the unfinished event
        self._data: list[bytes] = []
        self._type = b""
        self._id = b""

    @property
    def pending(self) -> bool:
        """Whether an unfinished event is buffered, which at the end of a stream means that the stream was cut."""
        return self._size > 0

    @property
    def idle(self) -> bool:
        """Whether the next byte begins an event, so that whole events may bypass this parser."""
        return self._started and not self._size and not self._skip_newline

    def feed(self, data: bytes) -> list[Event]:
        """Return the events that these bytes complete. Raises CloudUnreadable for an event that is too large."""
        if not self._size and not self._skip_newline and len(data) <= self._max_bytes and (plain := _events_of(data)):
            self._started = True
            return [Event(one, b"", self._id) for one in plain]
        data = self._normalize_newlines(data if self._started else self._strip_bom(data))
        events: list[Event] = []
        # Pieces of a line are joined only at its end, so a long line that arrives slowly costs linear time.
        *lines, rest = data.split(b"\n")
        if lines and self._partial:
            lines[0] = self._complete_line(lines[0])
        for line in lines:
            self._parse_line(line, events)
        if rest:
            self._count_bytes(rest)
            self._partial.append(rest)
        return events

    def _complete_line(self, end: bytes) -> bytes:
        start = b"".join(self._partial)
        self._partial.clear()
        self._size -= len(start)  # counted again as a line
        return start + end

    def _parse_line(self, line: bytes, events: list[Event]) -> None:
        if line.startswith(b"data: "):  # nearly every line
            self._count_bytes(line)
            self._data.append(line[6:])
        elif not line:
            self._dispatch(events)
        else:
            self._parse_field(line)

    def _parse_field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")  # a comment has no name
        value = value.removeprefix(b" ")
        if name == b"data":
            self._count_bytes(line)
            self._data.append(value)
        elif name == b"event":
            self._count_bytes(line)
            self._type = value
        elif name == b"id" and b"\0" not in value:
            self._id = value[: self._max_bytes]

    def _dispatch(self, events: list[Event]) -> None:
        if self._data:
            data = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
            events.append(Event(data, self._type, self._id))
            self._data.clear()
        self._type = b""
        self._size = 0

    def _count_bytes(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._size > self._max_bytes:
            raise CloudUnreadable(f"The target sent an event of more than {self._max_bytes} bytes.", phase="stream")

    def _normalize_newlines(self, data: bytes) -> bytes:
        if self._skip_newline and data:
            self._skip_newline = False
            data = data.removeprefix(b"\n")
        if b"\r" in data:
            self._skip_newline = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        return data

    def _strip_bom(self, data: bytes) -> bytes:
        held = b"".join([*self._partial, data])
        self._partial.clear()
        self._size = 0
        if len(held) < len(_BOM) and _BOM.startswith(held):
            # The bytes may still become a byte order mark; keep them as the start of a line.
            self._partial = [held] if held else []
            self._size = len(held)
            return b""
        self._started = True
        return held.removeprefix(_BOM)


def _events_of(data: bytes) -> list[bytes]:
    """Return the data of whole events of one line each, as most servers send them; [] if there is anything else."""
    if not data.startswith(b"data: ") or not data.endswith(b"\n\n") or b"\r" in data:
        return []
    events = data[6:-2].split(b"\n\ndata: ")
    return events if data.count(b"\n") == 2 * len(events) else []


_KEYS: Final = (b'"content":', b'"text":')
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(str).decode


class EventTemplate:
    """The bytes `before` and `after` the text of an event. `index`: the choice that the text belongs to."""

    def __init__(self, before: bytes, after: bytes, index: int) -> None:
        self.index = index
        self.before = before
        self.after = after
        self._text = slice(len(before), -len(after))

    def text(self, event: bytes) -> str | None:
        """Return the text; None if the event must be decoded."""
        if not event.startswith(self.before) or not event.endswith(self.after):
            return None
        try:
            return _decode(event[self._text])  # empty if prefix and suffix overlap, which is not JSON
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None

    def texts(self, events: bytes) -> list[bytes]:
        """Return the texts of whole events as JSON strings, none empty; [] if `events` contains anything else, such as
        a line break next to a string, which JSON allows and an event does not.
        """
        if not events.startswith(self.before) or not events.endswith(self.after):
            return []
        text = events[self._text]
        texts = [text]
        if b"\n" in text:
            texts = text.split(self.after + self.before)
            if text.count(b"\n") != 2 * (len(texts) - 1):  # each event ends with two
                return []
        if b"\r" in text:
            return []
        try:
            return texts if all(map(_decode, texts)) else []
        except (msgspec.DecodeError, UnicodeDecodeError):
            return []

    def framed(self) -> EventTemplate:
        """Return the template of the event as sent. JSON escapes newlines, so no text has an event's end."""
        return EventTemplate(b"data: " + self.before, self.after + b"\n\n", self.index)

    def filled(self, text: str) -> bytes:
        return self.before + _encode(text) + self.after


def split_event(event: bytes, text: str, index: int) -> EventTemplate | None:
    """Split an event around its text; None if that is not found, or escaped differently from our encoder."""
    literal = _encode(text)
    for key in _KEYS:
        at = event.find(key)
        if at < 0:
            continue
        at += len(key)
        at += event[at:].startswith(b" ")
        if event.startswith(literal, at):
            return EventTemplate(event[:at], event[at + len(literal) :], index)
    return None


_SPLITS: Final = 4  # events of a stream that may become its template; some servers vary a field from event to event
_PROBE: Final = "another text"
_BLANK: Final = b"\xef\xbb\xbf \t\r\n"
_EVENTS: Final = (b"data:", b"event:", b"id:", b"retry:", b":")
_MESSAGE: Final = frozenset(
    {"role", "content", "tool_calls", "function_call", "refusal", "reasoning_content", "reasoning"}
)


class _PlainMessage(msgspec.Struct, forbid_unknown_fields=True):
    content: str
    role: str | None = None
    refusal: None = None
    reasoning_content: None = None
    reasoning: None = None
    tool_calls: Annotated[list[object], msgspec.Meta(max_length=0)] | None = None
    function_call: None = None
    annotations: None = None
    audio: None = None


class _PlainChoice(msgspec.Struct, gc=False):
    index: Annotated[int, msgspec.Meta(ge=0)]
    message: _PlainMessage
    finish_reason: str
    logprobs: None = None
    stop_reason: int | None = None  # vLLM's: a text is a stop string


_Number = Annotated[int, msgspec.Meta(ge=0)]


class _PromptDetails(msgspec.Struct):
    cached_tokens: _Number | None = None


class _CompletionDetails(msgspec.Struct):
    reasoning_tokens: _Number | None = None


_NO_PROMPT_DETAILS: Final = _PromptDetails()
_NO_COMPLETION_DETAILS: Final = _CompletionDetails()


class _PlainUsage(msgspec.Struct, gc=False):
    prompt_tokens: _Number = 0
    completion_tokens: _Number = 0
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _CompletionDetails | None = None

    def read(self) -> Usage:
        prompt = self.prompt_tokens_details or _NO_PROMPT_DETAILS
        completion = self.completion_tokens_details or _NO_COMPLETION_DETAILS
        return Usage(
            self.prompt_tokens, self.completion_tokens, prompt.cached_tokens or 0, completion.reasoning_tokens or 0
        )


class _PlainAnswer(msgspec.Struct, gc=False):
    """A chat's answer of the usual form, decoded in a fifth of `wire`'s time, with the same result."""

    choices: Annotated[list[_PlainChoice], msgspec.Meta(min_length=1)]
    usage: _PlainUsage | None = None
    error: None = None
    object: str = ""
    causeway: None = None


_decode_plain = msgspec.json.Decoder(_PlainAnswer).decode


class _PlainDelta(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    content: str | None = None
    role: str | None = None
    refusal: None = None
    reasoning_content: None = None
    reasoning: None = None
    tool_calls: None = None
    function_call: None = None


class _PlainChoiceDelta(msgspec.Struct, gc=False):
    index: Annotated[int, msgspec.Meta(ge=0)]
    delta: _PlainDelta
    finish_reason: str | None = None
    logprobs: None = None
    stop_reason: int | None = None


class _PlainEvent(msgspec.Struct, gc=False):
    """A chat's event of the usual form, as `_PlainAnswer`."""

    choices: Annotated[list[_PlainChoiceDelta], msgspec.Meta(min_length=1, max_length=1)]
    usage: None = None
    error: None = None
    object: str = ""
    causeway: None = None


class _UsageEvent(msgspec.Struct, gc=False):
    choices: Annotated[list[str], msgspec.Meta(max_length=0)]
    usage: _PlainUsage
    error: None = None
    object: str = ""
    causeway: None = None


_decode_plain_event = msgspec.json.Decoder(_PlainEvent).decode
_decode_usage_event = msgspec.json.Decoder(_UsageEvent).decode
_NO_CHOICES: Final = b'"choices":[]'


def _plain(body: bytes) -> list[Chunk]:
    """Decode an answer of the usual form; [] for any other. Raises CloudFailed as `decode_answer` does."""
    try:
        answer = _decode_plain(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []
    if answer.object == "error":
        return []
    usage = None if answer.usage is None else answer.usage.read()
    last = len(answer.choices) - 1
    tokens = usage.completion_tokens if usage is not None and not last else 0
    chunks = []
    for at, choice in enumerate(answer.choices):
        reason, note = wire.finish_of(choice.finish_reason, "first_token")
        end = reason or "stop"
        reported = usage if at == last else None
        chunks.append(Chunk(choice.message.content, choice.index, tokens, finish_reason=end, note=note, usage=reported))
    return chunks


def decode_answer(body: bytes, request_id: str = "") -> list[Chunk]:
    """Decode a whole answer: one chunk per choice; the last one, or a further one, has the usage if it is reported. Ids
    of tool calls are made unique by `request_id`. Raises CloudUnreadable; CloudFailed if the server reports an error,
    or gave up.
    """
    if plain := _plain(body):
        return plain
    if body.lstrip(_BLANK).startswith(_EVENTS):
        return _streamed(body, request_id)
    answer = wire.read_answer(body, "first_token")
    choices = wire.choices_of(answer)
    if not choices:
        raise CloudUnreadable("The target's answer has no choices.")
    usage = wire.usage_of(answer.get("usage"))
    tokens = usage.completion_tokens if usage is not None and len(choices) == 1 else 0
    chunks = [_whole(choice, at, tokens, request_id) for at, choice in enumerate(choices)]
    return chunks if usage is None else [*chunks, Chunk(usage=usage)]


def _streamed(body: bytes, request_id: str) -> list[Chunk]:
    """Decode a stream that a server sends in place of a whole answer."""
    decoder = StreamDecoder(request_id)
    chunks = [chunk for event in SSEParser().feed(body) for chunk in decoder.feed(event.data)]
    whole, usage = coalesce([*chunks, *decoder.finish()])
    return [*whole, Chunk(usage=usage)]


class _ChoiceEnd(msgspec.Struct):
    """The end of a choice, sent last, because some servers end one more than once, or continue after it."""

    reason: FinishReason
    note: str
    stop: str = ""


class StreamDecoder:
    """Decodes streamed answers: `feed` with each event's data, then `finish` at the end of the bytes. Finish reasons
    and usage are returned once, as the last chunks.
    """

    def __init__(self, request_id: str = "", choices: int = 1) -> None:
        """Create a decoder for one stream. Args: request_id: Makes the generated ids of tool calls unique.
        choices: The number of choices of the answer.
        """
        self.done = False  # [DONE] was read: everything after it is ignored
        self._request_id = request_id
        self._choices = choices
        self._seen: set[int] = set()
        self._ends: dict[int, _ChoiceEnd] = {}
        self._usage: Usage | None = None
        self._calls: dict[int, CallTracker] = {}
        self._template: EventTemplate | None = None  # of the events that are text alone
        self._framed: EventTemplate | None = None  # the same events as they are sent
        self._splits = 0

    @property
    def whole(self) -> bool:
        """Whether every choice has ended, so that only the usage may follow."""
        return len(self._ends) >= self._choices and self._seen == self._ends.keys()

    def feed(self, event_data: bytes) -> list[Chunk]:
        """Return the chunks of an event. Raises CloudUnreadable; CloudFailed if the event reports an error."""
        if self.done:
            return []
        if self._template is not None and (text := self._template.text(event_data)):
            return [self._text(text, self._template.index)]
        data = event_data.strip()
        if not data:
            return []
        if data == b"[DONE]":
            return self._done()
        if (plain := self._plain(event_data)) is not None:
            return plain
        answer = wire.read_answer(data, self._phase)
        self._usage = wire.usage_of(answer.get("usage")) or self._usage
        read = (self._chunk(choice, at) for at, choice in enumerate(wire.choices_of(answer, self._phase)))
        chunks = [chunk for chunk in read if chunk is not None]
        if len(chunks) == 1 and self._splits < _SPLITS:
            self._learn(event_data, answer, chunks[0])
        return chunks

    def feed_text(self, data: bytes) -> Chunk | None:
        """Return the chunk of `data` if that is one whole event of only text; else return None and change nothing."""
        if self._framed is None or self.done:
            return None
        text = self._framed.text(data)
        return self._text(text, self._framed.index) if text else None

    @property
    def text_template(self) -> EventTemplate | None:
        """The template of events that are text alone, until the next `feed`; None if the choice may have ended."""
        return None if self.done or self._ends else self._framed

    def _text(self, text: str, index: int) -> Chunk:
        self._seen.add(index)
        self._ends.pop(index, None)  # more text follows, so the choice has not ended
        return Chunk(text, index, 1)

    def _learn(self, event_data: bytes, answer: JSONObject, chunk: Chunk) -> None:
        """Keep the template of an event with only text, once the bytes around its text have repeated."""
        choices = wire.choices_of(answer)
        if chunk != Chunk(chunk.text, chunk.index, 1) or answer.get("usage") is not None or len(choices) != 1:
            return
        if chunk.index in self._ends:
            return  # the same event with another text would not end the choice
        self._splits += 1
        template = split_event(event_data, chunk.text, chunk.index)
        if template is None:
            return
        probe = wire.read_answer(template.filled(_PROBE), self._phase)
        if _with_text(probe, _PROBE, chunk.text) == answer:
            self._template, self._framed = template, template.framed()

    def _plain(self, event_data: bytes) -> list[Chunk] | None:
        """Decode an event of the usual form, as `_chunk` does; None for any other. Raises CloudFailed."""
        try:
            if _NO_CHOICES in event_data:
                usage = _decode_usage_event(event_data)
                if usage.object == "error":
                    return None
                self._usage = usage.usage.read()
                return []
            event = _decode_plain_event(event_data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        if event.object == "error":
            return None
        choice = event.choices[0]
        index, text = choice.index, choice.delta.content
        ended = choice.finish_reason is not None
        reason, note = wire.finish_of(choice.finish_reason, self._phase) if ended else (None, "")
        self._seen.add(index)
        if reason is not None:
            self._ends[index] = _ChoiceEnd(reason, note, "")
        elif text:
            self._ends.pop(index, None)
        if not text:
            return []
        if reason is None and self._splits < _SPLITS:
            self._splits += 1
            template = split_event(event_data, text, index)
            if template is not None:
                probe = _decode_plain_event(template.filled(_PROBE))  # only a string differs
                if probe.choices[0].delta.content == _PROBE:
                    self._template, self._framed = template, template.framed()
        return [Chunk(text, index, 1)]

    def finish(self) -> list[Chunk]:
        """Return the last chunks at the end of the bytes. Raises StreamBroken if a choice has no end, or none came."""
        if self.done:
            return []
        if not self._seen or self._seen != self._ends.keys():
            raise StreamBroken("The target's stream stopped before its end.", phase=self._phase)
        return self._done()

    @property
    def _phase(self) -> Phase:
        return "stream" if self._seen else "first_token"

    def _done(self) -> list[Chunk]:
        if not self._seen:
            raise CloudUnreadable("The target's stream has no choices.")
        self.done = True
        chunks = [self._end(index) for index in sorted(self._seen)]
        return chunks if self._usage is None else [*chunks, Chunk(usage=self._usage)]

    def _end(self, index: int) -> Chunk:
        # The target says that the stream is done, so a choice without finish_reason counts as finished.
        end = self._ends.get(index) or _ChoiceEnd("stop", "")
        return Chunk(
            index=index, finish_reason=_with_calls(end.reason, self._calls.get(index)), note=end.note, stop=end.stop
        )

    def _chunk(self, choice: JSONObject, position: int) -> Chunk | None:
        index = wire.index_of(choice, position)
        reason, note = wire.finish_of(choice.get("finish_reason"), self._phase)
        delta = choice.get("delta")
        message = delta if isinstance(delta, dict) else choice.get("message")
        logprobs = wire.logprobs_of(choice.get("logprobs"))
        text, thought, refusal, extra, pieces = _content_of(choice, message, self._phase)
        calls: tuple[ToolCallDelta, ...] = ()
        if pieces:
            tracker = self._calls.setdefault(index, CallTracker(self._request_id, index))
            calls = tuple([call for piece in pieces if (call := tracker.delta(piece)) is not None])
        self._seen.add(index)
        if reason is not None:
            self._ends[index] = _ChoiceEnd(reason, note, wire.text(choice.get("stop_reason")))
        elif text or calls or thought:
            self._ends.pop(index, None)
        if not (text or logprobs or calls or refusal or thought or extra):
            return None  # only a role, or the end
        tokens = len(logprobs) or (1 if text or calls or thought else 0)
        return Chunk(text, index, tokens, calls, logprobs, refusal=refusal, reasoning=thought, extra=extra)


def _with_text(answer: JSONObject, text: str, replacement: str) -> JSONObject:
    """Replace the text of the only choice, if that is `text`."""
    for choice in wire.choices_of(answer):
        delta = choice.get("delta")
        if isinstance(delta, dict):
            if delta.get("content") == text:
                delta["content"] = replacement
        elif choice.get("text") == text:
            choice["text"] = replacement
    return answer


def _content_of(
    choice: JSONObject, message: object, phase: Phase
) -> tuple[str, str, str | None, str, list[JSONObject]]:
    """Return text, reasoning, refusal, other fields and tool calls; a call in OpenAI's former field is included."""
    if not isinstance(message, dict):
        return wire.text(choice.get("text")), "", None, "", []
    pieces = wire.objects(message.get("tool_calls"))
    if isinstance(former := message.get("function_call"), dict):
        pieces.append({"function": former})
    return *wire.content_of(message, phase), inner_extra(message, _MESSAGE), pieces


def _whole(choice: JSONObject, position: int, tokens: int, request_id: str) -> Chunk:
    index = wire.index_of(choice, position)
    found = choice.get("message")
    message = found if isinstance(found, dict) else choice.get("delta")
    text, thought, refusal, extra, pieces = _content_of(choice, message, "first_token")
    tracker = CallTracker(request_id, index)
    calls = tuple([call for piece in pieces if (call := tracker.whole(piece)) is not None])
    logprobs = wire.logprobs_of(choice.get("logprobs"))
    reason, note = wire.finish_of(choice.get("finish_reason"), "first_token")
    return Chunk(
        text=text,
        index=index,
        tokens=tokens or len(logprobs),
        tool_calls=calls,
        logprobs=logprobs,
        finish_reason=_with_calls(reason or "stop", tracker),
        refusal=refusal,
        reasoning=thought,
        extra=extra,
        note=note,
        stop=wire.text(choice.get("stop_reason")),
    )


def _with_calls(reason: FinishReason, calls: CallTracker | None) -> FinishReason:
    return "tool_calls" if calls and reason == "stop" else reason
