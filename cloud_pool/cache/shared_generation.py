"""A generation on this gateway and its subscribers.

The answer may start over when its leader failed or died: the chunks so far are dropped, and each subscriber filters out
what it has already passed on. Greedy answers to the same request mostly begin alike. If the new answer does not begin
with the text that was sent, or if more than plain text was sent, the stream ends with an error, so that a client never
gets a mixture of two answers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import anyio
import msgspec

from causeway_server.router.errors import CausewayError, StreamBroken
from causeway_server.router.serving.reply import AnswerReader, SharedAnswer
from causeway_server.router.types import Chunk, Usage

from ..core.request_context import AnswerHead, RequestContext
from .store import GenerationKey

if TYPE_CHECKING:
    from ..observability.tracing import CacheOperation, Span, Trace


class SharingFailed(Exception):
    """Sharing has failed. Each subscriber must generate its own answer."""


class GenerationUsage:
    """The usage of a shared generation that one request is billed; others may continue the generation."""

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


class CoalescedSubscriber(AnswerReader):
    """A request that reads a shared generation. `usage`: the usage billed to it, if any."""

    def __init__(self, generation: CoalescedGeneration, context: RequestContext) -> None:
        super().__init__(joined=generation.was_joined)
        self.generation = generation
        self.context = context
        self.usage: GenerationUsage | None = None

    async def next(self) -> Chunk | None:
        """Return the next chunk, None after the last.

        Raises:
            GenerationRestarted: The answer starts over.
            SharingFailed: The caller must generate without sharing.
            CausewayError: The answer failed, or its deadline has passed.
        """
        return await self.generation.read(self, self.context.deadline)


class CoalescedGeneration(SharedAnswer[Chunk, CoalescedSubscriber]):
    """A generation that requests share. `cached_age_s`: age of a stored answer; None if not stored."""

    def __init__(self, key: GenerationKey, buffer_bytes: int) -> None:
        super().__init__(buffer_bytes)
        self.key = key
        self.head: AnswerHead | None = None
        self.cached_age_s: float | None = None
        self.on_leave: Callable[[], None] = lambda: None
        self.on_send: Callable[[], None] = lambda: None

    @property
    def joinable(self) -> bool:
        return self.whole and self.fault is None and not self.abandoned

    @property
    def _trace(self) -> Trace | None:
        """Return the trace of the subscriber that has waited longest."""
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

    async def send(self, piece: Chunk) -> None:
        self.on_send()
        await super().send(piece)

    def restart(self) -> None:
        self.head, self.cached_age_s = None, None
        super().restart()

    def abandon(self, scope: anyio.CancelScope) -> None:
        """Stop the work in `scope`, because there are no subscribers, and let no request join any more."""
        self.abandoned = True
        scope.cancel()

    def fail(self, subscriber: CoalescedSubscriber, error: CausewayError) -> None:
        """Record that the attempt billed to `subscriber` failed; only this subscriber gets the error."""
        subscriber.interruption = error
        super().leave(subscriber)

    # --- the subscribers' side ---------------------------------------------------------------------------------------

    def join(self, context: RequestContext) -> CoalescedSubscriber:
        return self.add(CoalescedSubscriber(self, context))

    def leave(self, subscriber: CoalescedSubscriber) -> None:
        super().leave(subscriber)
        if not self.subscribers:
            self.on_leave()


class EmittedPrefix:
    """The chunks that a client has already received, by choice."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}
        self._ended: set[int] = set()
        self._plain = True
        self._anything = False
        self._counted = False

    def add(self, chunk: Chunk) -> None:
        self._anything = True
        self._counted = self._counted or chunk.usage is not None
        if chunk.text:
            self._texts[chunk.index] = self._texts.get(chunk.index, "") + chunk.text
        if chunk.finish_reason is not None:
            self._ended.add(chunk.index)
        if chunk.tool_calls or chunk.logprobs or chunk.reasoning or chunk.refusal is not None:
            self._plain = False

    def resume(self) -> ResumeFilter | None:
        """Return a filter for the restarted answer; None if the client has received nothing. Raises StreamBroken."""
        if not self._anything:
            return None
        if not self._plain:
            raise _broken()
        return ResumeFilter(dict(self._texts), frozenset(self._ended), counted=self._counted)


class ResumeFilter:
    """Removes chunks that were sent before: `texts` by choice, the ends of `ended` choices, and the usage."""

    def __init__(self, texts: dict[int, str], ended: frozenset[int] = frozenset(), *, counted: bool = False) -> None:
        self._counted = counted
        self._left = texts
        self._ended = ended

    def filter(self, chunk: Chunk) -> Chunk | None:
        """Return the part of the chunk that is new; None if there is none. Raises StreamBroken."""
        if chunk.usage is not None:
            return None if self._counted else chunk
        left = self._left.get(chunk.index, "")
        if not left and chunk.index not in self._ended:
            return chunk
        common = min(len(left), len(chunk.text))
        other = chunk.tool_calls or chunk.logprobs or chunk.reasoning or chunk.refusal is not None
        if other or left[:common] != chunk.text[:common]:
            raise _broken()
        self._left[chunk.index] = left[common:]
        rest = msgspec.structs.replace(chunk, text=chunk.text[common:])
        if rest.finish_reason is not None and len(left) > common:
            raise _broken()
        if chunk.index in self._ended:
            if rest.text:
                raise _broken()
            return None
        return rest if rest.text or rest.finish_reason is not None else None


def _broken() -> StreamBroken:
    return StreamBroken(
        "The gateway that generated the answer died, and the answer cannot be continued. Send the request again.",
        phase="stream",
    )
