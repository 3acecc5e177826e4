"""Identical requests in flight share one answer.

The work belongs to the flight and not to whoever asked first: it runs in a task of its own, every listener (the first
one too) replays the pieces as they come, and the work is cancelled when the last listener leaves.

A flight keeps its pieces for whoever joins late. Past `buffer_bytes` nobody may join any more, pieces that everybody
has are dropped, and the work waits for the slowest listener: memory is bounded by the buffer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import anyio
import anyio.abc

from router.errors import CausewayError, DeadlineExceeded, Draining
from router.types import Chunk

from .attempts import where
from .generation import Generation
from .reply import AnswerHead, Piece

log = logging.getLogger(__name__)

BUFFER_BYTES = 1 << 20
_PIECE_BYTES = 160  # a Chunk without its text; about as much per logprob
_FLOAT_BYTES = 32

Run = Callable[["SharedGeneration"], Awaitable[None]]


class Subscriber:
    """One reader's place in a flight."""

    def __init__(self, flight: SharedGeneration) -> None:
        self.flight = flight
        self.position = 0  # of the next piece, counted from the first

    async def next(self, deadline: float) -> Piece | None:
        """The next piece, None after the last. Raises the work's error, or DeadlineExceeded for this reader alone."""
        return await self.flight.read(self, deadline)


class SharedGeneration:
    """One running answer. It is the `Reply` of the work, and what listeners read."""

    def __init__(self, work: Generation, buffer_bytes: int = BUFFER_BYTES) -> None:
        self.work = work
        self.head: AnswerHead | None = None
        self.error: CausewayError | None = None
        self.finished = False
        self.abandoned = False
        self.scope = anyio.CancelScope()
        self._pieces: list[Piece] = []
        self._dropped = 0  # pieces before the first one that is still here
        self._bytes = 0
        self._buffer_bytes = buffer_bytes
        self._listeners: set[Subscriber] = set()
        self._waiting: set[asyncio.Future[None]] = set()

    @property
    def listeners(self) -> int:
        return len(self._listeners)

    @property
    def whole(self) -> bool:
        """Whether every piece so far is still here: else it can be neither joined nor cached."""
        return self._dropped == 0 and self._bytes <= self._buffer_bytes

    @property
    def joinable(self) -> bool:
        return self.whole and not self.finished and not self.abandoned

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return tuple(self._pieces)

    # --- the work's side ---------------------------------------------------------------------------------------------

    async def commit(self, head: AnswerHead) -> None:
        self.head = head

    async def send(self, piece: Piece) -> None:
        self._pieces.append(piece)
        self._bytes += _size(piece)
        self._wake()
        while self._bytes > self._buffer_bytes and not self._trim():
            await self._change(None)

    def finish(self, error: CausewayError | None) -> None:
        """The work is over; `error` None: the answer is complete."""
        self.error = error
        self.finished = True
        self._wake()

    def _trim(self) -> bool:
        """Drop what every listener has; False when the buffer is still too full."""
        slowest = min((listener.position for listener in self._listeners), default=self._dropped)
        count = slowest - self._dropped
        gone, self._pieces = self._pieces[:count], self._pieces[count:]
        self._dropped = slowest
        self._bytes -= sum(map(_size, gone))
        return self._bytes <= self._buffer_bytes

    # --- the listeners' side -----------------------------------------------------------------------------------------

    def join(self) -> Subscriber:
        listener = Subscriber(self)
        self._listeners.add(listener)
        return listener

    def leave(self, listener: Subscriber) -> None:
        self._listeners.discard(listener)
        if not self._listeners:
            self.abandoned = True
            self.scope.cancel()
        self._wake()

    async def read(self, listener: Subscriber, deadline: float) -> Piece | None:
        while True:
            at = listener.position - self._dropped
            if at < len(self._pieces):
                listener.position += 1
                if self._bytes > self._buffer_bytes:
                    self._wake()  # the work may be waiting for this very listener
                return self._pieces[at]
            if self.finished:
                if self.error is not None:
                    raise self.error
                return None
            await self._change(deadline)

    async def _change(self, deadline: float | None) -> None:
        loop = asyncio.get_running_loop()
        change: asyncio.Future[None] = loop.create_future()
        self._waiting.add(change)
        timer = None if deadline is None else loop.call_at(deadline, _expire, change)
        try:
            await change
        finally:
            self._waiting.discard(change)
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        for change in self._waiting:
            if not change.done():
                change.set_result(None)
        self._waiting.clear()


class SharedGenerations:
    """The flights in the air, by key."""

    def __init__(self) -> None:
        self._tasks: anyio.abc.TaskGroup | None = None
        self._flights: dict[bytes, SharedGeneration] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def run(self, tasks: anyio.abc.TaskGroup) -> None:
        """`tasks` is the parent of the work from now on."""
        self._tasks = tasks

    @contextmanager
    def join(self, key: bytes, work: Generation, run: Run) -> Iterator[tuple[Subscriber, bool]]:
        """A place in the flight of `key`, and whether it had to be started. The last one to leave ends its work.

        `run` does the work of a new flight; what it raises is what the listeners get.
        """
        if self._tasks is None:
            raise Draining("this server has not started")
        flight = self._flights.get(key)
        started = flight is None or not flight.joinable
        if flight is None or started:
            flight = self._flights[key] = SharedGeneration(work)
            self._tasks.start_soon(self._fly, key, flight, run)
        listener = flight.join()
        try:
            yield listener, started
        finally:
            flight.leave(listener)

    async def _fly(self, key: bytes, flight: SharedGeneration, run: Run) -> None:
        error: CausewayError | None = Draining("this server stopped while the answer was being made")
        try:
            with flight.scope:
                error = await _outcome(flight, run)
        finally:
            if self._flights.get(key) is flight:
                del self._flights[key]
            flight.finish(error)


async def _outcome(flight: SharedGeneration, run: Run) -> CausewayError | None:
    try:
        await run(flight)
    except CausewayError as error:
        return error
    except Exception as error:
        log.error("an answer failed unexpectedly: %s", where(error))
        return CausewayError("internal error")
    return None


def _expire(change: asyncio.Future[None]) -> None:
    if not change.done():
        change.set_exception(DeadlineExceeded("the deadline passed while an identical request was being answered"))


def _size(piece: Piece) -> int:
    if isinstance(piece, Chunk):
        calls = sum(len(call.arguments) for call in piece.tool_calls)
        return _PIECE_BYTES + len(piece.text) + calls + _PIECE_BYTES * len(piece.logprobs)
    return sum(_FLOAT_BYTES * len(vector) for vector in piece.vectors)
