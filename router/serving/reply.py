"""Receivers of an answer: the interface of a reply to a client, and the buffer of an answer for several requests
(single flight). The buffer keeps all pieces for requests that join late. Beyond `buffer_bytes` memory stays bounded: no
request can join, pieces that every subscriber has read are dropped, and the producer waits for the slowest subscriber.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from ..errors import DeadlineExceeded
from ..openai.answer import CachedAnswer
from ..types import CacheStatus, Chunk, Embeddings, Route

Piece = Chunk | Embeddings
Head = TypeVar("Head", contravariant=True)
_PIECE_BYTES = 160  # a Chunk without its text; each logprob takes about as much
_FLOAT_BYTES = 32


class AnswerHead(msgspec.Struct, frozen=True):
    """The content of the ``x-causeway-*`` response headers. It is final when the first byte is sent."""

    id: str  # of the decision
    policy: str  # name@revision
    route: Route
    target: str
    model: str
    reason: str
    cache: CacheStatus
    cache_reason: str = ""  # why the cache was bypassed
    degraded: bool = False
    trimmed: str = ""  # number of messages that were left out to fit the context
    loosened: str = ""  # offered tools whose arguments are not constrained to their schemas
    variant: str = ""  # the target's variant that answered
    session: str = ""  # ``stayed; reason=…``, of a policy with `session`
    temperature: float | None = None  # of the target, for requests that set none; None: unknown
    modalities: str = ""  # ``audio=ok,image=timeout``: of the parts that the target got as text or soft tokens


class Reply(Protocol[Head]):
    """The receiver of an answer: `commit` once, then `send` for each piece. After `commit` no other target may answer.
    Both wait while the consumer is slow, and raise ClientGone when it has disconnected. `send` returns an awaitable, or
    None if the piece was taken at once, as nearly every token is.
    """

    async def commit(self, head: Head, /) -> None: ...

    def send(self, piece: Piece, /) -> Awaitable[None] | None: ...


class TextSink(Protocol):
    """Takes texts of one choice, in the place of the chunks that have nothing else."""

    def send(self, texts: Sequence[bytes], /) -> Awaitable[None] | None:
        """Take texts as `Reply.send` takes pieces. Each is a token and a JSON string."""
        ...


def text_sink_of(reply: object, index: int) -> TextSink | None:
    """Return what takes the texts of a choice that has begun, until another chunk of it; None: `send` does. A reply
    with a method `text_sink` may take text that is not decoded; it is looked up because `isinstance` of a Protocol
    takes 4 µs in Python 3.11.
    """
    text_sink: Callable[[int], TextSink | None] | None = getattr(reply, "text_sink", None)
    return None if text_sink is None else text_sink(index)


class ClientReply(Reply[Head], Protocol[Head]):
    """The reply to a client, over HTTP or gRPC, in a live session or as a job's result."""

    @property
    def finished(self) -> bool:
        """Whether a streaming client has every choice's finish reason, so that only `end` may follow, and no error."""
        ...

    async def end(self) -> None:
        """Complete the answer and send the rest of it."""
        ...


class ReplayingReply(ClientReply[AnswerHead], Protocol):
    """The reply to a client of a device, which also takes answers of the cache."""

    async def replay(self, head: AnswerHead, answer: CachedAnswer | Embeddings) -> None:
        """Take a complete answer from the cache, instead of `commit` and `send`."""
        ...


class GenerationRestarted(Exception):
    """The answer restarts from its beginning."""


class AnswerReader:
    """A request's position in a shared answer. `interruption`: an exception that its next read raises, once."""

    def __init__(self, *, joined: bool) -> None:
        self.joined = joined  # another request has started the generation
        self.position = 0  # of the next piece, counted from the first
        self.interruption: Exception | None = None


P = TypeVar("P", bound=Piece)
R = TypeVar("R", bound=AnswerReader)


