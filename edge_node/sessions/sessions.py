"""The table of live sessions: who may open or resume one, how many there are, how long they live, and drain.

1. A client opens a session by connecting.
2. A close frame of the client ends it, and stops its answer.
3. A cut connection leaves it resumable for `resume_s`, by `?session_id=…&after=N`, for the same client only. Where it
   still has a connection, that one is closed: the second takes over.
4. Without an event or an answer for `idle_s` it ends.
5. While the daemon drains, sessions end as soon as they have no running answer.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Protocol

import anyio
import anyio.abc
import msgspec
from aiohttp import hdrs, web

from router.errors import (
    CausewayError,
    Draining,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    QueueFull,
)
from router.openai.audio import Transcript
from router.realtime import (
    CloseCode,
    RealtimeSession,
    SessionLimits,
    StartResponse,
    TranscribePartial,
    TranscribeSound,
)
from router.serving.live.live_session import Detect, LiveSession
from router.serving.live.socket import RealtimeSocket
from router.serving.request import members, read_traceparent
from router.trackers.fair_share import FairShare, network_of
from router.types import AUTO, RoutingHints

from ..clock import Clock
from ..config.schema import RealtimeConfig
from ..http.api import Handler
from ..http.request_reader import Caller, RequestReader, routing_hints
from ..modalities.boxed import NO_SPEECH
from ..serving.request_context import RequestContext
from ..serving.service import Service
from ..storage.policies import PolicyStore
from .reply import SessionReply

if TYPE_CHECKING:
    from ..observability.tracing import RequestTracer

PATH = "/v1/realtime"
STALLED_S = 30.0
SoundTranscriber = Callable[[str, RoutingHints, bytes], Awaitable[Transcript]]
"""Transcribes a sound, as a request of its own with this id and these hints. Raises CausewayError."""


PartialTranscriber = Callable[[RoutingHints, bytes], Awaitable[str]]
"""Transcribes a sound that goes on; "" where other requests would wait for it. Never raises a CausewayError."""


class Speak(Protocol):
    """Speaks a text, as 16-bit PCM at 24 kHz. Raises CausewayError."""

    def __call__(self, text: str, voice: str, speed: float) -> Awaitable[bytes]: ...


_KEY_PROTOCOL = "openai-insecure-api-key."  # how OpenAI's browser clients send a key
_STOP_S = 2.0  # for cancelled answers to end
_RETRY_S = 5.0
_DIGITS = 15


class SessionUnknown(NotFound):
    """The session to resume does not exist, has ended, or is another client's."""

    code = "session_not_found"


class SessionStats(msgspec.Struct, frozen=True):
    connected: int
    cut: int  # without a connection; they can be resumed
    opened: int
    resumed: int
    refused: int
    unsent_bytes: int  # events that wait for their clients
    ended: Mapping[str, int]  # by reason


