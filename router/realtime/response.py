"""The events that build a response: its items, their parts, and text and arguments as they are generated; also the
bounds of a session, and the actions that its caller has to take after an event of the client (`Effect`).
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from ..errors import CausewayError, StreamBroken
from ..openai.answer import error_fields
from ..types import Chunk, Request, RoutingHints, ToolCallDelta, Usage
from .conversation import Conversation, make_item, spoken_answer
from .wire import JSONObject

Emit = Callable[[str, JSONObject], None]
Status = Literal["completed", "cancelled", "incomplete", "failed"]
_SENTENCE: Final = re.compile(r"[.!?:;]+[\"')\]]*\s|\n")
_BEGINNING: Final = 8  # pieces of a text that show whether it is JSON
_CUT: Mapping[str, str] = {"length": "max_output_tokens", "content_filter": "content_filter"}


@dataclass(eq=False, repr=False)
class ResponseStream:
    """A response from `response.created` to `response.done`. Every response ends in `_end`. Its items are added to the
    `conversation`, unless it is outside one (None).
    """

    id: str  # the id of the response, from which the ids of its items are derived
    emit: Emit  # adds an event, by its type and fields, to the session's log
    conversation: Conversation | None
    echo: JSONObject  # fields of the response that repeat those of the client's request
    on_end: Callable[[], None]  # a function that is called once, after the last event
    hints: RoutingHints  # the hints of the request, which the items keep
    spoken: bool = False  # whether the response is spoken, so that its text is the transcript of its audio

    def __post_init__(self) -> None:
        self.ended = False
        """Whether `response.done` was sent. Later chunks are then dropped."""
        self._output: list[msgspec.Raw] = []  # finished items
        self._open: _GeneratedItem | None = None
        self._finish = ""
        self._tokens = 0
        self._usage: Usage | None = None
        self._head: JSONObject = {}
        self.emit("response.created", {"response": self._response("in_progress", None)})

    @property
    def finished(self) -> bool:
        """Whether the answer has its finish reason, so that only the usage may follow."""
        return bool(self._finish)

    def commit(self, head: JSONObject) -> None:
        """Set the object `causeway` of `response.done`, which describes the route."""
        self._head = head

    def chunk(self, chunk: Chunk) -> None:
        """Add the events for a chunk; reasoning has no events."""
        if self.ended:
            return
        if chunk.usage is not None:
            self._usage = chunk.usage
        self._tokens += chunk.tokens
        if text := chunk.text or chunk.refusal:
            self._text(text)
        for call in chunk.tool_calls:
            self._call(call)
        self._finish = chunk.finish_reason or self._finish

    def ready_to_speak(self, *, rest: bool = False) -> str:
        """Return the new whole sentences of the open message, or all the rest; "" for none. A JSON object, such as the
        call of a model that answers with calls, is not spoken.
        """
        item = self._open
        if item is None or item.is_call or item.is_json or not self.spoken:
            return ""
        ends = [len(item.unspoken)] if rest else [found.end() for found in _SENTENCE.finditer(item.unspoken)]
        ready, item.unspoken = item.unspoken[: ends[-1]] if ends else "", item.unspoken[ends[-1] if ends else 0 :]
        return ready.strip()

    def audio(self, pcm: bytes) -> None:
        """Add the event for audio of the open message."""
        if self._open is not None and not self.ended:
            delta = base64.b64encode(pcm).decode()
            self.emit("response.output_audio.delta", {**self._part_of(self._open), "delta": delta})

    def complete(self) -> None:
        """End the answer. An answer without a finish reason counts as broken."""
        if not self._finish:
            self.fail(StreamBroken("The answer stopped before its end. Send the request again.", phase="stream"))
        elif reason := _CUT.get(self._finish):
            self._end("incomplete", {"type": "incomplete", "reason": reason})
        else:
            self._end("completed", {"type": "completed"})

    def cancel(self, reason: Literal["client_cancelled", "turn_detected"] = "client_cancelled") -> None:
        """End the answer with its content so far, because the client interrupted."""
        self._end("cancelled", {"type": "cancelled", "reason": reason})

    def fail(self, error: CausewayError) -> None:
        """End the answer with its content so far, and the error."""
        self._end("failed", {"type": "failed", "error": error_fields(error)})

    # --- items -------------------------------------------------------------------------------------------------------

    def _text(self, text: str) -> None:
        item = self._open
        if item is None or item.is_call:
            item = self._begin(None)
            self.emit("response.content_part.added", {**self._part_of(item), "part": self._part("")})
        item.pieces.append(text)
        kind = "response.output_text.delta"
        if self.spoken:
            item.unspoken += text
            kind = "response.output_audio_transcript.delta"
        self.emit(kind, {**self._part_of(item), "delta": text})

    def _call(self, call: ToolCallDelta) -> None:
        item = self._open
        if item is None or item.call_index != call.index:
            item = self._begin(call)
        if call.arguments:
            item.pieces.append(call.arguments)
            fields = {**self._place_of(item), "call_id": item.call_id, "delta": call.arguments}
            self.emit("response.function_call_arguments.delta", fields)

    def _begin(self, call: ToolCallDelta | None) -> _GeneratedItem:
        self._close("completed")
        item = self._open = _GeneratedItem(f"item_{self.id.partition('_')[2]}_{len(self._output)}", call)
        made = make_item(item.id, item.fields(begun=True), "in_progress")
        self.emit("response.output_item.added", {**self._output_place, "item": made.body})
        if self.conversation is not None:
            self.conversation.insert(made.restricted(self.hints))
            previous = self.conversation.previous(item.id)
            self.emit("conversation.item.added", {"previous_item_id": previous, "item": made.body})
        return item

    def _close(self, status: Literal["completed", "incomplete"]) -> None:
        """Add the last events of the open item, and the item to the output."""
        item, self._open = self._open, None
        if item is None:
            return
        text = "".join(item.pieces)
        if item.is_call:
            fields = {"call_id": item.call_id, "name": item.name, "arguments": text}
            self.emit("response.function_call_arguments.done", {**self._place_of(item), **fields})
        else:
            if self.spoken:
                self.emit("response.output_audio.done", self._part_of(item))
                self.emit("response.output_audio_transcript.done", {**self._part_of(item), "transcript": text})
            else:
                self.emit("response.output_text.done", {**self._part_of(item), "text": text})
            self.emit("response.content_part.done", {**self._part_of(item), "part": self._part(text)})
        is_spoken = self.spoken and not item.is_call
        made = spoken_answer(item.id, text, status) if is_spoken else make_item(item.id, item.fields(), status)
        self.emit("response.output_item.done", {**self._output_place, "item": made.body})
        self._output.append(made.body)
        if self.conversation is not None and item.id in self.conversation:
            self.conversation.replace(made.restricted(self.hints))
            previous = self.conversation.previous(item.id)
            self.emit("conversation.item.done", {"previous_item_id": previous, "item": made.body})

    @property
    def _output_place(self) -> JSONObject:
        return {"response_id": self.id, "output_index": len(self._output)}

    def _place_of(self, item: _GeneratedItem) -> JSONObject:
        return {"response_id": self.id, "item_id": item.id, "output_index": len(self._output)}

    def _part(self, text: str) -> JSONObject:
        return {"type": "audio", "transcript": text} if self.spoken else {"type": "text", "text": text}

    def _part_of(self, item: _GeneratedItem) -> JSONObject:
        return {**self._place_of(item), "content_index": 0}

    # --- the response ------------------------------------------------------------------------------------------------

    def _end(self, status: Status, details: JSONObject) -> None:
        if self.ended:
            return
        self._close("completed" if status == "completed" else "incomplete")
        response = self._response(status, details)
        response["usage"] = _usage(self._usage or Usage(completion_tokens=self._tokens))
        about = self._head
        if about:
            response["causeway"] = about
        self.emit("response.done", {"response": response})
        self.ended = True
        self.on_end()

    def _response(self, status: str, details: JSONObject | None) -> JSONObject:
        return {
            "id": self.id,
            "object": "realtime.response",
            "status": status,
            "status_details": details,
            "output": self._output,
            "usage": None,
            **self.echo,
        }


class _GeneratedItem:
    """The item that is being generated: a message with one part of text, or a function call."""

    def __init__(self, item_id: str, call: ToolCallDelta | None) -> None:
        self.id = item_id
        self.is_call = call is not None
        self.call_index = None if call is None else call.index
        self.call_id = "" if call is None else call.id or ""
        self.name = "" if call is None else call.name or ""
        self.pieces: list[str] = []
        self.unspoken = ""  # text of a spoken response that is not yet spoken

    @property
    def is_json(self) -> bool:
        """Whether the text is a JSON object, judged by its beginning."""
        return "".join(self.pieces[:_BEGINNING]).lstrip().startswith("{")

    def fields(self, *, begun: bool = False) -> JSONObject:
        text = "".join(self.pieces)
        if self.is_call:
            return {"type": "function_call", "call_id": self.call_id, "name": self.name, "arguments": text}
        content: list[JSONObject] = [] if begun else [{"type": "output_text", "text": text}]
        return {"type": "message", "role": "assistant", "content": content}


def _usage(usage: Usage) -> JSONObject:
    return {
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "input_token_details": {"text_tokens": usage.prompt_tokens, "cached_tokens": usage.cached_tokens},
        "output_token_details": {"text_tokens": usage.completion_tokens},
    }


class SessionLimits(msgspec.Struct, frozen=True):
    """The bounds of a session. `replay_bytes`: size of the sent events that are kept for a cut connection.
    `max_audio_s`: maximum length of all audio of its conversation, and of the audio being sent; 0: it accepts no audio.
    `speaks`: whether its answers may be spoken; `voice`: the default voice. `detects_turns`: whether turns may be
    detected in its audio. `partial_interval_s`: length of new audio between two partial transcripts; 0: there are none.
    """

    max_items: int = 256
    max_bytes: int = 256 * 1024
    replay_bytes: int = 256 * 1024
    max_audio_s: float = 0.0
    max_clips: int = 8
    speaks: bool = False
    voice: str = "en-us"
    detects_turns: bool = False
    partial_interval_s: float = 0.0


class Voice(msgspec.Struct, frozen=True):
    """The voice of a spoken answer. `speed`: 1.0 is the voice's normal speed."""

    name: str
    speed: float


