"""One generation on this gateway and its subscribers.

The answer may restart when its leader failed or died: `epoch` rises, the chunks so far are dropped, and each subscriber
filters out what it has already passed on (resume). Chunks are buffered for requests that join late. Beyond
`buffer_bytes` no request may join any more, chunks that every subscriber has are dropped, and the producer waits for
the slowest subscriber: memory is bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import anyio

from router.errors import CausewayError, DeadlineExceeded
from router.types import Chunk, Usage

from ...core.request_context import AnswerHead, RequestContext
from ...observability.tracing import CacheOperation, Span, Trace
from ..store import GenerationKey

_CHUNK_BYTES = 160  # of a chunk without its text; about as much for each logprob


class SharingFailed(Exception):
    """Sharing did not help: each subscriber generates for itself."""


class GenerationRestarted(Exception):
    """The answer restarts from its beginning."""


class GenerationUsage:
    """The usage of a generation that is billed to one request, which it may outlast for other subscribers."""

    def __init__(self) -> None:
        self.total = Usage()
        self.ended = False
        self._tokens = 0
        self._listeners: list[Callable[[Usage], None]] = []

    def count(self, chunk: Chunk) -> None:
        self._tokens += chunk.tokens
        usage = chunk.usage or self.total
        self.total = Usage(usage.prompt_tokens, usage.completion_tokens or self._tokens, usage.cached_tokens)

    def end(self) -> None:
        if not self.ended:
            self.ended = True
            for listener in self._listeners:
                listener(self.total)

    def on_end(self, listener: Callable[[Usage], None]) -> None:
        """Call `listener` with the total, now or at the end."""
        if self.ended:
            listener(self.total)
        else:
            self._listeners.append(listener)


class CoalescedSubscriber:
    """One request at a generation. `usage`: what is billed to it, if anything; `error`: concerns it alone."""

    def __init__(self, generation: CoalescedGeneration, context: RequestContext) -> None:
        self.generation = generation
        self.context = context
        self.joined = generation.was_joined  # another request has started the generation
        self.epoch = generation.epoch
        self.position = 0  # of the next chunk, counted from the first
        self.usage: GenerationUsage | None = None
        self.error: CausewayError | None = None

    async def next(self) -> Chunk | None:
        """Return the next chunk, None after the last.

        Raises:
            GenerationRestarted: the answer starts over.
            SharingFailed: generate without sharing.
            CausewayError: the answer's error, or DeadlineExceeded.
        """
        return await self.generation.read(self)


class CoalescedGeneration:
    """`cached_age_s`: the age of a stored answer; None while an answer is generated."""

    def __init__(self, key: GenerationKey, buffer_bytes: int) -> None:
        self.key = key
        self.head: AnswerHead | None = None
        self.cached_age_s: float | None = None
        self.epoch = 0
        self.finished = False
        self.abandoned = False
        self.fault: CausewayError | SharingFailed | None = None
        self.was_joined = False  # its first subscriber is, or was, there
        self.subscribers: list[CoalescedSubscriber] = []  # the one that has waited longest first
        self.on_leave: Callable[[], None] = lambda: None
        self.on_send: Callable[[], None] = lambda: None
        self._chunks: list[Chunk] = []
        self._dropped = 0  # chunks before the first one that is still here
        self._bytes = 0
        self._buffer_bytes = buffer_bytes
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def whole(self) -> bool:
        """Whether all chunks so far are buffered: otherwise the answer can be neither joined nor stored."""
        return self._dropped == 0 and self._bytes <= self._buffer_bytes

    @property
    def joinable(self) -> bool:
        return self.whole and self.fault is None and not self.abandoned

    @property
    def length(self) -> int:
        """The number of chunks so far, dropped ones included."""
        return self._dropped + len(self._chunks)

    @property
    def buffered_bytes(self) -> int:
        return self._bytes

    def chunks(self, after: int = 0) -> tuple[Chunk, ...]:
        """Return the chunks from number `after` on; only of a generation that is `whole`."""
        return tuple(self._chunks[after:])

    @property
    def _trace(self) -> Trace | None:
        """The trace of the subscriber that has waited longest."""
        return self.subscribers[0].context.trace if self.subscribers else None

    def start_span(self, operation: CacheOperation) -> Span | None:
        """Start a span in the trace of the subscriber that has waited longest; None if it is not traced."""
        trace = self._trace
        return None if trace is None else trace.cache(operation)

    def link_traces(self, context: RequestContext) -> None:
        """Link the trace of a request that is about to join to the trace that holds the generation's spans."""
        if context.trace is not None and (other := self._trace) is not None:
            context.trace.add_link(other)

    # --- the producer's side -----------------------------------------------------------------------------------------

    async def send(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self._bytes += _size(chunk)
        self._wake()
        self.on_send()
        while self._bytes > self._buffer_bytes and not self._trim():
            await self._change(None)

    def restart(self) -> None:
        """Drop the chunks so far: the answer starts over."""
        self.epoch += 1
        self.head, self.cached_age_s = None, None
        self._chunks, self._dropped, self._bytes = [], 0, 0
        self._wake()

    def finish(self, fault: CausewayError | SharingFailed | None = None) -> None:
        """End the generation; without a fault the answer is complete."""
        self.fault, self.finished = fault, True
        self._wake()

    def abandon(self, scope: anyio.CancelScope) -> None:
        """Stop the work in `scope`: there is no subscriber, and none may join any more."""
        self.abandoned = True
        scope.cancel()

    def fail(self, subscriber: CoalescedSubscriber, error: CausewayError) -> None:
        """The attempt that was billed to `subscriber` failed: only it gets the error."""
        subscriber.error = error
        if subscriber in self.subscribers:
            self.subscribers.remove(subscriber)
        self._wake()

    def _trim(self) -> bool:
        """Drop the chunks that every subscriber has; False if the buffer is still too full."""
        # A subscriber that has not noticed the restart yet has none of the chunks.
        positions = [subscriber.position if subscriber.epoch == self.epoch else 0 for subscriber in self.subscribers]
        slowest = min(positions, default=self.length)
        count = max(0, slowest - self._dropped)
        dropped, self._chunks = self._chunks[:count], self._chunks[count:]
        self._dropped += count
        self._bytes -= sum(map(_size, dropped))
        return self._bytes <= self._buffer_bytes

    # --- the subscribers' side ---------------------------------------------------------------------------------------

    def join(self, context: RequestContext) -> CoalescedSubscriber:
        subscriber = CoalescedSubscriber(self, context)
        self.subscribers.append(subscriber)
        self.was_joined = True
        return subscriber

    def leave(self, subscriber: CoalescedSubscriber) -> None:
        if subscriber in self.subscribers:
            self.subscribers.remove(subscriber)
        self._wake()
        if not self.subscribers:
            self.on_leave()

    async def read(self, subscriber: CoalescedSubscriber) -> Chunk | None:
        while True:
            if subscriber.error is not None:
                raise subscriber.error
            if subscriber.epoch != self.epoch:
                subscriber.epoch, subscriber.position = self.epoch, 0
                raise GenerationRestarted
            index = subscriber.position - self._dropped
            if index < len(self._chunks):
                subscriber.position += 1
                if self._bytes > self._buffer_bytes:
                    self._wake()  # the producer may be waiting for this very subscriber
                return self._chunks[index]
            if self.finished:
                if self.fault is not None:
                    raise self.fault
                return None
            await self._change(subscriber.context.deadline, joined=subscriber.joined)

    async def _change(self, deadline: float | None, *, joined: bool = False) -> None:
        loop = asyncio.get_running_loop()
        change: asyncio.Future[None] = loop.create_future()
        self._waiters.add(change)
        timer = None if deadline is None else loop.call_at(deadline, _expire, change, joined)
        try:
            await change
        finally:
            self._waiters.discard(change)
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        for change in self._waiters:
            if not change.done():
                change.set_result(None)
        self._waiters.clear()


def _expire(change: asyncio.Future[None], joined: bool) -> None:
    if not change.done():
        what = "while an identical request was being answered" if joined else "before the answer was complete"
        change.set_exception(DeadlineExceeded(f"the deadline passed {what}"))


def _size(chunk: Chunk) -> int:
    calls = sum(len(call.arguments) for call in chunk.tool_calls)
    return _CHUNK_BYTES + len(chunk.text) + len(chunk.reasoning) + calls + _CHUNK_BYTES * len(chunk.logprobs)
