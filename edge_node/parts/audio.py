"""Audio → text and text → audio for `/v1/audio/*`, in OpenAI's form: admitted, limited and recorded as any request.

Both always run on this device, so the policy has no target to choose and no constraint to enforce. The decision record
of such a request has no decision. Imported with the first such request.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import msgspec

from causeway_server.models.parts.graph.graph import EncoderGraph, transcript_of
from causeway_server.models.parts.installed import NO_SPEECH, SPEECH_MODEL
from causeway_server.models.parts.process.messages import Refusal, Segment
from causeway_server.models.parts.process.parent import Tell, WorkerFailed
from causeway_server.router.decision.decide import features_of
from causeway_server.router.errors import (
    CausewayError,
    ClientGone,
    Draining,
    EncoderFailed,
    InvalidRequest,
    ModelNotFound,
    NoRoute,
    UnsupportedFeature,
)
from causeway_server.router.openai.answer import error_event
from causeway_server.router.openai.audio import (
    JSON_FORMATS,
    OPENAI_MODEL,
    SpeechRequest,
    Transcript,
    TranscriptionRequest,
    check_form,
    encode_delta,
    encode_done,
    encode_transcript,
    parse_form,
    parse_speech,
    parse_transcription,
)
from causeway_server.router.openai.request_body import check_media_type
from causeway_server.router.policy.compiled import Policy
from causeway_server.router.policy.signals import LISTED_UNRECORDED
from causeway_server.router.serving.logs import redacted
from causeway_server.router.serving.request import AiohttpRequest
from causeway_server.router.serving.responses import (
    JSON,
    STREAMED,
    EventStream,
    ServerResponse,
    body_response,
    error_response,
    header_lines,
)
from causeway_server.router.types import (
    AUTO,
    AudioKind,
    AudioPart,
    DecisionRecord,
    Estimates,
    Message,
    Outcome,
    Part,
    PartRecord,
    Request,
    RequestFeatures,
    RoutingHints,
    TextPart,
)

from ..clock import Clock
from ..http.api import RequestReader, routing_hints
from ..serving.generation import policy_label
from ..serving.requests import Admission, Records, Status, rank_of
from ..signals.collector import SignalCollector
from .speaker import PCM_HZ, NothingToSpeak, Speaker, SpokenText

log = logging.getLogger(__name__)

_T = TypeVar("_T")
Play = Callable[[SpokenText], Awaitable[None]]
"""Receives the audio of a sentence. Raises ClientGone."""


class AudioCall(msgspec.Struct, frozen=True):
    """A client's request for audio. `id`: id of its decision record; `arrived`: monotonic seconds."""

    id: str
    hints: RoutingHints
    arrived: float