class SharedAnswer(Generic[P, R]):
    """The buffered pieces of an answer, between its producer and its subscribers."""

    def __init__(self, buffer_bytes: int) -> None:
        self.subscribers: list[R] = []  # the longest waiting one first
        self.was_joined = False  # whether there has been a subscriber
        self.finished = False
        self.abandoned = False
        self.fault: Exception | None = None
        self._pieces: list[P] = []
        self._dropped = 0  # pieces before the first one in the buffer
        self.buffered_bytes = 0  # approximate size of the buffered pieces
        self._buffer_bytes = buffer_bytes
        self._waiting: set[asyncio.Future[None]] = set()

    @property
    def whole(self) -> bool:
        """Whether the buffer still holds every piece; otherwise the answer can be neither joined nor stored."""
        return self._dropped == 0 and self.buffered_bytes <= self._buffer_bytes

    @property
    def length(self) -> int:
        """The number of pieces so far, dropped ones included."""
        return self._dropped + len(self._pieces)

    def pieces(self, after: int = 0) -> tuple[P, ...]:
        """Return the pieces from number `after` on. The answer must be `whole`."""
        return tuple(self._pieces[after:])

    # --- the producer's side -----------------------------------------------------------------------------------------

    async def send(self, piece: P) -> None:
        """Append a piece, and wait until the buffer has room for another one."""
        self._pieces.append(piece)
        self.buffered_bytes += _size_bytes(piece)
        self._wake()
        while self.buffered_bytes > self._buffer_bytes and not self._trim():
            await self._change(None)

    def restart(self) -> None:
        """Drop the pieces so far, because the answer starts over."""
        self._pieces, self._dropped, self.buffered_bytes = [], 0, 0
        for subscriber in self.subscribers:
            subscriber.position, subscriber.interruption = 0, GenerationRestarted()
        self._wake()

    def finish(self, fault: Exception | None = None) -> None:
        """End the answer, which is complete unless there is a fault."""
        self.fault, self.finished = fault, True
        self._wake()

    def _trim(self) -> bool:
        """Drop the pieces that every subscriber has read. Returns False when the buffer is still too full."""
        slowest = min((subscriber.position for subscriber in self.subscribers), default=self.length)
        count = max(0, slowest - self._dropped)
        read, self._pieces = self._pieces[:count], self._pieces[count:]
        self._dropped += count
        self.buffered_bytes -= sum(map(_size_bytes, read))
        return self.buffered_bytes <= self._buffer_bytes

    # --- the subscribers' side ---------------------------------------------------------------------------------------

    def add(self, subscriber: R) -> R:
        """Add a subscriber and return it."""
        self.subscribers.append(subscriber)
        self.was_joined = True
        return subscriber

    def leave(self, subscriber: R) -> None:
        """Remove a subscriber, if it is still subscribed."""
        if subscriber in self.subscribers:
            self.subscribers.remove(subscriber)
        self._wake()

    async def read(self, subscriber: R, deadline: float) -> P | None:
        """Return the subscriber's next piece, None after the last. Raises its interruption, the answer's fault, or, at
        the deadline (monotonic, s), DeadlineExceeded.
        """
        while True:
            if subscriber.interruption is not None:
                interruption, subscriber.interruption = subscriber.interruption, None
                raise interruption
            at = subscriber.position - self._dropped
            if at < len(self._pieces):
                subscriber.position += 1
                if self.buffered_bytes > self._buffer_bytes:
                    self._wake()  # the producer may be waiting for this subscriber
                return self._pieces[at]
            if self.finished:
                if self.fault is not None:
                    raise self.fault
                return None
            await self._change(deadline, joined=subscriber.joined)

    async def _change(self, deadline: float | None, *, joined: bool = False) -> None:
        loop = asyncio.get_running_loop()
        change: asyncio.Future[None] = loop.create_future()
        self._waiting.add(change)
        timer = None if deadline is None else loop.call_at(deadline, _expire, change, joined)
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


def _expire(change: asyncio.Future[None], joined: bool) -> None:
    if not change.done():
        what = "while an identical request was being answered" if joined else "before the answer was complete"
        change.set_exception(DeadlineExceeded(f"The deadline passed {what}."))


def _size_bytes(piece: Piece) -> int:
    if isinstance(piece, Chunk):
        arguments = sum(len(call.arguments) for call in piece.tool_calls)
        return _PIECE_BYTES + len(piece.text) + len(piece.reasoning) + arguments + _PIECE_BYTES * len(piece.logprobs)
    return sum(_FLOAT_BYTES * len(vector) for vector in piece.vectors)
