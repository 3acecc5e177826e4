"""An OpenAI-compatible server's answers → Chunks, whole or streamed, in the dialects that servers really speak.

Tolerated: content as a list of parts; null or missing content, role, index and usage; numbers as text; usage on every
chunk; a missing ``[DONE]`` after every choice has ended; finish reasons of other names, or twice; tool calls without
index or id, or all at one index; thoughts as ``reasoning_content``, ``reasoning`` or parts; a message in the place of a
delta. Fields that we do not interpret travel with the message or the call that they belong to. Bytes that are not an
answer raise CloudUnreadable; an answer that stops before its end raises StreamBroken.
"""

from __future__ import annotations

from typing import Final

import msgspec

from ...errors import CloudUnreadable, Phase, StreamBroken
from ...sse import SSEParser
from ...types import Chunk, FinishReason, ToolCallDelta, Usage
from ..cached_answer import coalesce
from ..extra import JSONObject, extra_of
from . import wire
from .calls import CallTracker
from .event_template import EventTemplate, split_event

_SPLITS: Final = 4  # events of a stream that may become its template; some servers vary a field from event to event
_PROBE: Final = "another text"
_BLANK: Final = b"\xef\xbb\xbf \t\r\n"
_EVENTS: Final = (b"data:", b"event:", b"id:", b"retry:", b":")
_MESSAGE: Final = frozenset(
    {"role", "content", "tool_calls", "function_call", "refusal", "reasoning_content", "reasoning"}
)


def decode_answer(body: bytes, request_id: str = "") -> list[Chunk]:
    """Decode a whole answer: one chunk per choice, then one with the usage if it is reported.

    Args:
        body: the answer.
        request_id: makes the ids unique of tool calls that have none.

    Raises:
        CloudUnreadable: the body is not an answer.
        CloudFailed: the body reports an error, or that the server gave up.
    """
    if body.lstrip(_BLANK).startswith(_EVENTS):
        return _streamed(body, request_id)
    answer = wire.read_answer(body, "first_token")
    choices = wire.choices_of(answer)
    if not choices:
        raise CloudUnreadable("The target's answer has no choices.")
    usage = wire.usage_of(answer.get("usage"))
    tokens = usage.completion_tokens if usage is not None and len(choices) == 1 else 0
    chunks = [_whole(choice, at, tokens, request_id) for at, choice in enumerate(choices)]
    if chunks[0].finish_reason == "length" and (token := wire.token_of(answer)):
        chunks[0] = msgspec.structs.replace(chunks[0], resume=token)
    return chunks if usage is None else [*chunks, Chunk(usage=usage)]


def _streamed(body: bytes, request_id: str) -> list[Chunk]:
    """Decode a stream that a server sends in the place of a whole answer."""
    decoder = StreamDecoder(request_id)
    chunks = [chunk for event in SSEParser().feed(body) for chunk in decoder.feed(event.data)]
    whole, usage = coalesce([*chunks, *decoder.finish()])
    return [*whole, Chunk(usage=usage)]


class _ChoiceEnd(msgspec.Struct):
    """How a choice ends. It is sent last, as some servers end a choice more than once, or say more after its end."""

    reason: FinishReason
    note: str
    resume: str


