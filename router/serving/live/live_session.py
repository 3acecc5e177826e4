"""A live session: its connection, if any, the running response, and the answer as events. After a cut connection the
session continues without one: the running answer goes on until its unsent events reach the bound, and waits there.
Sends never wait for the peer: unread events stay in the session's log, and their producers wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import anyio
import anyio.abc
import msgspec

from ...errors import CausewayError, ClientGone, InvalidRequest
from ...openai.answer import CachedAnswer
from ...openai.audio import Transcript
from ...realtime.event_log import MEANING, CloseCode, EventsLost, encode_refusal, text_frame
from ...realtime.response import (
    CancelResponse,
    DetectSpeech,
    Effect,
    ResponseStream,
    StartResponse,
    TranscribeAudio,
    TranscribePartial,
)
from ...realtime.session import RealtimeSession
from ...types import Chunk, Embeddings, RoutingHints
from ..reply import Piece
from ..request import AiohttpRequest, members
from ..responses import STALLED_S

PROTOCOL = "realtime"
"""The WebSocket subprotocol that OpenAI's browser clients offer."""

_CLOSE_S = 2.0  # time for the peer to read and answer a close frame
_REASON_BYTES = 123  # maximum reason of a close frame
_FRAMES_PER_TURN = 16  # frames of a flooding peer before other tasks run


class RealtimeSocket:
    """A WebSocket connection: the handshake, frames in and out, and a peer that does not read. Frames are written
    directly to the transport: an event costs one write and no turn of the event loop. A message of more than
    `max_frame_bytes` closes it (1009), in a task of `tasks`; so does a ping, one each `ping_s`, without an answer
    within half of that.
    """

    def __init__(
        self, http: AiohttpRequest, tasks: anyio.abc.TaskGroup, *, max_frame_bytes: int, ping_s: float
    ) -> None:
        from aiohttp import web

        self._http = http
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._received = 0
        self._closing = False
        self.closed_by_peer = False
        """Whether the peer sent a close frame; False after a cut connection or a fault."""
        # Compression would cost each connection hundreds of kilobytes.
        self.response = web.WebSocketResponse(
            timeout=_CLOSE_S,
            heartbeat=ping_s,
            compress=False,
            max_msg_size=max_frame_bytes,
            protocols=(PROTOCOL,),
            decode_text=False,
        )

    async def open(self) -> None:
        """Answer the handshake. Raises InvalidRequest."""
        offered = members(self._http.headers.getall("Sec-WebSocket-Protocol", (PROTOCOL,)))
        if PROTOCOL not in offered:
            raise InvalidRequest(f"Offer the subprotocol `{PROTOCOL}`, or none.", param="Sec-WebSocket-Protocol")
        if not self.response.can_prepare(self._http):
            raise InvalidRequest("This path speaks WebSocket, version 13. Connect with a WebSocket client.")
        await self.response.prepare(self._http)

    async def frame(self) -> bytes | None:
        """Return the next text message; None after a close. Raises CancelledError when the connection is cut."""
        self._received += 1
        if self._received % _FRAMES_PER_TURN == 0:
            await asyncio.sleep(0)
        from aiohttp import WSMsgType

        message = await self.response.receive()
        if message.type is WSMsgType.TEXT:
            payload: bytes = message.data
            return payload
        self.closed_by_peer = message.type is WSMsgType.CLOSE and not self._closing
        if message.type is WSMsgType.BINARY:
            self._closing = True
            await self._close(CloseCode.NOT_TEXT)
        return None

    @property
    def is_open(self) -> bool:
        transport = self._http.transport
        return not (self._closing or self.response.closed or transport is None or transport.is_closing())

    @property
    def is_behind(self) -> bool:
        """Whether the peer reads more slowly than the server writes, so that `drained` waits."""
        return self._http.protocol.writing_paused

    def write(self, event: bytes) -> None:
        """Write one event, if the connection is open."""
        transport = self._http.transport
        if self.is_open and transport is not None:
            transport.write(text_frame(event))

    async def drained(self) -> None:
        """Wait until the peer has caught up. Raises TimeoutError (no read in `STALLED_S`) or ConnectionError."""
        async with asyncio.timeout(STALLED_S):
            await self._http.writer.drain()

    async def refuse(self, error: CausewayError) -> None:
        """Send the reason for which this connection does not get a session, and close it."""
        self.write(encode_refusal(error))
        self.close(CloseCode.EVENTS_LOST if isinstance(error, EventsLost) else CloseCode.UNKNOWN_SESSION)
        while await self.frame() is not None:
            pass

    def close(self, code: CloseCode) -> None:
        """Close the connection after the written frames. A peer that does not answer is disconnected."""
        if self.is_open:
            self._closing = True
            self._tasks.start_soon(self._close, code)

    async def _close(self, code: CloseCode) -> None:
        try:
            await self.response.close(code=code, message=MEANING[code].encode()[:_REASON_BYTES], drain=False)
        finally:
            self._loop.call_later(_CLOSE_S, self._abort)

    def _abort(self) -> None:
        if self._http.transport is not None:
            self._http.transport.abort()


