"""Live sessions as requests of the daemon: their answers, the transcripts of their audio, and speech.

The sessions themselves are in `router.serving.live`.
"""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from causeway_server.models.parts.installed import NO_SPEECH
from causeway_server.router.bundle.settings import RealtimeConfig
from causeway_server.router.errors import AuthenticationFailed, ModelNotFound
from causeway_server.router.openai.audio import Transcript
from causeway_server.router.realtime.response import SessionLimits, StartResponse, TranscribeAudio, TranscribePartial
from causeway_server.router.realtime.session import RealtimeSession
from causeway_server.router.serving.live.live_session import (
    Detect,
    LiveSession,
    SessionClient,
    SessionReply,
    SessionRequests,
)
from causeway_server.router.serving.reply import AnswerHead
from causeway_server.router.serving.request import AiohttpRequest, read_traceparent
from causeway_server.router.trackers import network_of
from causeway_server.router.types import AUTO

from .clock import Clock
from .http.api import RequestReader, new_decision_id, routing_hints
from .parts import LazyAudio
from .serving.requests import RequestContext
from .serving.service import Service
from .storage.policies import PolicyStore

if TYPE_CHECKING:
    from .observability.tracing import RequestTracer


class SessionAudio(msgspec.Struct, frozen=True):
    """The device's audio services for sessions."""

    entry: LazyAudio  # the lazily constructed service that transcribes and speaks
    transcribes: bool  # whether sessions accept audio
    detect: Detect | None  # speech detector; None if sessions do not detect turns
    max_clips: int  # maximum number of audio clips in one conversation
    speaks: bool  # whether sessions can answer with speech
    voice: str  # the voice of sessions that name none

    def limits(self, config: RealtimeConfig) -> SessionLimits:
        return SessionLimits(
            config.max_items,
            config.max_bytes,
            config.replay_bytes,
            config.max_audio_s if self.transcribes else 0.0,
            self.max_clips,
            speaks=self.speaks,
            voice=self.voice,
            detects_turns=self.transcribes and self.detect is not None,
            partial_interval_s=config.partial_interval_s if self.transcribes else 0.0,
        )


class DeviceClient(SessionClient, frozen=True):
    """The client of one connection. `traceparent`: its trace context; "" for none."""

    authorization: str
    traceparent: str


class DeviceSessions(msgspec.Struct, frozen=True):
    """The daemon's services for sessions. `tracing`: traces their requests; None: tracing is off."""

    config: RealtimeConfig
    service: Service
    reader: RequestReader
    policies: PolicyStore
    clock: Clock
    audio: SessionAudio
    tracing: RequestTracer | None

    async def client(self, http: AiohttpRequest, authorization: str) -> DeviceClient:
        """Return the client of a connection. Raises as `RequestReader.identify`, or InvalidRequest."""
        await self.reader.ready(authorization)
        hints = routing_hints(http.headers, self.reader.identify(authorization, http))
        return DeviceClient(
            hints.client, network_of(hints.client), hints, authorization, read_traceparent(http.headers)
        )

    def open(
        self, session_id: str, model: str | None, client: DeviceClient
    ) -> tuple[RealtimeSession, SessionRequests[DeviceClient]]:
        """Open a session with its requests. Raises ModelNotFound."""
        name = AUTO if model is None else model
        if name not in self.policies.active.model_names:
            raise ModelNotFound(f"The model `{name[:100]}` does not exist on this device.", param="model")
        limits = self.audio.limits(self.config)
        session = RealtimeSession(session_id, name, client.hints, limits, new_decision_id, NO_SPEECH)
        return session, DeviceSessionRequests(self, client)


class DeviceSessionRequests(SessionRequests[DeviceClient]):
    """The requests of one session, with the trace context of the `client` that opened it."""

    def __init__(self, daemon: DeviceSessions, client: DeviceClient) -> None:
        self.client = client
        self.detect = daemon.audio.detect
        self._daemon = daemon
        self._traceparent = client.traceparent

    async def answer(self, live: LiveSession[DeviceClient], start: StartResponse) -> None:
        """Answer a `response.create` as a request to the service. Raises CausewayError."""
        daemon, tracing, traceparent = self._daemon, self._daemon.tracing, self._traceparent
        arrived = daemon.clock.monotonic()
        await live.understood()
        await daemon.service.answer(
            RequestContext(
                start.request,
                SessionReply(start.response, live.flush, _described, self._voice(start)),
                id=start.id,
                arrived=arrived,
                traceparent=traceparent,
                trace=None if tracing is None else tracing.begin(start.request, traceparent, daemon.clock.unix()),
            )
        )

    def refusal(self) -> AuthenticationFailed | None:
        """Return why the token of the connection is no longer accepted; None if it is."""
        try:
            self._daemon.reader.check_again(self.client.authorization)
        except AuthenticationFailed as error:
            return error
        return None

    def _voice(self, start: StartResponse) -> Callable[[str], Awaitable[bytes]] | None:
        if start.voice is None or not self._daemon.audio.speaks:
            return None
        return partial(self._daemon.audio.entry.service.say, voice=start.voice.name, speed=start.voice.speed)

    async def transcribe(self, live: LiveSession[DeviceClient], audio: TranscribeAudio) -> Transcript:
        """Transcribe an audio clip of the session. Raises CausewayError."""
        service, hints = self._daemon.audio.entry.service, live.session.request_hints
        return await service.transcribe_live(new_decision_id(), hints, base64.b64decode(audio.wav))

    async def transcribe_partial(self, live: LiveSession[DeviceClient], partial: TranscribePartial) -> str:
        return await self._daemon.audio.entry.service.transcribe_partial(live.session.request_hints, partial.wav)


def _described(head: AnswerHead) -> dict[str, object]:
    """Return the ``x-causeway-*`` headers of an HTTP answer as fields of `response.done`."""
    names = ("route", "target", "model", "reason", "cache", "policy", "degraded")
    return {"decision": head.id} | {name: getattr(head, name) for name in names}
