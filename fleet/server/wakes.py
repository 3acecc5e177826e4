"""Parked polls, which are answered when their cohort changes or a device is revoked. Polls are parked without aiohttp,
whose request, parser and task take ten kilobytes per poll. A connection has three owners in turn:

    aiohttp's handler   reads a poll, checks the device's token, and finds nothing new: `Polls.park`
    Poll, parked        three references and a deadline, until its cohort changes, its time is over or its
                        device leaves; each device has its share of these (`connections.py`)
    Poll, idle          answered: the next bytes go to a new handler of aiohttp, as on a new connection

Requests that a client pipelines behind a poll in one packet are lost; devices and proxies do not pipeline.

Every process reads the generations from the database twice a second, so a change that one process commits wakes the
devices of all of them, and a revocation ends the polls of its device.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from email.utils import formatdate
from http import HTTPStatus

import anyio
import msgspec
from aiohttp import web

from causeway_server.router.bundle.protocol import Wake
from causeway_server.router.errors import CausewayError
from causeway_server.router.openai.answer import encode_error, error_headers

from ..store.database import Store, StoreUnavailable
from ..store.generations import REVOCATIONS, CohortPace, Generation, read_generations, revoked_devices
from .connections import Connections, HttpConnection
from .refusals import DeviceRevoked

IDLE_S = 75.0
"""The time for which a connection may stay open between two requests, in seconds."""
_JSON = {"Content-Type": "application/json"}
CHECK_EVERY_S = 0.5
_NOTHING = Generation()
log = logging.getLogger(__name__)


class PollAnswer(msgspec.Struct, frozen=True):
    """A response to many polls, in two forms: for connections that stay open, and that close after it."""

    staying: bytes
    closing: bytes


class Poll(asyncio.Protocol):
    """A connection with a parked poll, or idle after one."""

    __slots__ = ("_early", "_keep_alive", "_polls", "cohort", "device", "ends", "transport")

    def __init__(
        self, polls: Polls, transport: asyncio.Transport, device: str, cohort: str, ends: float, keep_alive: bool
    ) -> None:
        self._polls = polls
        self.transport = transport
        self._keep_alive = keep_alive
        self._early = b""  # bytes of the next request, which arrived before this poll's answer
        self.device = device
        self.cohort = cohort
        self.ends = ends  # end of the wait for news, or for a request, in the loop's time

    def answer(self, answer: PollAnswer, closing: bool) -> None:
        if closing or not self._keep_alive:
            self.transport.write(answer.closing)
            self.transport.close()
            return
        self.transport.write(answer.staying)
        if self._early:
            self.transport.resume_reading()
            self._hand_over(self._early)

    @property
    def is_idle(self) -> bool:
        return self._polls.is_idle(self)

    @property
    def is_answered(self) -> bool:
        return True

    def abort(self) -> None:
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.is_idle:
            self._hand_over(data)
        else:
            self._early += data
            self.transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._polls.forget(self)

    def _hand_over(self, data: bytes) -> None:
        handler = self._polls.new_handler()
        self._polls.forget(self)
        self._polls.connections.add(handler, self.transport)
        self.transport.set_protocol(handler)
        handler.connection_made(self.transport)
        handler.data_received(data)


class Polls:
    """The polls of this process by cohort, and the connections between two polls.

    `new_handler` makes aiohttp's handler of a connection; `refused` counts polls answered at once for lack of room.
    """

    new_handler: Callable[[], HttpConnection]

    def __init__(self, connections: Connections) -> None:
        self.connections = connections
        self._parked: dict[str, set[Poll]] = {}
        self._idle: set[Poll] = set()
        self._closing = False
        self.refused = 0

    @property
    def parked(self) -> int:
        """The number of waiting polls."""
        return self.connections.parked.held

    def is_idle(self, poll: Poll) -> bool:
        return poll in self._idle

    def park(self, http: web.Request, device: str, cohort: str, wait_s: float) -> None:
        """Take the connection from aiohttp and end its task; return only if it has left or its share is used up."""
        handler, transport = http.protocol, http.transport
        if transport is None:
            return
        ends = asyncio.get_running_loop().time() + wait_s
        poll = Poll(self, transport, device, cohort, ends, http.keep_alive)
        if not self.connections.parked.hold(poll, device):
            self.refused += 1
            return
        self._parked.setdefault(cohort, set()).add(poll)
        transport.set_protocol(poll)
        handler.transport = None  # otherwise aiohttp would close it
        handler.connection_lost(None)
        raise asyncio.CancelledError

    def wake(self, cohort: str, generation: Generation, now: float) -> None:
        """Answer every poll of a cohort. `now`: unix seconds."""
        headers = _etag(generation) | _JSON
        self._end(
            self._parked.pop(cohort, ()), _answer(200, headers, msgspec.json.encode(Wake(cohort=cohort, now=now)))
        )

    def refuse(self, devices: Collection[str], error: CausewayError) -> None:
        """Answer the polls of these devices with an error."""
        refused = [poll for polls in self._parked.values() for poll in polls if poll.device in devices]
        for poll in refused:
            self._parked[poll.cohort].discard(poll)
        self._end(refused, _answer(error.status, error_headers(error) | _JSON, encode_error(error)))

    def end_old(self, generations: Mapping[str, Generation], now: float) -> None:
        """Answer polls whose time is over, and close idle connections. `now`: time of the event loop."""
        for cohort, polls in self._parked.items():
            if ended := [poll for poll in polls if poll.ends <= now]:
                polls.difference_update(ended)
                self._end(ended, _answer(304, _etag(generations.get(cohort, Generation())), b""))
        for poll in [poll for poll in self._idle if poll.ends <= now]:
            poll.transport.close()

    def close(self, generations: Mapping[str, Generation]) -> None:
        """Answer every poll and close every connection, because the server stops."""
        self._closing = True
        self.end_old(generations, float("inf"))

    def forget(self, poll: Poll) -> None:
        """Drop a poll whose connection is lost, or taken by another handler."""
        self._idle.discard(poll)
        self.connections.parked.release(poll)
        self.connections.forget(poll)
        self._parked.get(poll.cohort, set()).discard(poll)

    def _end(self, polls: Collection[Poll], answer: PollAnswer) -> None:
        self._idle.update(polls)
        ends = asyncio.get_running_loop().time() + IDLE_S
        for poll in polls:
            self.connections.parked.release(poll)
            self.connections.add(poll, poll.transport)
            poll.ends = ends
            poll.answer(answer, self._closing)


def _etag(generation: Generation) -> dict[str, str]:
    return {"ETag": generation.etag, "Cache-Control": "no-store"}


def _answer(status: int, headers: Mapping[str, str], body: bytes) -> PollAnswer:
    length = {"Content-Length": str(len(body))} if status != HTTPStatus.NOT_MODIFIED else {}
    lines = {**headers, **length, "Date": formatdate(usegmt=True)}
    head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n" + "".join(f"{key}: {lines[key]}\r\n" for key in lines)
    return PollAnswer(f"{head}\r\n".encode() + body, f"{head}Connection: close\r\n\r\n".encode() + body)


class Wakes:
    """Wakes parked polls: knows each cohort's generation, and the polls that wait for the next."""

    def __init__(self, store: Store, clock: Callable[[], float], connections: Connections) -> None:
        self._store = store
        self._clock = clock
        self._known: Mapping[str, Generation] = {}
        self._turn = anyio.Lock()
        self._away = False
        self.polls = Polls(connections)
        self.closing = False

    def current(self, cohort: str) -> Generation:
        """Return the last known generation of a cohort."""
        return self._known.get(cohort, _NOTHING)

    @property
    def revocations(self) -> Generation:
        """The last known generation of the revocations."""
        return self.current(REVOCATIONS)

    def pace(self, cohort: str) -> CohortPace:
        return self.current(cohort).pace

    async def refresh(self) -> None:
        """Read the generations now, and wake the polls of changed ones, as after `advance`. Raises StoreUnavailable."""
        async with self._turn:  # an older result must not replace a newer one
            async with self._store.read() as connection:
                known = await read_generations(connection)
                is_new = known.get(REVOCATIONS, _NOTHING).etag != self.revocations.etag
                revoked = await revoked_devices(connection) if is_new else frozenset()
            before, self._known = self._known, known
        for name, generation in known.items():
            if generation.etag != before.get(name, _NOTHING).etag:
                self.polls.wake(name, generation, self._clock())
        if revoked:
            self.polls.refuse(revoked, DeviceRevoked("This device was revoked. Enrol again with a new join token."))

    async def watch(self) -> None:
        """Refresh twice a second, until cancelled. While the database is unreachable, polls stay parked."""
        while True:
            try:
                await self.refresh()
                self._away = False
            except StoreUnavailable as error:
                if not self._away:
                    log.warning("%s", error.message)
                self._away = True
            self.polls.end_old(self._known, asyncio.get_running_loop().time())
            await anyio.sleep(CHECK_EVERY_S)

    def close(self) -> None:
        """Answer every parked poll, because the server stops."""
        self.closing = True
        self.polls.close(self._known)