Detect = Callable[[bytes, bytes], Awaitable[tuple[Sequence[float], bytes]]]
"""A speech detector: audio and state → each window's probability of speech, and the state. Raises CausewayError."""
UNSENT_BYTES = 64 * 1024
"""Bytes of unsent events of a slow client beyond which their producers wait."""


class SessionClient(msgspec.Struct, frozen=True):
    """The client of a connection."""

    owner: str  # the session's owner, the only one who may resume it
    share: str  # the caller to whose share of the sessions it counts
    hints: RoutingHints  # its routing hints


Client = TypeVar("Client", bound=SessionClient)


class SessionRequests(Protocol[Client]):
    """The requests of a session, implemented by its server."""

    client: Client  # the client of its current or last connection; replaced when another connection resumes the session
    detect: Detect | None  # the speech detector; None: the session does not detect turns

    async def answer(self, live: LiveSession[Client], start: StartResponse) -> None:
        """Answer a response like any other request. Raises CausewayError."""

    async def transcribe(self, live: LiveSession[Client], audio: TranscribeAudio) -> Transcript:
        """Transcribe audio, as a separate request. Raises CausewayError."""

    async def transcribe_partial(self, live: LiveSession[Client], partial: TranscribePartial) -> str:
        """Return the partial transcript; "" if there is none, or if other requests would wait for it."""
        return ""

    def refusal(self) -> CausewayError | None:
        """Return why the client may no longer use its connection; None if it may."""
        return None

    def close(self) -> None:
        """Release the resources of the session's requests, after its end."""
        return


@dataclass(eq=False, repr=False)
class LiveSession(Generic[Client]):
    """A session with its connection and its running response. `answering`: a context, entered for each answer."""

    session: RealtimeSession  # the state, and the events for the client
    requests: SessionRequests[Client]  # the requests of the session
    tasks: anyio.abc.TaskGroup  # the parent of its tasks, which outlive a connection
    answering: Callable[[LiveSession[Client]], AbstractContextManager[None]]
    now: Callable[[], float]  # the monotonic clock, in seconds

    def __post_init__(self) -> None:
        self.changed_at = self.now()
        """The last event of the client, end of an answer, or loss of the connection; monotonic seconds."""
        self._transcriptions: set[anyio.CancelScope] = set()
        self._understood = asyncio.Event()
        self._understood.set()
        self._partial_runs = False
        self._socket: RealtimeSocket | None = None
        self._running: anyio.CancelScope | None = None
        self._pumping = False
        self._has_room = asyncio.Event()

    @property
    def connected(self) -> bool:
        return self._socket is not None

    @property
    def running(self) -> bool:
        """Whether an answer is being generated."""
        return self._running is not None

    # --- the connection ----------------------------------------------------------------------------------------------

    def attach(self, socket: RealtimeSocket) -> None:
        """Continue over this connection, and close an earlier one."""
        if self._socket is not None:
            self._socket.close(CloseCode.TAKEN_OVER)
        self._socket = socket
        self._send()

    def disconnect(self, code: CloseCode, error: CausewayError) -> None:
        """Send the client the reason, and close its connection; the session can be resumed over another one."""
        socket = self._socket
        if socket is not None:
            self.stop()
            self.session.report(error)
            self._send()
            self.detach(socket)
            socket.close(code)

    def detach(self, socket: RealtimeSocket) -> bool:
        """Continue without a connection. Returns False if `socket` is no longer the session's."""
        if self._socket is not socket:
            return False
        self._socket = None
        self.changed_at = self.now()
        return True

    async def receive(self, frame: bytes) -> None:
        """Take an event of the client; waits while the client reads too slowly."""
        self.changed_at = self.now()
        effect = self.session.receive(frame)
        if isinstance(effect, DetectSpeech):
            await self._look_for_speech(effect)
        elif effect is not None:
            self._do(effect)
        if not self._partial_runs and (partial := self.session.partial()) is not None:
            self._partial_runs = True
            self.tasks.start_soon(self._send_partial, partial)
        await self.flush()

    def _do(self, effect: Effect) -> None:
        if isinstance(effect, StartResponse):
            self._running = anyio.CancelScope()
            self.tasks.start_soon(self._run, effect, self._running)
        elif isinstance(effect, CancelResponse):
            self.stop()
        elif isinstance(effect, TranscribeAudio):
            scope = anyio.CancelScope()
            self._transcriptions.add(scope)
            self._understood.clear()
            self.tasks.start_soon(self._understand, effect, scope)

    async def flush(self) -> None:
        """Send new events; waits while the client is far behind, or disconnected with many unsent events."""
        self._send()
        while self.session.log.unsent_bytes > UNSENT_BYTES:
            self._has_room.clear()
            await self._has_room.wait()

    def _send(self) -> None:
        socket, log = self._socket, self.session.log
        if socket is None or not socket.is_open:
            return
        while not socket.is_behind and (event := log.take()) is not None:
            socket.write(event)
        if log.unsent_bytes <= UNSENT_BYTES:
            self._has_room.set()
        if log.unsent_bytes and not self._pumping:
            self._pumping = True
            self.tasks.start_soon(self._pump, socket)

    async def _pump(self, socket: RealtimeSocket) -> None:
        """Wait for a slow peer, and send further events. A peer that reads nothing is disconnected."""
        try:
            await socket.drained()
        except TimeoutError:
            self.detach(socket)
            socket.close(CloseCode.TOO_SLOW)
        except ConnectionError:
            pass  # the connection's own task detaches it
        finally:
            self._pumping = False
        self._send()

    # --- audio -------------------------------------------------------------------------------------------------------

    async def _look_for_speech(self, audio: DetectSpeech) -> None:
        """Detect speech and handle the turns that start and end in audio. The client's next event waits for this."""
        assert self.requests.detect is not None
        try:
            probabilities, state = await self.requests.detect(audio.pcm, audio.state)
        except CausewayError as error:
            self.session.report(error)  # the audio is kept, and searched together with the next piece
            return
        for effect in self.session.detected(audio, probabilities, state):
            self._do(effect)

    async def understood(self) -> None:
        """Wait for the transcripts of committed audio, which a response then uses."""
        await self._understood.wait()

    async def _understand(self, audio: TranscribeAudio, scope: anyio.CancelScope) -> None:
        try:
            with scope:
                try:
                    self.session.transcribed(audio, await self.requests.transcribe(self, audio))
                except CausewayError as error:
                    self.session.not_transcribed(audio, error)
        finally:
            self._transcriptions.discard(scope)
            if not self._transcriptions:
                self._understood.set()
            self._send()

    async def _send_partial(self, partial: TranscribePartial) -> None:
        """Send partial transcripts, one at a time: audio that arrives meanwhile waits for the next one."""
        try:
            self.session.partly_transcribed(partial, await self.requests.transcribe_partial(self, partial))
        finally:
            self._partial_runs = False
            self._send()

    # --- the response ------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Cancel the running answer. The work stops within a decode step."""
        if self._running is not None:
            self._running.cancel()
            self._running = None

    def end(self, code: CloseCode, error: CausewayError | None = None) -> None:
        """End the session: stop the answer, inform the client, close the connection."""
        self.stop()
        for transcription in [*self._transcriptions]:
            transcription.cancel()
        if error is not None:
            self.session.report(error)
        self._send()
        if self._socket is not None:
            self._socket.close(code)
            self._socket = None

    async def _run(self, start: StartResponse, scope: anyio.CancelScope) -> None:
        with self.answering(self):
            try:
                with scope:
                    try:
                        await self.requests.answer(self, start)
                    except ClientGone:
                        pass
                    except CausewayError as error:
                        start.response.fail(error)
            finally:
                self._send()
                if self._running is scope:
                    self._running = None
                if self.connected:
                    self.changed_at = self.now()


