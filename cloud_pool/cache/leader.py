"""The leader, which generates an answer, and the follower of a leader on another gateway."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import aclosing, suppress

import anyio
import msgspec

from causeway_server.router.errors import CausewayError, DeadlineExceeded, Draining, InvalidRequest

from ..core.request_context import AnswerHead, Generate, RequestContext
from ..core.subject import marks_of
from .entry_codec import CorruptEntry, pack_batch, unpack_batch
from .shared_cache import SharedCache
from .shared_generation import CoalescedGeneration, CoalescedSubscriber, GenerationUsage
from .store import LeaderLease, RedisUnavailable, RemoteLeader, StreamEntry

log = logging.getLogger(__name__)
_RELEASE_S = 1.0  # to end the lease, also while this gateway stops


class GenerationLeader(msgspec.Struct):
    """Makes one attempt at an answer, which is billed to the subscriber that has waited longest.

    1. It succeeds: the generation is finished and the answer stored.
    2. The request is invalid (InvalidRequest): every subscriber gets the error.
    3. It fails otherwise: only the billed subscriber gets the error, the others may try again.
    4. The last subscriber leaves: the attempt continues while another gateway waits, otherwise it stops.
    """

    cache: SharedCache
    generate: Generate
    generation: CoalescedGeneration
    lease: LeaderLease | None
    has_remote_followers: bool = False  # whether another gateway has asked for this answer
    published: int = 0  # number of published chunks
    wakeup: anyio.Event = msgspec.field(default_factory=anyio.Event)

    def on_remote_follower(self) -> None:
        """Publish chunks from now on: another gateway waits for this answer."""
        if not self.has_remote_followers:
            self.has_remote_followers = True
            self.generation.on_send = self._wake
            self._wake()

    async def run(self) -> None:
        """Generate the answer, so that it is finished or other subscribers may try again. Raises no CausewayError."""
        error: CausewayError | None = Draining("This gateway is shutting down.", retry_after_s=1.0)
        if not self.generation.subscribers:  # they left during the call to Redis
            with anyio.move_on_after(_RELEASE_S, shield=True):
                return await self._end_lease(error)
        billed = self.generation.subscribers[0]
        usage = billed.usage = GenerationUsage()
        self.generation.on_leave = self._wake
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._maintain, tasks.cancel_scope)
                error = await self._run(billed, usage)
                tasks.cancel_scope.cancel()
        finally:
            usage.end()
            self.generation.on_send = self.generation.on_leave = lambda: None
            self._conclude(billed, error)
            with anyio.move_on_after(_RELEASE_S, shield=True):
                await self._end_lease(error, billed.context)

    async def _run(self, billed: CoalescedSubscriber, usage: GenerationUsage) -> CausewayError | None:
        context = billed.context
        try:
            with anyio.fail_after(max(0.0, context.deadline - anyio.current_time())):
                async with aclosing(self.generate(context)) as pieces:
                    async for piece in pieces:
                        if isinstance(piece, AnswerHead):
                            self.generation.head = piece
                            continue
                        usage.count(piece)
                        await self.generation.send(piece)
        except CausewayError as error:
            return error
        except TimeoutError:
            return DeadlineExceeded("The deadline passed while the answer was being generated.")
        except Exception as error:
            log.error("The generation of an answer failed unexpectedly: %s", type(error).__name__)
            return CausewayError("The gateway failed.")
        return None

    def _conclude(self, billed: CoalescedSubscriber, error: CausewayError | None) -> None:
        if error is None:
            self.generation.finish()  # (1)
        elif isinstance(error, InvalidRequest):
            self.generation.finish(error)  # (2)
        else:
            self.generation.fail(billed, error)  # (3), (4)

    async def _end_lease(self, error: CausewayError | None, context: RequestContext | None = None) -> None:
        """End the lease and store the answer, if there is one. `context`: of the billed request; None for none."""
        lease, self.lease = self.lease, None
        if lease is None:
            return
        with suppress(RedisUnavailable):  # the lease expires
            if error is not None or context is None or not self.generation.whole:
                await self.cache.store.release(lease)
                return
            trace = context.trace
            span, outcome = None if trace is None else trace.cache("keep"), "redis_unavailable"
            try:
                outcome = await self._store_answer(lease, context)
            finally:
                if span is not None:
                    span.end(outcome=outcome)

    async def _store_answer(self, lease: LeaderLease, context: RequestContext) -> str:
        """Store the answer and return the outcome for the trace. Raises RedisUnavailable."""
        head, chunks, request = self.generation.head or AnswerHead(), self.generation.pieces(), context.request
        value = self.cache.codec.pack(lease.key.cache_key, head, request, chunks) if head.keep else None
        if value is None:
            self.cache.metrics.fault("not_stored")
        rest = self._unpublished() if self.has_remote_followers else b""
        marks = marks_of(context.tenant, request.hints.client, request.user)
        if not await self.cache.store.finish(lease, value or b"", rest, marks):
            self.cache.metrics.fault("lost_lease")
            return "lost_lease"
        return "not_stored" if value is None else "kept"

    # --- beside the generation ---------------------------------------------------------------------------------------

    def _wake(self) -> None:
        self.wakeup.set()

    async def _maintain(self, scope: anyio.CancelScope) -> None:
        """Renew the lease, publish to other gateways, and stop the generation when no request needs it any more."""
        while True:
            with anyio.move_on_after(self.cache.config.lease_s / 3) as interval:
                await self.wakeup.wait()
            self.wakeup = anyio.Event()
            if not self.generation.subscribers and not await self._is_wanted_elsewhere():
                if not self.generation.subscribers:  # none came during the call to Redis
                    self.generation.abandon(scope)
                    return
                continue
            if self.lease is not None:
                await self._update_lease(self.lease, due=interval.cancelled_caught)

    async def _is_wanted_elsewhere(self) -> bool:
        lease = self.lease
        if lease is None:
            return False
        with suppress(RedisUnavailable):
            if await self.cache.store.release_if_unwanted(lease):
                self.on_remote_follower()
                return True
        self.lease = None
        return False

    async def _update_lease(self, lease: LeaderLease, *, due: bool) -> None:
        if not self.generation.whole:  # too long to be shared
            self.lease = None
            with suppress(RedisUnavailable):
                await self.cache.store.release(lease)
            return
        try:
            if self.has_remote_followers and self.published < self.generation.length:
                interest = await self._publish(lease)
            elif due:
                interest = await self.cache.store.renew(lease)
            else:
                return
        except RedisUnavailable:
            return  # the next interval tries again: the lease outlives two of them
        if interest is None:
            self.cache.metrics.fault("lost_lease")
            self.lease = None
        elif interest:
            self.on_remote_follower()

    async def _publish(self, lease: LeaderLease) -> bool | None:
        length = self.generation.length
        interest = await self.cache.store.publish(lease, self._unpublished())
        self.published = length
        return interest

    def _unpublished(self) -> bytes:
        """Return the chunks that may not have arrived. A call that timed out may still have delivered its chunks."""
        first = self.published
        return pack_batch(first, None if first else self.generation.head, self.generation.pieces(first))


class GenerationFollower(msgspec.Struct):
    """Follows a remote leader: copies its chunks into the local generation."""

    cache: SharedCache
    generation: CoalescedGeneration
    leader: RemoteLeader
    last: bytes = b"0"  # id of the last entry that was read

    async def run(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Follow until the generation is finished, or this leader will publish no more chunks."""
        announced_at, poll_s = clock(), self.cache.config.lease_s / 3
        try:
            while True:
                if await self._consume(await self.cache.store.read(self.leader, self.last, poll_s)):
                    return
                if clock() - announced_at < poll_s:
                    continue
                announced_at = clock()
                if not await self.cache.store.announce_interest(self.leader):
                    # Its last entries may have come between the two calls.
                    await self._consume(await self.cache.store.read(self.leader, self.last, 0.0))
                    return
        except RedisUnavailable:
            return
        except CorruptEntry:
            self.cache.metrics.fault("corrupt")

    async def _consume(self, entries: list[StreamEntry]) -> bool:
        """Process entries, and return whether the leader has ended. Raises CorruptEntry."""
        for entry in entries:
            self.last = entry.id
            if entry.kind not in (b"chunks", b"end"):
                return True  # failed, or wake: look the answer up again
            head, chunks = unpack_batch(entry.data, self.generation.length)
            self.generation.head = self.generation.head or head
            for chunk in chunks:
                await self.generation.send(chunk)
            if entry.kind == b"end":
                self.generation.finish()
                return True
        return False
