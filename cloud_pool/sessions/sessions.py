"""The table of live sessions: who may open or resume one, how many there are, how long they live, and drain.

1. A client opens a session by connecting to one gateway.
2. A close frame of the client ends it, and stops its answer.
3. A cut connection leaves it resumable for `resume_s` at this gateway, by `?session_id=…&after=N`, for the same device
   of the same tenant only. Where it still has a connection, that one is closed: the second takes over.
4. Without an event or an answer for `idle_s` it ends.
5. While the gateway drains, sessions end as soon as they have no running answer.
6. A connection whose token expires or is revoked is closed within seconds, its answer with it. With another token of
   the device the session can be resumed.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from functools import partial

import anyio
from aiohttp import hdrs, web
from anyio.abc import TaskGroup
from prometheus_client import CollectorRegistry

from router.errors import (
    AuthenticationFailed,
    CausewayError,
    Draining,
    IdentityUnavailable,
    InvalidRequest,
    MissingField,
    NotFound,
    QueueFull,
)
from router.realtime import CloseCode, RealtimeSession, SessionLimits, StartResponse
from router.serving.live.live_session import LiveSession
from router.serving.live.socket import RealtimeSocket
from router.serving.request import members
from router.trackers.fair_share import FairShare
from router.types import RoutingHints

from ..accounts.identity.principal import Principal
from ..config.schema import RealtimeConfig
from ..http.request_reader import read_headers
from ..observability.logs import REQUEST
from .metrics import SessionMetrics
from .requests import SessionCaller, SessionRequests, SessionServices

STALLED_S = 30.0
_KEY_PROTOCOL = "openai-insecure-api-key."  # how OpenAI's browser clients send a token
_SWEEP_S = 1.0
_STOP_S = 2.0  # for cancelled answers to end
_RETRY_S = 5.0
_DIGITS = 15


class SessionUnknown(NotFound):
    """The session to resume does not exist at this gateway, has ended, or is another client's."""

    code = "session_not_found"