Head = TypeVar("Head")
Speak = Callable[[str], Awaitable[bytes]]
_PIECE_BYTES = 9600  # a fifth of a second


@dataclass(eq=False, repr=False)
class SessionReply(Generic[Head]):
    """A reply that passes an answer to a response of a session. `describe`: the fields about an answer in
    `response.done`, those of the ``x-causeway-*`` headers.
    """

    response: ResponseStream  # the response
    flush: Callable[[], Awaitable[None]]  # sends the session's new events; waits while the client is far behind
    describe: Callable[[Head], dict[str, object]]
    speak: Speak | None = None  # returns the audio of a text, 16-bit PCM at 24 kHz; None: the answer is text

    async def commit(self, head: Head) -> None:
        self.response.commit(self.describe(head))

    async def send(self, piece: Piece) -> None:
        if isinstance(piece, Chunk):
            if piece.tool_calls:
                await self._say(rest=True)
            self.response.chunk(piece)
            await self._say()
            await self.flush()

    @property
    def finished(self) -> bool:
        return self.response.finished

    async def replay(self, head: Head, answer: CachedAnswer | Embeddings) -> None:
        await self.commit(head)
        for chunk in answer.chunks if isinstance(answer, CachedAnswer) else ():
            await self.send(chunk)

    async def end(self) -> None:
        await self._say(rest=True)
        self.response.complete()
        await self.flush()

    async def _say(self, *, rest: bool = False) -> None:
        """Send the audio of whole sentences, or of the rest of the message."""
        if self.speak is None or not (text := self.response.ready_to_speak(rest=rest)):
            return
        audio = await self.speak(text)
        for at in range(0, len(audio), _PIECE_BYTES):
            self.response.audio(audio[at : at + _PIECE_BYTES])
            await self.flush()
