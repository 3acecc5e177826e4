"""A live session whose peer reads nothing, without waiting for it: the stall comes from the socket."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from typing import cast

import anyio

from causeway_server.router.openai.audio import Transcript
from causeway_server.router.realtime.event_log import CloseCode
from causeway_server.router.realtime.response import SessionLimits, StartResponse, TranscribeAudio
from causeway_server.router.realtime.session import RealtimeSession
from causeway_server.router.serving.live.live_session import LiveSession, RealtimeSocket, SessionClient, SessionRequests
from causeway_server.router.types import RoutingHints


class StalledSocket:
    """Takes `room` events, and then nothing any more."""

    def __init__(self, room: int) -> None:
        self.events: list[bytes] = []
        self.closed_with: CloseCode | None = None
        self._room = room

    @property
    def is_open(self) -> bool:
        return self.closed_with is None

    @property
    def is_behind(self) -> bool:
        return len(self.events) >= self._room

    def write(self, event: bytes) -> None:
        self.events.append(event)

    async def drained(self) -> None:
        raise TimeoutError

    def close(self, code: CloseCode) -> None:
        self.closed_with = code


def numbers(*sockets: StalledSocket) -> list[int]:
    return [json.loads(event)["sequence_number"] for socket in sockets for event in socket.events]


class NoRequests(SessionRequests[SessionClient]):
    """No response is started here, and no audio is sent."""

    client = SessionClient("a", "a", RoutingHints())
    detect = None

    async def answer(self, live: LiveSession[SessionClient], start: StartResponse) -> None:
        raise AssertionError

    async def transcribe(self, live: LiveSession[SessionClient], audio: TranscribeAudio) -> Transcript:
        raise AssertionError


async def test_a_peer_that_reads_nothing_is_disconnected_and_can_resume() -> None:
    session = RealtimeSession("sess_1", "auto", RoutingHints(), SessionLimits(), lambda: "id")
    async with anyio.create_task_group() as tasks:
        live = LiveSession(session, NoRequests(), tasks, lambda _: nullcontext(), time.monotonic)
        stalled, patient = StalledSocket(room=2), StalledSocket(room=100)
        live.attach(cast("RealtimeSocket", stalled))
        for _ in range(5):
            await live.receive(b"nonsense")
        with anyio.fail_after(60.0):
            while live.connected:
                await anyio.lowlevel.checkpoint()
        assert stalled.closed_with is CloseCode.TOO_SLOW
        assert numbers(stalled) == [1, 2]
        session.log.rewind(2)
        live.attach(cast("RealtimeSocket", patient))
        assert numbers(stalled, patient) == [1, 2, 3, 4, 5, 6]