class StreamDecoder:
    """Decodes a streamed answer, event by event: `feed` the data of each event, then `finish` at the end of the bytes.

    The finish reasons and the usage come once, as the last chunks.
    """

    def __init__(self, request_id: str = "", choices: int = 1) -> None:
        """Decode one stream.

        Args:
            request_id: makes the ids unique of tool calls that have none.
            choices: how many the answer has.
        """
        self.done = False  # [DONE] was read: everything after it is ignored
        self._request_id = request_id
        self._choices = choices
        self._seen: set[int] = set()
        self._ends: dict[int, _ChoiceEnd] = {}
        self._usage: Usage | None = None
        self._calls: dict[int, CallTracker] = {}
        self._template: EventTemplate | None = None  # of the events that are text alone
        self._framed: EventTemplate | None = None  # of the same as they are sent
        self._splits = 0

    @property
    def whole(self) -> bool:
        """Whether every choice has ended: only the usage may follow."""
        return len(self._ends) >= self._choices and self._seen == self._ends.keys()

    def feed(self, event_data: bytes) -> list[Chunk]:
        """Return the chunks of one event.

        Raises:
            CloudUnreadable: the data is not an answer.
            CloudFailed: the data reports an error, or that the server gave up.
        """
        if self.done:
            return []
        if self._template is not None and (text := self._template.text(event_data)):
            return [self._text(text, self._template.index)]
        data = event_data.strip()
        if not data:
            return []
        if data == b"[DONE]":
            return self._done()
        answer = wire.read_answer(data, self._phase)
        self._usage = wire.usage_of(answer.get("usage")) or self._usage
        resume = wire.token_of(answer)
        read = (self._chunk(choice, at, resume) for at, choice in enumerate(wire.choices_of(answer, self._phase)))
        chunks = [chunk for chunk in read if chunk is not None]
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
        self._seen.add(index)
        self._ends.pop(index, None)  # an end is one only if nothing follows it
        return Chunk(text, index, 1)

    def _learn(self, event_data: bytes, answer: JSONObject, chunk: Chunk) -> None:
        """Remember an event of text alone, once it is certain that its bytes around the text mean the same."""
        choices = wire.choices_of(answer)
        if chunk != Chunk(chunk.text, chunk.index, 1) or answer.get("usage") is not None or len(choices) != 1:
            return
        self._splits += 1
        template = split_event(event_data, chunk.text, chunk.index)
        if template is None:
            return
        probe = wire.read_answer(template.filled(_PROBE), self._phase)
        if _with_text(probe, _PROBE, chunk.text) == answer:
            self._template, self._framed = template, template.framed()

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
        # The target reports that it is done, so a choice without finish_reason counts as finished.
        end = self._ends.get(index) or _ChoiceEnd("stop", "", "")
        resume = end.resume if end.reason == "length" else ""
        return Chunk(
            index=index, finish_reason=_with_calls(end.reason, self._calls.get(index)), resume=resume, note=end.note
        )

    def _chunk(self, choice: JSONObject, position: int, resume: str) -> Chunk | None:
        index = wire.index_of(choice, position)
        reason, note = wire.finish_of(choice.get("finish_reason"), self._phase)
        delta = choice.get("delta")
        message = delta if isinstance(delta, dict) else choice.get("message")
        logprobs = wire.logprobs_of(choice.get("logprobs"))
        text, thought, refusal, extra = wire.text(choice.get("text")), "", None, ""
        calls: tuple[ToolCallDelta, ...] = ()
        if isinstance(message, dict):
            text, thought, refusal = wire.content_of(message, self._phase)
            extra = extra_of(message, _MESSAGE)
            pieces = _call_pieces(message)
            if pieces:
                tracker = self._calls.setdefault(index, CallTracker(self._request_id, index))
                calls = tuple([call for piece in pieces if (call := tracker.delta(piece)) is not None])
        self._seen.add(index)
        if reason is not None:
            self._ends[index] = _ChoiceEnd(reason, note, resume)
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


def _call_pieces(message: JSONObject) -> list[JSONObject]:
    """Return the tool calls of a message, one in OpenAI's former field included."""
    pieces = wire.objects(message.get("tool_calls"))
    former = message.get("function_call")
    return [*pieces, {"function": former}] if isinstance(former, dict) else pieces


def _whole(choice: JSONObject, position: int, tokens: int, request_id: str) -> Chunk:
    index = wire.index_of(choice, position)
    found = choice.get("message")
    message = found if isinstance(found, dict) else choice.get("delta")
    text, thought, refusal, extra = wire.text(choice.get("text")), "", None, ""
    tracker = CallTracker(request_id, index)
    calls: tuple[ToolCallDelta, ...] = ()
    if isinstance(message, dict):
        text, thought, refusal = wire.content_of(message, "first_token")
        extra = extra_of(message, _MESSAGE)
        calls = tuple([call for piece in _call_pieces(message) if (call := tracker.whole(piece)) is not None])
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
    )


def _with_calls(reason: FinishReason, calls: CallTracker | None) -> FinishReason:
    return "tool_calls" if calls and reason == "stop" else reason
