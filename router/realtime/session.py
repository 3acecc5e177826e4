"""A session: a client's events change its settings and conversation, and start or cancel its single running response.

    session.update                       1. settings; tags and the preference are only narrowed
    conversation.item.create             2. an item; with `truncation: auto` the oldest ones are deleted, with events
    conversation.item.delete, .retrieve  3. an item by its id
    response.create                      4. the conversation becomes a Request, which the caller answers; it carries the
                                            tags and restrictions of all its items, and they keep those of the request
    response.cancel                      5. the running response ends; the caller stops the work
    input_audio_buffer.append, .clear    6. audio is kept, up to a bound
    input_audio_buffer.commit            7. it becomes an item; the caller transcribes it if the client wants that

With `turn_detection` the caller detects speech (`DetectSpeech`). By default, the start of a turn cancels the response,
and its end makes it an item that is answered.

An invalid event gets an `error` event and changes nothing, except that the items of a refused response keep its tags
and `only_on_device`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from ..errors import CausewayError, InvalidRequest, MissingField, UnsupportedFeature
from ..openai.answer import error_fields
from ..openai.audio import Transcript
from ..openai.request_body import load, merge_hints, validate
from ..openai.wire import WireRoutingHints
from ..types import RoutingHints
from .audio import AudioBuffer, stored_bytes
from .conversation import (
    ANYTHING,
    Conversation,
    ConversationItem,
    bounded,
    build_request,
    narrowed,
    protection,
    read_item,
    spoken_item,
    with_items,
)
from .event_log import EventLog
from .response import (
    CancelResponse,
    DetectSpeech,
    Effect,
    ResponseStream,
    SessionLimits,
    StartResponse,
    TranscribeAudio,
    TranscribePartial,
    Voice,
)
from .spoken_input import SpokenInput, TurnEnded, TurnStarted
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
    ServerVAD,
    SessionAudio,
    SessionUpdate,
    known_fields,
    merged,
    supported,
    together,
    within,
)

_RESPONSE_FIELDS = frozenset(ResponseFields.__struct_fields__)
_SPOKEN = ("output_audio_buffer.", "conversation.item.truncate")
_SESSION_ONLY = ("type", "model", "truncation", "audio")
NO_AUDIO = "sessions of this server accept and send only text."
NO_TURNS = (
    "`session.audio.input.turn_detection`: this server cannot detect turns. Send null, and "
    "`input_audio_buffer.commit` at the end of a turn. A device or gateway detects turns after `pip "
    "install 'causeway-router[voice]'`."
)


class ResponseActive(InvalidRequest, status=409, code="conversation_already_has_active_response"):
    """The session already has a running response."""


class NothingToCancel(InvalidRequest, code="response_cancel_not_active"):
    """The session has no such running response."""


class RealtimeSession:
    """The state of a session, and the events for its client in `log`. The client resumes it by `session_id`; `model` is
    a name or `auto`; `new_id` makes the ids of responses and their decisions; `no_audio` says why audio is refused
    without `limits.max_audio_s`, and what to do; `hold_audio` reserves memory for all audio before it grows, and may
    raise CausewayError.
    """

    def __init__(
        self,
        session_id: str,
        model: str,
        hints: RoutingHints,
        limits: SessionLimits,
        new_id: Callable[[], str],
        no_audio: str = NO_AUDIO,
        hold_audio: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.id = session_id
        self.hints = hints
        self.log = EventLog(limits.replay_bytes)
        self._new_id = new_id
        self._audio = AudioBuffer(limits.max_audio_s, no_audio)
        self._spoken = SpokenInput(self._audio, self._next_item_id, limits.partial_interval_s)
        self._speaks = limits.speaks
        self._detects_turns = limits.detects_turns
        audio = SessionAudio(
            InputAudio() if self._audio.is_open else msgspec.UNSET,
            OutputAudio(voice=limits.voice) if self._speaks else msgspec.UNSET,
        )
        self._settings = RealtimeSettings(model=model, audio=audio)
        self._conversation = Conversation(
            limits.max_items, limits.max_bytes, limits.max_clips, stored_bytes(self._audio.max_bytes, limits.max_clips)
        )
        self._conversation_id = f"conv_{new_id()}"
        self._hold_audio = hold_audio
        self._held_bytes = 0  # bytes of audio that are reserved with `hold_audio`
        self._made = 0  # number of generated item ids
        self._response: ResponseStream | None = None
        self._emit("session.created", {"session": self._shown()})

    @property
    def running(self) -> bool:
        """Whether a response is being generated."""
        return self._response is not None and not self._response.ended

    @property
    def request_hints(self) -> RoutingHints:
        """The routing hints of its connections and of its settings."""
        return merge_hints(self.hints, self._settings.causeway)

    def receive(self, frame: bytes) -> Effect | None:
        """Process an event of the client. Returns the actions for the caller."""
        event_id: object = None
        try:
            document = load(frame)
            event_id = document.get("event_id")
            return self._take(document)
        except CausewayError as error:
            self.report(error, event_id if isinstance(event_id, str) else None)
            return None
        finally:
            self._hold()

    def report(self, error: CausewayError, event_id: str | None = None) -> None:
        """Report an error to the client. `event_id`: the id of the client's event that caused it."""
        self._emit("error", {"error": {**error_fields(error), "event_id": event_id}})

    def abandon(self, error: CausewayError) -> None:
        """End the running response, if any, with its content so far and this error."""
        if self._response is not None:
            self._response.fail(error)

    def narrow(self, hints: RoutingHints) -> None:
        """Add the hints of a connection that resumes the session. Raises InvalidRequest if they conflict."""
        more = WireRoutingHints(prefer=hints.prefer, tags=list(hints.tags), deadline_ms=hints.deadline_ms)
        hints = bounded(merge_hints(self.hints, more))
        merge_hints(hints, self._settings.causeway)
        self.hints = hints

    def transcribed(self, audio: TranscribeAudio, transcript: Transcript) -> None:
        """Add the transcript of audio."""
        item = self._conversation.get(audio.item_id) if audio.item_id in self._conversation else None
        if item is not None and audio.index in item.clips:  # otherwise the item was deleted or replaced meanwhile
            self._conversation.replace(item.with_transcript(audio.index, transcript.text))
            self._shorten()
        usage = {"type": "duration", "seconds": round(transcript.duration_s, 3)}
        fields: JSONObject = {"transcript": transcript.text, "usage": usage}
        self._tell("completed", audio, fields)

    def not_transcribed(self, audio: TranscribeAudio, error: CausewayError) -> None:
        """Record that a transcription failed. A response to this audio transcribes it again."""
        self._tell("failed", audio, {"error": error_fields(error)})

    def partial(self) -> TranscribePartial | None:
        """Return the audio of the turn in progress, if the client wants transcripts and enough of it is new."""
        audio = self._settings.audio.input
        return None if audio is msgspec.UNSET or audio.transcription is None else self._spoken.partial()

    def partly_transcribed(self, partial: TranscribePartial, transcript: str) -> None:
        """Process a partial transcript; the client gets its stable words."""
        if delta := self._spoken.partly_transcribed(partial, transcript):
            place: JSONObject = {"item_id": partial.item_id, "content_index": 0}
            self._emit("conversation.item.input_audio_transcription.delta", {**place, "delta": delta})

    def detected(self, detection: DetectSpeech, probabilities: Sequence[float], state: bytes) -> list[Effect]:
        """Return the actions, in order, after windows with these probabilities of speech. `state`: the detector's."""
        effects: list[Effect] = []
        for change in self._spoken.judged(detection, probabilities, state):
            try:
                if isinstance(change, TurnStarted):
                    effects += self._turn_started(change)
                else:
                    effects += self._turn_ended(change)
            except CausewayError as error:
                self.report(error)
        self._hold()
        return effects

    def _turn_started(self, turn: TurnStarted) -> list[Effect]:
        self._emit("input_audio_buffer.speech_started", {"audio_start_ms": turn.at_ms, "item_id": turn.item_id})
        response, settings = self._response, self._turn_detection
        if response is None or response.ended or response.conversation is None:
            return []
        if settings is None or not settings.interrupt_response:
            return []
        response.cancel("turn_detected")
        return [CancelResponse()]

    def _turn_ended(self, turn: TurnEnded) -> list[Effect]:
        """Make an item of a turn and answer it. Raises InvalidRequest: conversation full, or turn unanswerable."""
        self._emit("input_audio_buffer.speech_stopped", {"audio_end_ms": turn.at_ms, "item_id": turn.item_id})
        transcribe = self._add_audio(turn.item_id, turn.wav)
        effects: list[Effect] = [] if transcribe is None else [transcribe]
        settings = self._turn_detection
        if settings is not None and settings.create_response:
            try:
                effects.append(self._start(ResponseCreate(type="response.create")))
            except CausewayError as error:  # the turn still becomes an item and is transcribed
                self.report(error)
        return effects

    def _tell(self, outcome: str, audio: TranscribeAudio, fields: JSONObject) -> None:
        place: JSONObject = {"item_id": audio.item_id, "content_index": audio.index}
        self._emit(f"conversation.item.input_audio_transcription.{outcome}", {**place, **fields})

    # --- the client's events -----------------------------------------------------------------------------------------

    def _take(self, document: JSONObject) -> Effect | None:
        kind = document.get("type")
        match kind:
            case "session.update":
                self._update(validate(document, SessionUpdate))
            case "conversation.item.create":
                create = validate(document, ItemCreate)
                self._insert(read_item(create.item, self._next_item_id(), self._audio), create.previous_item_id)
            case "conversation.item.delete":
                item_id = validate(document, ItemReference).item_id
                self._conversation.delete(item_id)
                self._emit("conversation.item.deleted", {"item_id": item_id})
            case "conversation.item.retrieve":
                item = self._conversation.get(validate(document, ItemReference).item_id)
                self._emit("conversation.item.retrieved", {"item": item.body})
            case "response.create":
                start = validate(document, ResponseCreate)
                try:
                    return self._start(start)
                except CausewayError:
                    self._protect(start.response or {})
                    raise
            case "response.cancel":
                return self._cancel(validate(document, ResponseCancel))
            case "input_audio_buffer.append":
                self._audio.check_open("type")
                audio = validate(document, BufferAppend).audio
                self._hold(len(audio) * 3 // 4)
                return self._spoken.append(audio)
            case "input_audio_buffer.clear":
                self._audio.check_open("type")
                validate(document, ClientEvent)
                self._spoken.clear()
                self._emit("input_audio_buffer.cleared", {})
            case "input_audio_buffer.commit":
                self._audio.check_open("type")
                validate(document, ClientEvent)
                transcribe = self._add_audio(*self._spoken.whole())
                self._spoken.clear()
                return transcribe
            case _:
                raise _unknown(kind)
        return None

    def _update(self, event: SessionUpdate) -> None:
        """Apply the known fields, then report the others, since clients may send further fields of OpenAI's sessions.
        Raises UnsupportedFeature for these, after `session.updated`; InvalidRequest for a wrong value, when nothing is
        applied.
        """
        update, others = known_fields(event.session, type(self._settings), "session")
        others += self._without_audio(update)
        if others and not any(value is not None for value in update.values()):
            raise together(others, applied=False)
        self._complete_audio(update)
        self._check_spoken(update, "session")
        if update.get("model", self._settings.model) != self._settings.model:
            raise InvalidRequest("A session cannot change its model. Start a new session.", param="session.model")
        settings = merged(self._settings, update, "session")
        try:
            causeway = narrowed(self._settings.causeway, settings.causeway)
            settings = msgspec.structs.replace(settings, causeway=causeway)
            build_request(settings, [ANYTHING], self.hints)
        except InvalidRequest as error:
            raise within("session", error) from None
        self._settings = settings
        self._spoken.configure(self._turn_detection)
        self._emit("session.updated", {"session": self._shown()})
        if others:
            raise together(others, applied=True)

    def _without_audio(self, update: JSONObject) -> list[UnsupportedFeature]:
        """Remove unsupported audio settings from the update, and return an error for each."""
        audio = update.get("audio")
        if not isinstance(audio, dict):
            return []
        settings, errors = {name: value for name, value in audio.items() if value is not None}, []
        if "input" in settings and not self._audio.is_open:
            errors.append(self._audio.closed("session.audio.input"))
            del settings["input"]
        input_settings = settings.get("input")
        if isinstance(input_settings, dict) and input_settings.get("turn_detection") and not self._detects_turns:
            errors.append(UnsupportedFeature(NO_TURNS, param="session.audio.input.turn_detection"))
            settings["input"] = {name: value for name, value in input_settings.items() if name != "turn_detection"}
        if "output" in settings and not self._speaks:
            errors.append(_not_spoken("session.audio.output"))
            del settings["output"]
        update["audio"] = {side: fields for side, fields in settings.items() if fields != {}} or None
        return errors

    def _complete_audio(self, update: JSONObject) -> None:
        """Complete an update with the session's own audio settings. Raises InvalidRequest."""
        audio = update.pop("audio", None) or {}
        if not isinstance(audio, dict):
            raise InvalidRequest("`session.audio` must be an object.", param="session.audio")
        own_settings = {name: value for name, value in audio.items() if value is not None}
        both = msgspec.to_builtins(self._settings.audio)
        for side, fields in own_settings.items():
            both[side] = {**both.get(side, {}), **fields} if isinstance(fields, dict) else fields
        update["audio"] = both

    def _check_spoken(self, update: JSONObject, where: str) -> None:
        if update.get("output_modalities") == ["audio"] and not self._speaks:
            raise _not_spoken(f"{where}.output_modalities[0]")

    def _add_audio(self, item_id: str, wav: str) -> TranscribeAudio | None:
        """Add the committed audio as an item (7). Raises ConversationFull."""
        self._insert(spoken_item(item_id, wav), None, committed=True)
        audio = self._settings.audio.input
        if audio is msgspec.UNSET or audio.transcription is None:
            return None
        return TranscribeAudio(item_id, 0, wav)

    @property
    def _turn_detection(self) -> ServerVAD | None:
        audio = self._settings.audio.input
        return None if audio is msgspec.UNSET else audio.turn_detection

    def _insert(self, item: ConversationItem, after: str | None, *, committed: bool = False) -> None:
        """Add an item to the conversation, with its events. `committed`: the item is the audio of the buffer."""
        if self._settings.truncation == "disabled":
            self._conversation.check_room(item)
        self._hold(item.audio_bytes)
        self._conversation.insert(item, after)
        if committed:
            previous = self._conversation.previous(item.id)
            self._emit("input_audio_buffer.committed", {"previous_item_id": previous, "item_id": item.id})
        fields: JSONObject = {"previous_item_id": self._conversation.previous(item.id), "item": item.body}
        self._emit("conversation.item.added", fields)
        self._emit("conversation.item.done", fields)
        self._shorten()

    def _hold(self, more_bytes: int = 0) -> None:
        """Reserve the bytes of audio that the session holds and will hold. Raises CausewayError if there is no room."""
        held_bytes = self._audio.held_bytes + self._conversation.audio_bytes + more_bytes
        if held_bytes != self._held_bytes:
            self._hold_audio(held_bytes)
            self._held_bytes = held_bytes

    def _shorten(self) -> None:
        if self._settings.truncation == "disabled":
            return
        for item_id in self._conversation.shorten():
            self._emit("conversation.item.deleted", {"item_id": item_id})

    def _start(self, event: ResponseCreate) -> StartResponse:
        if self.running:
            raise ResponseActive("A response is already running. Wait for its `response.done`, or cancel the response.")
        fields = supported(event.response or {}, "response")
        for name in _SESSION_ONLY:
            if fields.get(name) is not None:
                raise InvalidRequest(
                    f"`response.{name}` cannot be set for one response. Set it for the session.",
                    param=f"response.{name}",
                )
        self._check_spoken(fields, "response")
        response_fields = merged(
            ResponseFields(), {key: fields.pop(key) for key in [*fields] if key in _RESPONSE_FIELDS}, "response"
        )
        settings = merged(msgspec.structs.replace(self._settings, causeway=None), fields, "response")
        in_conversation = response_fields.conversation != "none"
        if in_conversation and self._settings.truncation == "disabled":
            self._conversation.check_room()
        response_input = response_fields.input
        items = (
            [*self._conversation]
            if response_input is None
            else [self._input(at, one) for at, one in enumerate(response_input)]
        )
        try:  # hints add up: a response's own hints never replace those of the session and of the items
            hints = with_items(self.request_hints, items)
            request, size_bytes = build_request(settings, [item.requested for item in items], hints)
        except InvalidRequest as error:
            raise within("response", error) from None
        self._conversation.restrict(items, request.hints)
        response_id = self._new_id()
        echo: JSONObject = {
            "conversation_id": self._conversation_id if in_conversation else None,
            "output_modalities": settings.output_modalities,
            "max_output_tokens": settings.max_output_tokens,
            "metadata": response_fields.metadata,
        }
        conversation = self._conversation if in_conversation else None
        output = self._settings.audio.output
        voice = None
        if output is not msgspec.UNSET and settings.output_modalities == ("audio",):
            voice = Voice(output.voice, output.speed)
        self._response = ResponseStream(
            f"resp_{response_id}",
            self._emit,
            conversation,
            echo,
            self._shorten,
            request.hints,
            spoken=voice is not None,
        )
        return StartResponse(response_id, request, self._response, size_bytes, voice)

    def _protect(self, refused: JSONObject) -> None:
        """Let the items of a refused response keep its restriction, because the next response would send their text."""
        refused_input = refused.get("input")
        if refused_input is None:
            items = [*self._conversation]
        else:
            names = (
                [one.get("id") for one in refused_input if isinstance(one, dict)]
                if isinstance(refused_input, list)
                else []
            )
            items = [item for item in self._conversation if item.id in names]
        self._conversation.protect(items, protection(refused.get("causeway")))

    def _input(self, at: int, document: JSONObject) -> ConversationItem:
        """Return an item of a response's own input, or the conversation's item that it references."""
        if document.get("type") == "item_reference":
            return self._conversation.get(str(document.get("id")))
        return read_item(document, self._next_item_id(), self._audio, f"response.input[{at}]")

    def _cancel(self, event: ResponseCancel) -> CancelResponse:
        if self._response is None or self._response.ended or event.response_id not in (None, self._response.id):
            raise NothingToCancel("No such response is running.", param="response_id")
        self._response.cancel()
        return CancelResponse()

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
        message = f"`{kind[:64]}`: a spoken answer is sent once and cannot be taken back. Stop playing it."
        return UnsupportedFeature(message, param="type")
    return InvalidRequest(f"Clients cannot send the event {kind[:64]!r}.", param="type")


def _not_spoken(param: str) -> UnsupportedFeature:
    return UnsupportedFeature(
        f'`{param}`: answers of this server are text. Send `output_modalities`: ["text"]; only a device '
        "with espeak-ng can speak.",
        param=param,
    )