class Sessions:
    """Owns the sessions.

    Args:
        services: answers their requests.
        registry: of the process's metrics.
        stalled_s: a peer that reads nothing for so long is disconnected.
    """

    def __init__(
        self,
        config: RealtimeConfig,
        services: SessionServices,
        registry: CollectorRegistry,
        *,
        stalled_s: float = STALLED_S,
    ) -> None:
        self._config = config
        self._services = services
        self._metrics = SessionMetrics(registry, lambda: self.open)
        self._stalled_s = stalled_s
        self._clock = services.runner.clock
        self._tasks: TaskGroup | None = None
        self._sessions: dict[str, LiveSession] = {}
        self._requests: dict[str, SessionRequests] = {}  # by session
        self._shares = FairShare(config.max_sessions)
        self._running = 0  # answers
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    @property
    def open(self) -> tuple[int, int]:
        """How many sessions have a connection, and how many were cut and can be resumed."""
        connected = sum(live.connected for live in self._sessions.values())
        return connected, len(self._sessions) - connected

    @property
    def unsent_bytes(self) -> int:
        """Events that wait for their clients."""
        return sum(live.session.log.unsent_bytes for live in self._sessions.values())

    def start(self, tasks: TaskGroup) -> None:
        """Run answers, and end sessions whose time is over, as children of `tasks`."""
        self._tasks = tasks
        tasks.start_soon(self._sweep)

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
        authorization = _authorization(http)
        principal = self._principal(authorization, http)
        self._services.bodies.enter(http, principal.caller)
        inbound = read_headers(http.headers.items(), REQUEST.get())
        hints = RoutingHints(client=principal.device, deadline_ms=inbound.deadline_ms, tags=inbound.tags)
        if self._tasks is None or self._draining:
            raise _shutting_down()
        socket = RealtimeSocket(
            http, self._tasks, max_frame_bytes=2 * self._config.max_bytes, ping_s=self._config.ping_s
        )
        caller = SessionCaller(authorization, principal, inbound, http.headers.get("x-causeway-policy", ""))
        resumed = http.query.get("session_id")
        if resumed is None:
            live = self._open(http.query.get("model", ""), caller, hints)
            try:
                await socket.open()
            except BaseException:
                self._end(live, "closed", CloseCode.GOING_AWAY)
                raise
        else:
            await socket.open()
            try:
                live = self._resume(resumed, http.query.get("after", "0"), caller, hints)
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

    def _principal(self, authorization: str, http: web.BaseRequest) -> Principal:
        """Raises AuthenticationFailed, IdentityUnavailable or PermissionDenied."""
        principal = self._services.authenticator.principal(authorization)
        principal.require("chat")
        return principal

    def _take_share(self, session_id: str, principal: Principal) -> None:
        """Raises QueueFull. Sessions without a connection give way, the caller's own first, the oldest cut first."""
        while not self._shares.hold(session_id, principal.caller):
            cut = [live for live in self._sessions.values() if not live.connected]
            own = [live for live in cut if self._requests[live.session.id].caller.principal.caller == principal.caller]
            cut = own or (cut if not self._shares.held_by(principal.caller) else [])
            if not cut:
                self._metrics.refused()
                raise QueueFull(
                    f"Your tenant has {self._shares.held_by(principal.caller)} sessions open, its share of "
                    f"{self._config.max_sessions} (realtime.max_sessions). End one, or connect again later.",
                    retry_after_s=_RETRY_S,
                )
            self._end(min(cut, key=lambda live: live.changed_at), "gave_way", CloseCode.GOING_AWAY)

    def _open(self, model: str, caller: SessionCaller, hints: RoutingHints) -> LiveSession:
        """Raises MissingField, ModelNotFound or QueueFull."""
        assert self._tasks is not None
        if not model:
            raise MissingField("`model` is missing in the query. Name a tier.", param="model")
        self._services.admission.check_model(model, caller.principal)
        session_id = f"sess_{secrets.token_hex(16)}"
        self._take_share(session_id, caller.principal)
        config, no_sound = self._config, self._services.no_sound(caller.principal)
        limits = SessionLimits(
            config.max_items,
            config.max_bytes,
            config.replay_bytes,
            max_audio_s=0.0 if no_sound else config.max_audio_s,
            max_sounds=self._services.max_sounds,
            detects_turns=self._services.detect is not None,
        )
        requests = SessionRequests(self._services, model, caller)
        session = RealtimeSession(
            session_id,
            model,
            hints,
            limits,
            lambda: secrets.token_hex(8),
            no_sound,
            requests.hold_sound,
        )
        self._requests[session.id] = requests
        live = self._sessions[session.id] = LiveSession(
            session,
            caller.principal.owner,
            self._tasks,
            partial(self._answer, requests),
            self._answered,
            requests.transcribe,
            detect=self._services.detect,
            stalled_s=self._stalled_s,
            now=self._clock,
        )
        self._metrics.opened()
        return live

    def _resume(self, session_id: str, after: str, caller: SessionCaller, hints: RoutingHints) -> LiveSession:
        """(3) Raises SessionUnknown, EventsLost or InvalidRequest."""
        live = self._sessions.get(session_id)
        if live is None or live.client != caller.principal.owner:
            raise SessionUnknown("There is no such session; it may have ended. Start a new one.", param="session_id")
        if not after.isascii() or not after.isdigit() or len(after) > _DIGITS:
            raise InvalidRequest("`after` must be the sequence number of the last event received.", param="after")
        live.session.narrow(hints)
        live.session.log.rewind(int(after))
        self._requests[session_id].caller = caller
        self._metrics.resumed()
        return live

    # --- answers and ends --------------------------------------------------------------------------------------------

    async def _answer(self, requests: SessionRequests, live: LiveSession, start: StartResponse) -> None:
        """One response as a request of the gateway. Raises CausewayError."""
        self._running += 1
        self._idle.clear()
        await requests.answer(live, start)

    def _answered(self, live: LiveSession) -> None:
        self._running -= 1
        if not self._running:
            self._idle.set()
        if self._draining and not live.running:
            self._end(live, "drained", CloseCode.GOING_AWAY, _shutting_down())

    def _end(self, live: LiveSession, reason: str, code: CloseCode, error: CausewayError | None = None) -> None:
        if self._sessions.pop(live.session.id, None) is not None:
            self._metrics.ended(reason)
            self._shares.release(live.session.id)
            live.end(code, error)
            self._requests.pop(live.session.id).close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.sweep()

    def sweep(self) -> None:
        """(3) (4) (6) End the sessions whose time is over, and close connections whose tokens are refused."""
        now = self._clock()
        for live in [*self._sessions.values()]:
            if not live.connected and now - live.changed_at >= self._config.resume_s:
                self._end(live, "not_resumed", CloseCode.GOING_AWAY)
            elif live.connected and (refused := self._refusal(live)) is not None:
                live.disconnect(CloseCode.TOKEN_REFUSED, refused)  # (6)
            elif live.connected and not live.running and now - live.changed_at >= self._config.idle_s:
                self._end(live, "idle", CloseCode.IDLE)

    def _refusal(self, live: LiveSession) -> AuthenticationFailed | None:
        """Return why the token of a session's connection is no longer accepted; None if it is."""
        caller = self._requests[live.session.id].caller
        try:
            with suppress(IdentityUnavailable):  # It was accepted, and nothing says that it was revoked since.
                self._services.authenticator.principal(caller.authorization)
        except AuthenticationFailed as error:
            return error
        return None


def _authorization(http: web.BaseRequest) -> str:
    """The header `Authorization`, or what a browser sends instead: the token as a subprotocol."""
    sent = http.headers.get(hdrs.AUTHORIZATION, "")
    offered = members(http.headers.getall(hdrs.SEC_WEBSOCKET_PROTOCOL, ()))
    tokens = [name.removeprefix(_KEY_PROTOCOL) for name in offered if name.startswith(_KEY_PROTOCOL)]
    return f"Bearer {tokens[0]}" if tokens and not sent else sent


def _shutting_down() -> Draining:
    return Draining("this gateway is shutting down; connect again", retry_after_s=1.0)
