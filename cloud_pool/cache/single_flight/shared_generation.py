"""One answer in the making on this gateway, and those who listen to it.

The answer may start over, when who made it failed or died: `epoch` rises, what was said is dropped, and each listener
sees to what it has passed on already (resume). Pieces are kept for whoever joins late. Past `buffer_bytes` nobody may
join any more, pieces that everybody has are dropped, and the maker waits for the slowest listener: memory is bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import anyio

from router.errors import CausewayError, DeadlineExceeded
from router.types import Chunk, Usage

from ...observability.tracing import CacheStep, Step
from ...serving.request_context import AnswerHead, RequestContext
from ..store import GenerationKey

_CHUNK_BYTES = 160  # without its text; about as much per logprob


class SharingFailed(Exception):
    """Sharing did not help: each listener asks for itself."""


class GenerationRestarted(Exception):
    """The answer starts over."""


class GenerationUsage:
    """What one request had made, and pays for: it may outlast the request where others listen."""

    def __init__(self) -> None:
        self.usage = Usage()
        self.over = False
        self._made = 0
        self._told: list[Callable[[Usage], None]] = []

    def count(self, chunk: Chunk) -> None:
        self._made += chunk.tokens
        said = chunk.usage or self.usage
        self.usage = Usage(said.prompt_tokens, said.completion_tokens or self._made, said.cached_tokens)

    def end(self) -> None:
        if not self.over:
            self.over = True
            for told in self._told:
                told(self.usage)

    def when_over(self, told: Callable[[Usage], None]) -> None:
        if self.over:
            told(self.usage)
        else:
            self._told.append(told)


class Subscriber:
    """One request's place. `work` is what was made on its account; `error` is its own, nobody else's."""

    def __init__(self, generation: SharedGeneration, call: RequestContext) -> None:
        self.generation = generation
        self.call = call
        self.epoch = generation.epoch
        self.position = 0  # of the next chunk, counted from the first
        self.work: GenerationUsage | None = None
        self.error: CausewayError | None = None

    async def next(self) -> Chunk | None:
        """The next chunk, None after the last. Raises the answer's error, DeadlineExceeded, Again or Alone."""
        return await self.generation.read(self)


class SharedGeneration:
    """`kept_s`: the age of an answer that was found and is not being made."""

    def __init__(self, slot: GenerationKey, buffer_bytes: int) -> None:
        self.slot = slot
        self.head: AnswerHead | None = None
        self.kept_s: float | None = None
        self.epoch = 0
        self.finished = False
        self.abandoned = False
        self.fault: CausewayError | SharingFailed | None = None
        self.listeners: list[Subscriber] = []  # the one that has waited longest first
        self.on_leave: Callable[[], None] = lambda: None
        self.on_send: Callable[[], None] = lambda: None
        self._chunks: list[Chunk] = []
        self._dropped = 0  # chunks before the first one that is still here
        self._bytes = 0
        self._buffer_bytes = buffer_bytes
        self._waiting: set[asyncio.Future[None]] = set()

    @property
    def whole(self) -> bool:
        """Whether every chunk so far is still here: else it can be neither joined nor kept."""
        return self._dropped == 0 and self._bytes <= self._buffer_bytes

    @property
    def joinable(self) -> bool:
        return self.whole and self.fault is None and not self.abandoned

    @property
    def length(self) -> int:
        """Chunks so far."""
        return self._dropped + len(self._chunks)

    def chunks(self, after: int = 0) -> tuple[Chunk, ...]:
        """From number `after`; only of a flight that is whole."""
        return tuple(self._chunks[after:])

    def traced(self, step: CacheStep) -> Step | None:
        """In the trace of who has waited longest; None where that is not traced."""
        trace = self.listeners[0].call.trace if self.listeners else None
        return None if trace is None else trace.cache(step)

    # --- the maker's side --------------------------------------------------------------------------------------------

    async def send(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self._bytes += _size(chunk)
        self._wake()
        self.on_send()
        while self._bytes > self._buffer_bytes and not self._trim():
            await self._change(None)

    def restart(self) -> None:
        """What was said so far is void."""
        self.epoch += 1
        self.head, self.kept_s = None, None
        self._chunks, self._dropped, self._bytes = [], 0, 0
        self._wake()

    def finish(self, fault: CausewayError | SharingFailed | None = None) -> None:
        """It is over; without a fault the answer is complete."""
        self.fault, self.finished = fault, True
        self._wake()

    def abandon(self, scope: anyio.CancelScope) -> None:
        """Nobody listens, and the work in `scope` ends: nobody may join it any more."""
        self.abandoned = True
        scope.cancel()

    def fail(self, subscriber: Subscriber, error: CausewayError) -> None:
        """The answer broke for `listener`, on whose account it was made."""
        subscriber.error = error
        if subscriber in self.listeners:
            self.listeners.remove(subscriber)
        self._wake()

    def _trim(self) -> bool:
        """Drop what every listener has; False when the buffer is still too full."""
        # Who has not noticed yet that the answer starts over has none of it.
        positions = [subscriber.position if subscriber.epoch == self.epoch else 0 for subscriber in self.listeners]
        slowest = min(positions, default=self.length)
        count = max(0, slowest - self._dropped)
        gone, self._chunks = self._chunks[:count], self._chunks[count:]
        self._dropped += count
        self._bytes -= sum(map(_size, gone))
        return self._bytes <= self._buffer_bytes

    # --- the listeners' side -----------------------------------------------------------------------------------------

    def join(self, call: RequestContext) -> Subscriber:
        subscriber = Subscriber(self, call)
        self.listeners.append(subscriber)
        return subscriber

    def leave(self, subscriber: Subscriber) -> None:
        if subscriber in self.listeners:
            self.listeners.remove(subscriber)
        self._wake()
        if not self.listeners:
            self.on_leave()

    async def read(self, subscriber: Subscriber) -> Chunk | None:
        while True:
            if subscriber.error is not None:
                raise subscriber.error
            if subscriber.epoch != self.epoch:
                subscriber.epoch, subscriber.position = self.epoch, 0
                raise GenerationRestarted
            at = subscriber.position - self._dropped
            if at < len(self._chunks):
                subscriber.position += 1
                if self._bytes > self._buffer_bytes:
                    self._wake()  # the maker may be waiting for this very listener
                return self._chunks[at]
            if self.finished:
                if self.fault is not None:
                    raise self.fault
                return None
            await self._change(subscriber.call.deadline)

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


def _expire(change: asyncio.Future[None]) -> None:
    if not change.done():
        change.set_exception(DeadlineExceeded("the deadline passed while an identical request was being answered"))


def _size(chunk: Chunk) -> int:
    calls = sum(len(call.arguments) for call in chunk.tool_calls)
    return _CHUNK_BYTES + len(chunk.text) + calls + _CHUNK_BYTES * len(chunk.logprobs)
