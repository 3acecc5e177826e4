"""One session: a client's events change its settings and conversation, and start or cancel its one running response.

    session.update                       1. settings
    conversation.item.create             2. an item; with `truncation: auto` the oldest ones make room, and are told
    conversation.item.delete, .retrieve  3. an item by its id
    response.create                      4. the conversation becomes a Request, which the caller answers
    response.cancel                      5. the running response ends; the caller stops the work
    input_audio_buffer.append, .clear    6. sound is kept, at most so much
    input_audio_buffer.commit            7. it becomes an item; the caller tells what is said in it, if the client asks

An event that is wrong is answered by an `error` event, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from ..errors import CausewayError, InvalidRequest, MissingField, UnsupportedFeature
from ..openai import parse_response
from ..openai.audio import Transcript
from ..openai.request_body import load, merge_hints, validate
from ..openai.wire import WireRoutingHints
from ..types import Request, RoutingHints
from .conversation import Conversation, ConversationItem, read_item, spoken_item
from .effects import CancelResponse, Effect, HearSound, SessionLimits, StartResponse, Voice
from .event_log import EventLog, error_fields
from .response import ResponseStream
from .settings import merged, supported, within
from .sound import SoundBuffer, stored_bytes
from .wire import (
    BufferAppend,
    ClientEvent,
    InputAudio,
    ItemCreate,
    ItemReference,
    JSONObject,
    OutputAudio,
    RealtimeSettings,
    ResponseCancel,
    ResponseCreate,
    ResponseFields,
    SessionAudio,
    SessionUpdate,
)

_encode = msgspec.json.Encoder().encode
_RESPONSE_FIELDS = frozenset(ResponseFields.__struct_fields__)
_SPOKEN = ("output_audio_buffer.", "conversation.item.truncate")
_SESSION_ONLY = ("type", "model", "truncation", "audio")
NO_SOUND = "sessions here take and give text, no sound."
_ANYTHING: JSONObject = {"type": "message", "role": "user", "content": "."}  # to check settings


class ResponseActive(InvalidRequest):
    """The session has a running response already."""

    status = 409
    code = "conversation_already_has_active_response"


class NothingToCancel(InvalidRequest):
    """The session has no such running response."""

    code = "response_cancel_not_active"


class RealtimeSession:
    """State of one session, and the events for its client in `log`.

    Args:
        session_id: whoever knows it, and is the same client, may resume the session.
        model: the model's name, or `auto`.
        hints: routing hints from the request's headers.
        new_id: makes the ids of responses, which are those of their decisions.
        no_sound: why a session without `limits.max_audio_s` takes none, and what to do, for the client.
    """

    def __init__(
        self,
        session_id: str,
        model: str,
        hints: RoutingHints,
        limits: SessionLimits,
        new_id: Callable[[], str],
        no_sound: str = NO_SOUND,
    ) -> None:
        self.id = session_id
        self.hints = hints
        self.log = EventLog(limits.replay_bytes)
        self._new_id = new_id
        self._sound = SoundBuffer(limits.max_audio_s, no_sound)
        self._speaks = limits.speaks
        audio = SessionAudio(
            InputAudio() if self._sound.is_open else msgspec.UNSET, OutputAudio() if self._speaks else msgspec.UNSET
        )
        self._settings = RealtimeSettings(model=model, audio=audio)
        self._conversation = Conversation(
            limits.max_items,
            limits.max_bytes,
            limits.max_sounds,
            stored_bytes(self._sound.max_bytes, limits.max_sounds),
        )
        self._conversation_id = f"conv_{new_id()}"
        self._made = 0  # ids of items that the client gave none
        self._response: ResponseStream | None = None
        self._emit("session.created", {"session": self._shown()})

    @property
    def running(self) -> bool:
        """Whether a response is being generated."""
        return self._response is not None and not self._response.ended

    def receive(self, frame: bytes) -> Effect | None:
        """Take one event of the client. Returns what the caller has to do."""
        event_id: object = None
        try:
            document = load(frame)
            event_id = document.get("event_id")
            return self._take(document)
        except CausewayError as error:
            self.report(error, event_id if isinstance(event_id, str) else None)
            return None

    def report(self, error: CausewayError, event_id: str | None = None) -> None:
        """Tell the client about an error. `event_id`: of the client's event that caused it."""
        self._emit("error", {"error": {**error_fields(error), "event_id": event_id}})

    def abandon(self, error: CausewayError) -> None:
        """End the running response, if there is one, with what there is and this error."""
        if self._response is not None:
            self._response.fail(error)

    def narrow(self, hints: RoutingHints) -> None:
        """Add the hints of a connection that resumes the session. Raises InvalidRequest if they contradict."""
        more = WireRoutingHints(prefer=hints.prefer, tags=list(hints.tags), deadline_ms=hints.deadline_ms)
        self.hints = merge_hints(self.hints, more)

    def heard(self, sound: HearSound, transcript: Transcript) -> None:
        """Take what was said in a sound."""
        item = self._conversation.get(sound.item_id) if sound.item_id in self._conversation else None
        if item is not None and sound.index in item.sounds:  # else it was deleted meanwhile, or is another one
            self._conversation.replace(item.with_transcript(sound.index, transcript.text))
            self._shorten()
        usage = {"type": "duration", "seconds": round(transcript.duration_s, 3)}
        fields: JSONObject = {"transcript": transcript.text, "usage": usage}
        self._tell("completed", sound, fields)

    def not_heard(self, sound: HearSound, error: CausewayError) -> None:
        """Take why it is not known what was said. A response of this sound tries again."""
        self._tell("failed", sound, {"error": error_fields(error)})

    def _tell(self, outcome: str, sound: HearSound, fields: JSONObject) -> None:
        place: JSONObject = {"item_id": sound.item_id, "content_index": sound.index}
        self._emit(f"conversation.item.input_audio_transcription.{outcome}", {**place, **fields})

    # --- the client's events -----------------------------------------------------------------------------------------

    def _take(self, document: JSONObject) -> Effect | None:
        kind = document.get("type")
        match kind:
            case "session.update":
                self._update(validate(document, SessionUpdate))
            case "conversation.item.create":
                self._create_item(validate(document, ItemCreate))
            case "conversation.item.delete":
                item_id = validate(document, ItemReference).item_id
                self._conversation.delete(item_id)
                self._emit("conversation.item.deleted", {"item_id": item_id})
            case "conversation.item.retrieve":
                item = self._conversation.get(validate(document, ItemReference).item_id)
                self._emit("conversation.item.retrieved", {"item": item.body})
            case "response.create":
                return self._start(validate(document, ResponseCreate))
            case "response.cancel":
                return self._cancel(validate(document, ResponseCancel))
            case "input_audio_buffer.append":
                self._sound.check_open("type")
                self._sound.append(validate(document, BufferAppend).audio)
            case "input_audio_buffer.clear":
                self._sound.check_open("type")
                validate(document, ClientEvent)
                self._sound.clear()
                self._emit("input_audio_buffer.cleared", {})
            case "input_audio_buffer.commit":
                self._sound.check_open("type")
                validate(document, ClientEvent)
                return self._commit()
            case _:
                raise _unknown(kind)
        return None

    def _update(self, event: SessionUpdate) -> None:
        update = supported(event.session, "session")
        self._complete_audio(update)
        self._check_spoken(update, "session")
        if update.get("model", self._settings.model) != self._settings.model:
            raise InvalidRequest("A session keeps its model. Start a new session.", param="session.model")
        settings = merged(self._settings, update, "session")
        try:
            self._request(settings, [_ANYTHING], self.hints)
        except InvalidRequest as error:
            raise within("session", error) from None
        self._settings = settings
        self._emit("session.updated", {"session": self._shown()})

    def _complete_audio(self, update: JSONObject) -> None:
        """Add the session's own settings of sound to those that are updated. Raises UnsupportedFeature."""
        audio = update.pop("audio", None) or {}
        if not isinstance(audio, dict):
            raise InvalidRequest("`session.audio`: send an object.", param="session.audio")
        given = {name: value for name, value in audio.items() if value is not None}
        if "input" in given:
            self._sound.check_open("session.audio.input")
        if "output" in given and not self._speaks:
            raise _not_spoken("session.audio.output")
        update["audio"] = {**msgspec.to_builtins(self._settings.audio), **given}

    def _check_spoken(self, update: JSONObject, where: str) -> None:
        if update.get("output_modalities") == ["audio"] and not self._speaks:
            raise _not_spoken(f"{where}.output_modalities[0]")

    def _create_item(self, event: ItemCreate) -> None:
        self._insert(read_item(event.item, self._next_item_id(), self._sound), event.previous_item_id)

    def _commit(self) -> HearSound | None:
        """(7)"""
        wav = self._sound.wav()
        item = spoken_item(self._next_item_id(), wav)
        self._insert(item, None, committed=True)
        self._sound.clear()
        audio = self._settings.audio.input
        if audio is msgspec.UNSET or audio.transcription is None:
            return None
        return HearSound(item.id, 0, wav)

    def _insert(self, item: ConversationItem, after: str | None, *, committed: bool = False) -> None:
        """Add an item to the conversation, and tell. `committed`: it was the buffer's sound."""
        if self._settings.truncation == "disabled":
            self._conversation.check_room(item)
        self._conversation.insert(item, after)
        if committed:
            previous = self._conversation.previous(item.id)
            self._emit("input_audio_buffer.committed", {"previous_item_id": previous, "item_id": item.id})
        fields: JSONObject = {"previous_item_id": self._conversation.previous(item.id), "item": item.body}
        self._emit("conversation.item.added", fields)
        self._emit("conversation.item.done", fields)
        self._shorten()

    def _shorten(self) -> None:
        if self._settings.truncation == "disabled":
            return
        for item_id in self._conversation.shorten():
            self._emit("conversation.item.deleted", {"item_id": item_id})

    def _start(self, event: ResponseCreate) -> StartResponse:
        if self.running:
            raise ResponseActive("A response is running. Wait for its `response.done`, or cancel it.")
        asked = supported(event.response or {}, "response")
        for name in _SESSION_ONLY:
            if asked.get(name) is not None:
                raise InvalidRequest(f"`response.{name}` belongs to the session.", param=f"response.{name}")
        self._check_spoken(asked, "response")
        own = merged(ResponseFields(), {key: asked.pop(key) for key in [*asked] if key in _RESPONSE_FIELDS}, "response")
        # Hints add up: a response's own never replace those of the session.
        hints = merge_hints(self.hints, self._settings.causeway)
        settings = merged(msgspec.structs.replace(self._settings, causeway=None), asked, "response")
        in_conversation = own.conversation != "none"
        if in_conversation and self._settings.truncation == "disabled":
            self._conversation.check_room()
        items = self._conversation if own.input is None else [self._input(at, one) for at, one in enumerate(own.input)]
        try:
            request, size_bytes = self._request(settings, [item.requested for item in items], hints)
        except InvalidRequest as error:
            raise within("response", error) from None
        response_id = self._new_id()
        echo: JSONObject = {
            "conversation_id": self._conversation_id if in_conversation else None,
            "output_modalities": settings.output_modalities,
            "max_output_tokens": settings.max_output_tokens,
            "metadata": own.metadata,
        }
        conversation = self._conversation if in_conversation else None
        output = self._settings.audio.output
        voice = None
        if output is not msgspec.UNSET and settings.output_modalities == ("audio",):
            voice = Voice(output.voice, output.speed)
        self._response = ResponseStream(
            f"resp_{response_id}", self._emit, conversation, echo, self._shorten, spoken=voice is not None
        )
        return StartResponse(response_id, request, self._response, size_bytes, voice)

    def _input(self, at: int, document: JSONObject) -> ConversationItem:
        """An item of a response's own input, or of the conversation where it is a reference."""
        if document.get("type") == "item_reference":
            return self._conversation.get(str(document.get("id")))
        return read_item(document, self._next_item_id(), self._sound, f"response.input[{at}]")

    def _cancel(self, event: ResponseCancel) -> CancelResponse:
        if self._response is None or self._response.ended or event.response_id not in (None, self._response.id):
            raise NothingToCancel("No such response is running.", param="response_id")
        self._response.cancel()
        return CancelResponse()

    def _request(self, settings: RealtimeSettings, items: Sequence[object], hints: RoutingHints) -> tuple[Request, int]:
        """The request of a response, and its size as a body of HTTP. Raises InvalidRequest."""
        if not items:
            raise MissingField("The conversation is empty. Create an item, or send `input`.", param="input")
        body: JSONObject = {
            "model": settings.model,
            "input": items,
            "instructions": settings.instructions or None,
            "tools": settings.tools or None,
            "tool_choice": settings.tool_choice,
            "parallel_tool_calls": settings.parallel_tool_calls,
            "max_output_tokens": None if settings.max_output_tokens == "inf" else settings.max_output_tokens,
            "temperature": settings.temperature,
            "reasoning": settings.reasoning,
            "causeway": settings.causeway,
            "stream": True,
        }
        encoded = _encode({name: value for name, value in body.items() if value is not None})
        return parse_response(encoded, hints)[0], len(encoded)

    # --- events for the client ---------------------------------------------------------------------------------------

    def _shown(self) -> JSONObject:
        shown = msgspec.to_builtins(self._settings)
        if not shown["audio"]:
            del shown["audio"]
        return {"id": self.id, "object": "realtime.session", **shown}

    def _next_item_id(self) -> str:
        self._made += 1
        return f"item_{self._made}"

    def _emit(self, kind: str, fields: JSONObject) -> None:
        self.log.append(kind, fields)


def _unknown(kind: object) -> InvalidRequest:
    if not isinstance(kind, str):
        return MissingField("`type` is missing. Send the event's name.", param="type")
    if kind.startswith(_SPOKEN):
        message = f"`{kind[:64]}`: a spoken answer is sent once, and not taken back. Stop playing it."
        return UnsupportedFeature(message, param="type")
    return InvalidRequest(f"There is no event {kind[:64]!r} for a client to send.", param="type")


def _not_spoken(param: str) -> UnsupportedFeature:
    return UnsupportedFeature(
        f'`{param}`: answers here are text. Send `output_modalities`: ["text"], or install espeak-ng at the box.',
        param=param,
    )
