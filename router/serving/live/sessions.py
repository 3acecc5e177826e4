"""The table of live sessions: opening, resuming, limits, lifetime, and drain.

1. A client opens a session by connecting to one server.
2. A close frame of the client ends the session and its answer.
3. After a cut connection the same owner can resume the session for `resume_s`, by `?session_id=…&after=N`. If the
   session still has a connection, the new one replaces it.
4. A session without an event or an answer for `idle_s` ends.
5. While the server drains, sessions end as soon as they have no running answer.
6. A connection whose token expires or is revoked is closed within seconds, and its answer is stopped. The session can
   be resumed with another token of the owner.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Generic, Protocol

import anyio
import anyio.abc
import msgspec

from ...config import SessionConfig
from ...errors import CausewayError, Draining, InvalidRequest, NotFound, QueueFull
from ...realtime.event_log import CloseCode
from ...realtime.session import RealtimeSession
from ...trackers import FairShare
from ..metrics import MetricKind, Sample
from ..request import AiohttpRequest, members, read_credential
from ..responses import ServerResponse
from .live_session import Client, LiveSession, RealtimeSocket, SessionRequests

_KEY_PROTOCOL = "openai-insecure-api-key."  # prefix of the key in OpenAI's browser clients
_SWEEP_S = 1.0
_STOP_S = 2.0  # time for cancelled answers to end
_RETRY_S = 5.0
_DIGITS = 15


class SessionUnknown(NotFound, code="session_not_found"):
    """The session to resume does not exist here, has ended, or is another client's."""


class SessionHost(Protocol[Client]):
    """The server of the sessions."""

    async def client(self, http: AiohttpRequest, authorization: str) -> Client:
        """Return a connection's client. Raises CausewayError if it may have no session, or a header is invalid."""

    def open(
        self, session_id: str, model: str | None, client: Client
    ) -> tuple[RealtimeSession, SessionRequests[Client]]:
        """Return a new session and its requests. `model`: its name in the client's request. Raises CausewayError."""


class SessionStats(msgspec.Struct, frozen=True):
    connected: int
    cut: int  # sessions without a connection, which can be resumed
    opened: int
    resumed: int
    refused: int
    unsent_bytes: int  # events that wait for their clients
    ended: Mapping[str, int]  # by reason