class AudioService:
    """Transcribes and speaks with the encoders of `graph`, if any. `default_deadline_s`: if a request names none."""

    def __init__(
        self,
        graph: EncoderGraph | None,
        speaker: Speaker,
        *,
        admission: Admission,
        records: Records,
        signals: SignalCollector,
        policy: Callable[[], Policy],
        default_deadline_s: float,
    ) -> None:
        self._graph = graph
        self._speaker = speaker
        self._admission = admission
        self._records = records
        self._signals = signals
        self._policy = policy
        self._clock = records.clock
        self._default_deadline_s = default_deadline_s

    async def transcribe(self, call: AudioCall, request: TranscriptionRequest, tell: Tell | None = None) -> Transcript:
        """Return the transcript of a clip; empty without speech. `tell` gets each segment as soon as it is transcribed,
        unless the whole clip was known, and must not raise. Raises the client's CausewayError.
        """
        parts: list[PartRecord] = []
        work = partial(self._transcribe, request, parts, tell)
        requested = AUTO if request.model == OPENAI_MODEL else request.model
        return await self._run(call, "transcription", requested, SPEECH_MODEL, work, parts)

    async def transcribe_live(self, decision_id: str, hints: RoutingHints, audio: bytes) -> Transcript:
        """Return the transcript of a live session's clip, as `transcribe` does; empty without speech."""
        call = AudioCall(decision_id, hints, self._clock.monotonic())
        return await self.transcribe(call, TranscriptionRequest(audio, AUTO))

    async def transcribe_partial(self, hints: RoutingHints, audio: bytes) -> str:
        """Return the transcript so far of a clip still being sent; "" if unknown, or if it would delay other work. It
        is not recorded as a request; the whole clip is, once it is complete.
        """
        if self._graph is None or self._graph.running or hints.prefer == "only_cloud":
            return ""
        request = TranscriptionRequest(audio, AUTO)
        deadline = self._clock.monotonic() + self._time_s(hints)
        try:
            transcript, _, _ = await self._graph.transcribe(request, deadline, keep=False)
        except (Refusal, WorkerFailed) as error:
            log.debug("A part of an audio clip could not be read: %s", error)
            return ""
        return transcript.fact.text

    async def say(self, text: str, voice: str, speed: float) -> bytes:
        """Return the speech of an answer in progress, which has a permit and a record, as `SpokenText.pcm`."""
        deadline = asyncio.get_running_loop().time() + self._default_deadline_s
        try:
            spoken = await self._speaker.speak(text, voice, speed, deadline)
        except NothingToSpeak:
            return b""
        return await asyncio.to_thread(spoken.pcm, PCM_HZ)

    async def speak(self, call: AudioCall, request: SpeechRequest) -> SpokenText:
        """Return the speech of a text. Raises CausewayError: the error for the client."""
        work = partial(self._speaker.speak, request.text, request.voice, request.speed)
        return await self._run(call, "speech", request.model, self._speaker.model_of(request.voice), work, [])

    async def play(self, call: AudioCall, request: SpeechRequest, play: Play) -> None:
        """Speak a text as `speak` does, and pass each sentence to `play` as soon as it is made."""
        work = partial(self._play, request, play)
        await self._run(call, "speech", request.model, self._speaker.model_of(request.voice), work, [])

    async def close(self) -> None:
        """End the processes of the voices."""
        await self._speaker.close()

    async def _play(self, request: SpeechRequest, play: Play, deadline: float) -> None:
        sentences = self._speaker.sentences(request.text, request.voice, request.speed, deadline)
        async with contextlib.aclosing(sentences):
            async for sentence in sentences:
                await play(sentence)

    async def _transcribe(
        self, request: TranscriptionRequest, parts: list[PartRecord], tell: Tell | None, deadline: float
    ) -> Transcript:
        if self._graph is None or "audio" not in self._graph.kinds:
            raise UnsupportedFeature(NO_SPEECH)
        started = self._clock.monotonic()
        try:
            transcript, seconds, known = await self._graph.transcribe(request, deadline, tell)
        except Refusal as refusal:
            param = refusal.param or "file"
            raise InvalidRequest(f"`{param}`: {refusal}.", param=param) from None
        except WorkerFailed as error:
            log.warning("An audio clip could not be read: %s", error)
            raise EncoderFailed(f"The audio could not be read: {error}. Send the audio again.") from None
        fact = transcript.fact
        parts.append(
            PartRecord(
                part="file",
                modality="audio",
                sha256=hashlib.sha256(request.data).hexdigest(),
                size_bytes=len(request.data),
                status="ok",
                cached=known,
                duration_ms=round((self._clock.monotonic() - started) * 1000.0, 3),
                confidence=fact.confidence,
            )
        )
        return transcript_of(transcript, seconds, words=request.words)

    async def _run(
        self,
        call: AudioCall,
        kind: AudioKind,
        requested: str,
        model: str,
        work: Callable[[float], Awaitable[_T]],
        parts: list[PartRecord],
    ) -> _T:
        """Do the work within admission and deadline, and record its outcome and the `parts` it adds."""
        failure: CausewayError | None = None
        try:
            self._admission.admit(call.hints.client, call.arrived)
            _check(requested, model, call.hints)
            deadline = call.arrived + self._time_s(call.hints)
            async with self._admission.permit(deadline, call.hints.client, rank_of(call.hints)):
                return await work(deadline)
        except CausewayError as error:
            failure = error
            raise
        except asyncio.CancelledError:
            failure = ClientGone("The client disconnected.")
            if self._admission.ending:
                failure = Draining("This server shut down before the answer was complete.", retry_after_s=1.0)
                raise failure from None
            raise
        except Exception as error:
            log.error("The reading of an audio clip failed unexpectedly: %s", redacted(error))
            failure = CausewayError("Internal error.")
            raise failure from error
        finally:
            record = DecisionRecord(
                id=call.id,
                created=self._clock.unix(),
                request=_features(kind, requested, call.hints),
                estimates=Estimates(),
                unrecorded=LISTED_UNRECORDED,
                snapshot=self._signals.recent_snapshot(self._policy()),
                decision=None,
                outcome=_outcome(kind, model, failure, self._clock.monotonic() - call.arrived),
                parts=tuple(parts),
            )
            self._records.decisions.add(record)
            self._records.metrics.request_finished(record.outcome)

    def _time_s(self, hints: RoutingHints) -> float:
        if hints.deadline_ms is None:
            return self._default_deadline_s
        return min(self._default_deadline_s, hints.deadline_ms / 1000.0)


def _check(requested: str, model: str, hints: RoutingHints) -> None:
    """Check the requested model and the hints. Raises ModelNotFound or NoRoute."""
    if requested not in (AUTO, model):
        names = f"{AUTO}, {model}"
        raise ModelNotFound(
            f"The model `{requested[:64]}` does not exist on this device. Available: {names}.", param="model"
        )
    if hints.prefer == "only_cloud":
        raise NoRoute("`only_cloud` excludes this device, but only this device processes audio.")


def _outcome(kind: AudioKind, model: str, failure: CausewayError | None, seconds: float) -> Outcome:
    if failure is None:
        return Outcome("ok", 200, "edge", model=model, reason=kind, total_ms=seconds * 1000.0)
    status: Status = "rejected" if failure.status < 500 or isinstance(failure, Draining) else "error"
    if isinstance(failure, ClientGone):
        status = "cancelled"
    return Outcome(status, failure.status, "none", reason=kind, total_ms=seconds * 1000.0, error=failure.code)