class StartResponse(msgspec.Struct, frozen=True):
    """Effect: answer `request` into `response`, whose id is ``resp_`` and `id`. `voice`: None for a text answer."""

    id: str
    request: Request
    response: ResponseStream
    size_bytes: int  # size of the request as an HTTP body
    voice: Voice | None = None


class CancelResponse(msgspec.Struct, frozen=True):
    """Effect: stop answering; the client has been informed."""


class TranscribeAudio(msgspec.Struct, frozen=True):
    """Effect: transcribe audio, and call `RealtimeSession.transcribed` or `not_transcribed`. `index`: its place in the
    item's content; `wav`: a WAV file in base64.
    """

    item_id: str
    index: int
    wav: str


class TranscribePartial(msgspec.Struct, frozen=True):
    """Effect: transcribe audio that still continues, unless other requests would wait for it. `wav`: a WAV file."""

    item_id: str
    wav: bytes


class DetectSpeech(msgspec.Struct, frozen=True):
    """Effect: detect speech in the windows of audio, and call `RealtimeSession.detected` or `not_detected`. `pcm`:
    16-bit PCM at 24 kHz, windows of 32 ms; `state`: the detector's state after the previous window; `at`: the position
    of the audio's beginning.
    """

    pcm: bytes
    state: bytes
    at: int


Effect = StartResponse | CancelResponse | TranscribeAudio | DetectSpeech