class Sessions(Generic[Client]):
    """The owner of all sessions. `host`, the server, authenticates clients and answers; `now`: monotonic seconds."""

    def __init__(self, config: SessionConfig, host: SessionHost[Client], now: Callable[[], float]) -> None:
        self._config = config
        self._host = host
        self._now = now
        self._tasks: anyio.abc.TaskGroup | None = None
        self._sessions: dict[str, LiveSession[Client]] = {}
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

    def samples(self, prefix: str) -> Iterator[Sample]:
        """Yield the metrics of sessions. `prefix`: the prefix of their names, such as "causeway_edge_"."""
        stats = self.stats

        def sample(name: str, value: int, *labels: tuple[str, str], kind: MetricKind = "gauge") -> Sample:
            return Sample(prefix + name, value, labels, kind)

        yield sample("sessions", stats.connected, ("state", "connected"))
        yield sample("sessions", stats.cut, ("state", "cut"))
        yield sample("sessions_unsent_bytes", stats.unsent_bytes)
        yield sample("sessions_opened", stats.opened, kind="counter")
        yield sample("sessions_resumed", stats.resumed, kind="counter")
        yield sample("sessions_refused", stats.refused, kind="counter")
        for reason, count in stats.ended.items():
            yield sample("sessions_ended", count, ("reason", reason), kind="counter")

    def start(self, tasks: anyio.abc.TaskGroup) -> None:
        """Run answers, and the task that ends old sessions, as children of `tasks`."""
        self._tasks = tasks
        tasks.start_soon(self._sweep)

    def drain(self) -> None:
        """Refuse new sessions; end each session as soon as it has no running answer (5)."""
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

    async def connect(self, http: AiohttpRequest) -> ServerResponse:
        """Serve `GET /v1/realtime`. Raises CausewayError before the handshake; later faults are sent as events."""
        client = await self._host.client(http, _authorization(http))
        if self._tasks is None or self._draining:
            raise _shutting_down()
        socket = RealtimeSocket(
            http, self._tasks, max_frame_bytes=2 * self._config.max_bytes, ping_s=self._config.ping_s
        )
        resumed = http.query.get("session_id")
        if resumed is None:
            live = self._open(http.query.get("model"), client, self._tasks)
            try:
                await socket.open()
            except BaseException:
                self._end(live, "closed", CloseCode.GOING_AWAY)
                raise
        else:
            await socket.open()
            try:
                live = self._resume(resumed, http.query.get("after", "0"), client)
            except InvalidRequest as error:
                await socket.refuse(error)
                return socket.response
        await self._follow(live, socket)
        return socket.response

    async def _follow(self, live: LiveSession[Client], socket: RealtimeSocket) -> None:
        """Take the client's events until the connection ends."""
        live.attach(socket)
        try:
            while (frame := await socket.frame()) is not None:
                await live.receive(frame)
        finally:
            if live.detach(socket) and (socket.closed_by_peer or self._config.resume_s == 0.0):
                self._end(live, "closed", CloseCode.GOING_AWAY)

    # --- opening -----------------------------------------------------------------------------------------------------

    def _take_share(self, session_id: str, share: str) -> None:
        """Take a share for a session; evict disconnected ones, the caller's and oldest first. Raises QueueFull."""
        while not self._shares.hold(session_id, share):
            cut = [live for live in self._sessions.values() if not live.connected]
            own_cut = [live for live in cut if live.requests.client.share == share]
            cut = own_cut or (cut if not self._shares.held_by(share) else [])
            if not cut:
                self._refused += 1
                raise QueueFull(
                    f"{self._shares.held_by(share)} sessions are open, which is your share of "
                    f"{self._config.max_sessions} (realtime.max_sessions). End one of them, or connect again later.",
                    retry_after_s=_RETRY_S,
                )
            self._end(min(cut, key=lambda live: live.changed_at), "gave_way", CloseCode.GOING_AWAY)

    def _open(self, model: str | None, client: Client, tasks: anyio.abc.TaskGroup) -> LiveSession[Client]:
        """Open a session. Raises QueueFull, or the host's errors."""
        session_id = f"sess_{secrets.token_hex(16)}"
        session, requests = self._host.open(session_id, model, client)
        self._take_share(session_id, client.share)
        live = self._sessions[session_id] = LiveSession(session, requests, tasks, self._answering, self._now)
        self._opened += 1
        return live

    def _resume(self, session_id: str, after: str, client: Client) -> LiveSession[Client]:
        """Resume a session (3). Raises SessionUnknown, EventsLost or InvalidRequest."""
        live = self._sessions.get(session_id)
        if live is None or live.requests.client.owner != client.owner:
            raise SessionUnknown(
                "The session was not found; it may have ended. Start a new session.", param="session_id"
            )
        if not after.isascii() or not after.isdigit() or len(after) > _DIGITS:
            raise InvalidRequest("`after` must be the sequence number of the last event received.", param="after")
        live.session.narrow(client.hints)
        live.session.log.rewind(int(after))
        live.requests.client = client
        self._resumed += 1
        return live

    # --- answers and ends --------------------------------------------------------------------------------------------

    @contextmanager
    def _answering(self, live: LiveSession[Client]) -> Iterator[None]:
        self._running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()
            if self._draining and not live.running:
                self._end(live, "drained", CloseCode.GOING_AWAY, _shutting_down())

    def _end(self, live: LiveSession[Client], reason: str, code: CloseCode, error: CausewayError | None = None) -> None:
        if self._sessions.pop(live.session.id, None) is not None:
            self._ended[reason] = self._ended.get(reason, 0) + 1
            self._shares.release(live.session.id)
            live.end(code, error)
            live.requests.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.sweep()

    def sweep(self) -> None:
        """End sessions that were not resumed or are idle (3) (4); close those with refused tokens (6)."""
        now = self._now()
        for live in [*self._sessions.values()]:
            if not live.connected and now - live.changed_at >= self._config.resume_s:
                self._end(live, "not_resumed", CloseCode.GOING_AWAY)
            elif live.connected and (refused := live.requests.refusal()) is not None:
                live.disconnect(CloseCode.TOKEN_REFUSED, refused)  # (6)
            elif live.connected and not live.running and now - live.changed_at >= self._config.idle_s:
                self._end(live, "idle", CloseCode.IDLE)


def _authorization(http: AiohttpRequest) -> str:
    """Return the header `Authorization`, or a browser's key from the subprotocols. Raises InvalidRequest."""
    sent = read_credential(http)
    offered = members(http.headers.getall("Sec-WebSocket-Protocol", ()))
    keys = [name.removeprefix(_KEY_PROTOCOL) for name in offered if name.startswith(_KEY_PROTOCOL)]
    return f"Bearer {keys[0]}" if keys and not sent else sent


def _shutting_down() -> Draining:
    return Draining("This server is shutting down. Connect again.", retry_after_s=1.0)