def _features(kind: AudioKind, requested: str, hints: RoutingHints) -> RequestFeatures:
    part: Part = AudioPart("", "wav") if kind == "transcription" else TextPart("")
    request = Request(kind="chat", model=requested, messages=(Message("user", (part,)),), hints=hints)
    return msgspec.structs.replace(features_of(request), kind=kind)


class AudioApi:
    """The request handlers of audio. `new_id`: function that makes the id of a decision record."""

    def __init__(
        self,
        service: AudioService,
        reader: RequestReader,
        clock: Clock,
        *,
        policy: Callable[[], Policy],
        new_id: Callable[[], str],
    ) -> None:
        self._service = service
        self._reader = reader
        self._clock = clock
        self._policy = policy
        self._new_id = new_id

    async def transcriptions(self, http: AiohttpRequest) -> ServerResponse:
        """Handle POST /v1/audio/transcriptions. Raises CausewayError for a request refused before it has an id."""
        call = self._call(http)
        media_type = http.headers.get("Content-Type", "")
        check_form(http.headers.get("Content-Type"), http.headers.get("Content-Encoding"))
        request = parse_transcription(parse_form(await self._reader.body(http), media_type))
        if request.stream:
            return await self._stream(http, call, request)

        async def answer() -> tuple[bytes, str]:
            transcript = await self._service.transcribe(call, request)
            body = encode_transcript(transcript, request)
            return body, JSON if request.format in JSON_FORMATS else "text/plain; charset=utf-8"

        return await self._answer(call, answer)

    async def speech(self, http: AiohttpRequest) -> ServerResponse:
        """Handle POST /v1/audio/speech. Raises CausewayError for requests that are refused before they have an id."""
        call = self._call(http)
        check_media_type(http.headers.get("Content-Type"), http.headers.get("Content-Encoding"))
        request = parse_speech(await self._reader.body(http))
        if request.format == "pcm":
            return await self._play(http, call, request)

        async def answer() -> tuple[bytes, str]:
            return (await self._service.speak(call, request)).wav(), "audio/wav"

        return await self._answer(call, answer)

    async def _play(self, http: AiohttpRequest, call: AudioCall, request: SpeechRequest) -> ServerResponse:
        """Send each sentence's samples as they are spoken. A later error closes the connection."""
        ids, form = self._ids(call), f"audio/pcm; rate={PCM_HZ}"
        stream = EventStream(http, header_lines({**ids, **STREAMED, "x-causeway-route": "edge", "Content-Type": form}))

        async def play(sentence: SpokenText) -> None:
            stream.send(await asyncio.to_thread(sentence.pcm, PCM_HZ))
            await stream.drain()

        try:
            await self._service.play(call, request, play)
        except ClientGone:
            raise
        except CausewayError as error:
            if not stream.sends:
                return error_response(error, ids)
            if http.transport is not None:
                http.transport.abort()  # the body ends without its last chunk
            raise ClientGone("The audio failed after its first part was sent, so the connection was closed.") from error
        stream.end()
        return stream

    async def _stream(self, http: AiohttpRequest, call: AudioCall, request: TranscriptionRequest) -> ServerResponse:
        """Send the text of each segment as soon as it is transcribed. An error after the first segment is an event."""
        ids = self._ids(call)
        stream = EventStream(http, header_lines({**ids, "x-causeway-route": "edge", **STREAMED}))

        def tell(segment: Segment) -> None:
            with contextlib.suppress(ClientGone):  # the server cancels the request of a client that has disconnected
                stream.send(encode_delta(f" {segment.text}" if stream.sends else segment.text))

        try:
            transcript = await self._service.transcribe(call, request, tell)
            words = b"" if stream.sends or not transcript.text else encode_delta(transcript.text)
            last = words + encode_done(transcript)
        except ClientGone:
            raise
        except CausewayError as error:
            if not stream.sends:
                return error_response(error, ids)
            last = error_event(error)
        stream.end(last)
        return stream

    def _ids(self, call: AudioCall) -> dict[str, str]:
        return {
            "x-request-id": call.id,
            "x-causeway-decision": call.id,
            "x-causeway-policy": policy_label(self._policy()),
        }

    def _call(self, http: AiohttpRequest) -> AudioCall:
        hints = routing_hints(http.headers, self._reader.caller(http))
        return AudioCall(self._new_id(), hints, self._clock.monotonic())

    async def _answer(self, call: AudioCall, answer: Callable[[], Awaitable[tuple[bytes, str]]]) -> ServerResponse:
        ids = self._ids(call)
        try:
            body, media_type = await answer()
        except ClientGone:
            raise
        except CausewayError as error:
            return error_response(error, ids)
        headers = {"Content-Type": media_type, "x-causeway-route": "edge", **ids}
        return body_response(body, headers=headers)