class Sessions:
    """Owns the sessions.

    Args:
        new_id: makes ids of decisions.
        transcribe: of a box that understands speech; None: its sessions take no sound.
        transcribe_partial: of a box that understands speech; None: nothing is told before a sound is committed.
        detect: detects speech; None: its sessions detect no turns.
        max_sounds: of one conversation.
        speak: of a box that speaks; None: its sessions answer with text.
        voice: of sessions that name none.
        stalled_s: a peer that reads nothing for so long is disconnected.
    """

    def __init__(
        self,
        config: RealtimeConfig,
        *,
        service: Service,
        reader: RequestReader,
        policies: PolicyStore,
        clock: Clock,
        new_id: Callable[[], str],
        transcribe: SoundTranscriber | None = None,
        transcribe_partial: PartialTranscriber | None = None,
        detect: Detect | None = None,
        max_sounds: int = 0,
        speak: Speak | None = None,
        voice: str = "en-us",
        tracing: RequestTracer | None = None,
        stalled_s: float = STALLED_S,
    ) -> None:
        self._config = config
        max_audio_s = 0.0 if transcribe is None else config.max_audio_s
        self._limits = SessionLimits(
            config.max_items,
            config.max_bytes,
            config.replay_bytes,
            max_audio_s,
            max_sounds,
            speaks=speak is not None,
            voice=voice,
            detects_turns=transcribe is not None and detect is not None,
            partial_s=0.0 if transcribe_partial is None else config.partial_s,
        )
        self._partial_transcriber = transcribe_partial
        self._sound_transcriber = transcribe
        self._detect = detect
        self._speak = speak
        self._service = service
        self._reader = reader
        self._policies = policies
        self._clock = clock
        self._new_id = new_id
        self._tracing = tracing
        self._stalled_s = stalled_s
        self._tasks: anyio.abc.TaskGroup | None = None
        self._sessions: dict[str, LiveSession] = {}
        self._shares = FairShare(config.max_sessions)
        self._running = 0  # answers
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._opened = self._resumed = self._refused = 0
        self._ended: dict[str, int] = {}

    @property
    def stats(self) -> SessionStats:
        connected = sum(live.connected for live in self._sessions.values())
        cut = len(self._sessions) - connected
        unsent_bytes = sum(live.session.log.unsent_bytes for live in self._sessions.values())
        return SessionStats(connected, cut, self._opened, self._resumed, self._refused, unsent_bytes, dict(self._ended))

    def paths(self) -> Mapping[str, tuple[str, Handler]]:
        """Methods and handler of the path of sessions."""
        return {PATH: ("GET", self.connect)}

    def start(self, tasks: anyio.abc.TaskGroup) -> None:
        """Run answers as children of `tasks`."""
        self._tasks = tasks

    def drain(self) -> None:
        """(5) Open no more sessions; end each one as soon as it has no running answer."""
        self._draining = True
        for live in [*self._sessions.values()]:
            if not live.running:
                self._end(live, "drained", CloseCode.GOING_AWAY, _shutting_down())

    async def close(self) -> None:
        """Stop the running answers and end all sessions."""
        self._draining = True
        for live in [*self._sessions.values()]:
            live.session.abandon(_shutting_down())
            live.stop()
        with anyio.move_on_after(_STOP_S):
            await self._idle.wait()
        self.drain()

    async def connect(self, http: web.BaseRequest) -> web.StreamResponse:
        """GET /v1/realtime. Raises CausewayError before the handshake; afterwards faults are events."""
        hints = routing_hints(http.headers, self._caller(http))
        if self._tasks is None or self._draining:
            raise _shutting_down()
        socket = RealtimeSocket(
            http, self._tasks, max_frame_bytes=2 * self._config.max_bytes, ping_s=self._config.ping_s
        )
        resumed = http.query.get("session_id")
        if resumed is None:
            live = self._open(http.query.get("model", AUTO), hints, read_traceparent(http.headers))
            try:
                await socket.open()
            except BaseException:
                self._end(live, "closed", CloseCode.GOING_AWAY)
                raise
        else:
            await socket.open()
            try:
                live = self._resume(resumed, http.query.get("after", "0"), hints)
            except InvalidRequest as error:
                await socket.refuse(error)
                return socket.response
        await self._follow(live, socket)
        return socket.response

    async def _follow(self, live: LiveSession, socket: RealtimeSocket) -> None:
        """Take the client's events until the connection ends, by whatever."""
        live.attach(socket)
        try:
            while (frame := await socket.frame()) is not None:
                await live.receive(frame)
        finally:
            if live.detach(socket) and (socket.closed_by_peer or self._config.resume_s == 0.0):
                self._end(live, "closed", CloseCode.GOING_AWAY)

    # --- opening -----------------------------------------------------------------------------------------------------

    def _caller(self, http: web.BaseRequest) -> Caller:
        """The client. Browsers send a key as a subprotocol. Raises AuthenticationFailed."""
        offered = members(http.headers.getall(hdrs.SEC_WEBSOCKET_PROTOCOL, ()))
        keys = [name.removeprefix(_KEY_PROTOCOL) for name in offered if name.startswith(_KEY_PROTOCOL)]
        if hdrs.AUTHORIZATION in http.headers or not keys:
            caller = self._reader.caller(http)
        else:
            caller = self._reader.identify(f"Bearer {keys[0]}", http)
        return caller

    def _take_share(self, session_id: str, client: str) -> None:
        """Raises QueueFull. Sessions without a connection give way, the caller's own first, the oldest cut first."""
        caller = network_of(client)
        while not self._shares.hold(session_id, caller):
            cut = [live for live in self._sessions.values() if not live.connected]
            own = [live for live in cut if network_of(live.client) == caller]
            cut = own or (cut if not self._shares.held_by(caller) else [])
            if not cut:
                self._refused += 1
                raise QueueFull(
                    f"You have {self._shares.held_by(caller)} sessions open, your share of {self._config.max_sessions} "
                    "(realtime.max_sessions). End one, or connect again later.",
                    retry_after_s=_RETRY_S,
                )
            self._end(min(cut, key=lambda live: live.changed_at), "gave_way", CloseCode.GOING_AWAY)

    def _open(self, model: str, hints: RoutingHints, traceparent: str) -> LiveSession:
        """Raises ModelNotFound or QueueFull."""
        assert self._tasks is not None
        if model not in self._policies.active.model_names:
            raise ModelNotFound(f"the model `{model[:100]}` does not exist here", param="model")
        session_id = f"sess_{secrets.token_hex(16)}"
        self._take_share(session_id, hints.client)
        session = RealtimeSession(session_id, model, hints, self._limits, self._new_id, NO_SPEECH)
        live = self._sessions[session.id] = LiveSession(
            session,
            hints.client,
            self._tasks,
            partial(self._answer, traceparent),
            self._answered,
            self._transcribe_sound,
            self._transcribe_partial,
            self._detect,
            stalled_s=self._stalled_s,
            now=self._clock.monotonic,
        )
        self._opened += 1
        return live

    def _resume(self, session_id: str, after: str, hints: RoutingHints) -> LiveSession:
        """(3) Raises SessionUnknown, EventsLost or InvalidRequest."""
        live = self._sessions.get(session_id)
        if live is None or live.client != hints.client:
            raise SessionUnknown("There is no such session; it may have ended. Start a new one.", param="session_id")
        if not after.isascii() or not after.isdigit() or len(after) > _DIGITS:
            raise InvalidRequest("`after` must be the sequence number of the last event received.", param="after")
        live.session.narrow(hints)
        live.session.log.rewind(int(after))
        self._resumed += 1
        return live

    # --- answers and ends --------------------------------------------------------------------------------------------

    async def _answer(self, traceparent: str, live: LiveSession, start: StartResponse) -> None:
        """One response as a request of the service. Raises CausewayError."""
        self._running += 1
        self._idle.clear()
        tracing = self._tracing
        arrived = self._clock.monotonic()
        await live.understood()
        await self._service.answer(
            RequestContext(
                start.request,
                SessionReply(start.response, live.flush, self._voice(start)),
                id=start.id,
                arrived=arrived,
                traceparent=traceparent,
                trace=None if tracing is None else tracing.begin(start.request, traceparent, self._clock.unix()),
            )
        )

    def _voice(self, start: StartResponse) -> Callable[[str], Awaitable[bytes]] | None:
        if self._speak is None or start.voice is None:
            return None
        return partial(self._speak, voice=start.voice.name, speed=start.voice.speed)

    async def _transcribe_sound(self, live: LiveSession, sound: TranscribeSound) -> Transcript:
        """Raises CausewayError."""
        assert self._sound_transcriber is not None
        return await self._sound_transcriber(self._new_id(), live.session.request_hints, base64.b64decode(sound.wav))

    async def _transcribe_partial(self, live: LiveSession, partial: TranscribePartial) -> str:
        assert self._partial_transcriber is not None
        return await self._partial_transcriber(live.session.request_hints, partial.wav)

    def _answered(self, live: LiveSession) -> None:
        self._running -= 1
        if not self._running:
            self._idle.set()
        if self._draining and not live.running:
            self._end(live, "drained", CloseCode.GOING_AWAY, _shutting_down())

    def _end(self, live: LiveSession, reason: str, code: CloseCode, error: CausewayError | None = None) -> None:
        if self._sessions.pop(live.session.id, None) is not None:
            self._ended[reason] = self._ended.get(reason, 0) + 1
            self._shares.release(live.session.id)
            live.end(code, error)

    def sweep(self) -> None:
        """(3) (4) End the sessions whose time is over. Call it about once a second."""
        now = self._clock.monotonic()
        for live in [*self._sessions.values()]:
            if not live.connected and now - live.changed_at >= self._config.resume_s:
                self._end(live, "not_resumed", CloseCode.GOING_AWAY)
            elif live.connected and not live.running and now - live.changed_at >= self._config.idle_s:
                self._end(live, "idle", CloseCode.IDLE)


def _shutting_down() -> Draining:
    return Draining("this server is shutting down; connect again", retry_after_s=1.0)
