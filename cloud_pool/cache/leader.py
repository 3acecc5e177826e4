"""Generate an answer as its leader, and read one that the leader on another gateway generates."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import aclosing, suppress

import anyio

from router.errors import CausewayError, DeadlineExceeded, Draining, InvalidRequest
from router.types import Request

from ..core.request_context import AnswerHead, Generate, RequestContext
from .entry_codec import CorruptEntry, pack_batch, unpack_batch
from .shared_cache import SharedCache
from .shared_generation import CoalescedGeneration, CoalescedSubscriber, GenerationUsage
from .store import LeaderLease, RedisUnavailable, RemoteLeader, StreamEntry

_log = logging.getLogger("causeway.cloud.cache")
_RELEASE_S = 1.0  # to end the lease, also while this gateway stops


class GenerationLeader:
    """One attempt at an answer, billed to the subscriber that has waited longest.

    1. It succeeds: the generation is finished and the answer stored.
    2. The question is at fault (InvalidRequest): every subscriber gets the error.
    3. It fails otherwise: only the billed subscriber gets the error, the others may try again.
    4. The last subscriber leaves: the attempt goes on while another gateway waits, otherwise it stops.
    """

    def __init__(
        self, cache: SharedCache, generate: Generate, generation: CoalescedGeneration, lease: LeaderLease | None
    ) -> None:
        self._cache = cache
        self._store = cache.store
        self._generate = generate
        self._generation = generation
        self._lease = lease
        self._interval_s = cache.config.lease_s / 3
        self._wakeup = anyio.Event()
        self.has_remote_followers = False  # whether another gateway has asked for this answer
        self._published = 0  # chunks

    def on_remote_follower(self) -> None:
        """Another gateway waits for this answer: publish from now on."""
        if not self.has_remote_followers:
            self.has_remote_followers = True
            self._generation.on_send = self._wake
            self._wake()

    async def run(self) -> None:
        """Afterwards the generation is finished, or the other subscribers may try again. Raises no CausewayError."""
        error: CausewayError | None = Draining("this gateway is shutting down", retry_after_s=1.0)
        if not self._generation.subscribers:  # they left during the call to Redis
            with anyio.move_on_after(_RELEASE_S, shield=True):
                return await self._end_lease(error)
        billed = self._generation.subscribers[0]
        usage = billed.usage = GenerationUsage()
        self._generation.on_leave = self._wake
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._maintain, tasks.cancel_scope)
                error = await self._run(billed, usage)
                tasks.cancel_scope.cancel()
        finally:
            usage.end()
            self._generation.on_send = self._generation.on_leave = lambda: None
            self._conclude(billed, error)
            with anyio.move_on_after(_RELEASE_S, shield=True):
                await self._end_lease(error, billed.context)

    async def _run(self, billed: CoalescedSubscriber, usage: GenerationUsage) -> CausewayError | None:
        context = billed.context
        try:
            with anyio.fail_after(max(0.0, context.deadline - anyio.current_time())):
                async with aclosing(self._generate(context)) as pieces:
                    async for piece in pieces:
                        if isinstance(piece, AnswerHead):
                            self._generation.head = piece
                            continue
                        usage.count(piece)
                        await self._generation.send(piece)
        except CausewayError as error:
            return error
        except TimeoutError:
            return DeadlineExceeded("the deadline passed while the answer was being generated")
        except Exception as error:
            _log.error("an answer failed unexpectedly: %s", type(error).__name__)
            return CausewayError("The gateway failed.")
        return None

    def _conclude(self, billed: CoalescedSubscriber, error: CausewayError | None) -> None:
        if error is None:
            self._generation.finish()  # (1)
        elif isinstance(error, InvalidRequest):
            self._generation.finish(error)  # (2)
        else:
            self._generation.fail(billed, error)  # (3), (4)

    async def _end_lease(self, error: CausewayError | None, context: RequestContext | None = None) -> None:
        """End the lease, with the answer if there is one. `context`: of the billed request; None: there was none."""
        lease, self._lease = self._lease, None
        if lease is None:
            return
        with suppress(RedisUnavailable):  # the lease expires
            if error is not None or context is None or not self._generation.whole:
                await self._store.release(lease)
                return
            trace = context.trace
            span, outcome = None if trace is None else trace.cache("keep"), "redis_unavailable"
            try:
                outcome = await self._store_answer(lease, context.request)
            finally:
                if span is not None:
                    span.end(outcome=outcome)

    async def _store_answer(self, lease: LeaderLease, request: Request) -> str:
        """Return the outcome for the trace. Raises RedisUnavailable."""
        head, chunks = self._generation.head or AnswerHead(), self._generation.pieces()
        value = self._cache.codec.pack(lease.key.cache_key, head, request, chunks) if head.keep else None
        if value is None:
            self._cache.metrics.fault("not_stored")
        rest = self._unpublished() if self.has_remote_followers else b""
        if not await self._store.finish(lease, value or b"", rest):
            self._cache.metrics.fault("lost_lease")
            return "lost_lease"
        return "not_stored" if value is None else "kept"

    # --- beside the generation ---------------------------------------------------------------------------------------

    def _wake(self) -> None:
        self._wakeup.set()

    async def _maintain(self, scope: anyio.CancelScope) -> None:
        """Renew the lease, publish to other gateways, and stop the generation when no request wants it any more."""
        while True:
            with anyio.move_on_after(self._interval_s) as interval:
                await self._wakeup.wait()
            self._wakeup = anyio.Event()
            if not self._generation.subscribers and not await self._is_wanted_elsewhere():
                if not self._generation.subscribers:  # none came during the call to Redis
                    self._generation.abandon(scope)
                    return
                continue
            if self._lease is not None:
                await self._update_lease(self._lease, due=interval.cancelled_caught)

    async def _is_wanted_elsewhere(self) -> bool:
        lease = self._lease
        if lease is None:
            return False
        with suppress(RedisUnavailable):
            if await self._store.release_if_unwanted(lease):
                self.on_remote_follower()
                return True
        self._lease = None
        return False

    async def _update_lease(self, lease: LeaderLease, *, due: bool) -> None:
        if not self._generation.whole:  # too long to be shared
            self._lease = None
            with suppress(RedisUnavailable):
                await self._store.release(lease)
            return
        try:
            if self.has_remote_followers and self._published < self._generation.length:
                interest = await self._publish(lease)
            elif due:
                interest = await self._store.renew(lease)
            else:
                return
        except RedisUnavailable:
            return  # the next interval tries again: the lease outlives two of them
        if interest is None:
            self._cache.metrics.fault("lost_lease")
            self._lease = None
        elif interest:
            self.on_remote_follower()

    async def _publish(self, lease: LeaderLease) -> bool | None:
        length = self._generation.length
        interest = await self._store.publish(lease, self._unpublished())
        self._published = length
        return interest

    def _unpublished(self) -> bytes:
        """The chunks that may not have arrived: a call that timed out may have arrived all the same."""
        first = self._published
        return pack_batch(first, None if first else self._generation.head, self._generation.pieces(first))


class GenerationFollower:
    """Copies one remote leader's chunks into the local generation."""

    def __init__(self, cache: SharedCache, generation: CoalescedGeneration, leader: RemoteLeader) -> None:
        self._cache = cache
        self._store = cache.store
        self._generation = generation
        self._leader = leader
        self._poll_s = cache.config.lease_s / 3
        self._last = b"0"

    async def run(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Return when the generation is finished, or when this leader will publish nothing more."""
        announced_at = clock()
        try:
            while True:
                if await self._consume(await self._store.read(self._leader, self._last, self._poll_s)):
                    return
                if clock() - announced_at < self._poll_s:
                    continue
                announced_at = clock()
                if not await self._store.announce_interest(self._leader):
                    # Its last entries may have come between the two calls.
                    await self._consume(await self._store.read(self._leader, self._last, 0.0))
                    return
        except RedisUnavailable:
            return
        except CorruptEntry:
            self._cache.metrics.fault("corrupt")

    async def _consume(self, entries: list[StreamEntry]) -> bool:
        """Return whether the leader has ended. Raises CorruptEntry."""
        for entry in entries:
            self._last = entry.id
            if entry.kind not in (b"chunks", b"end"):
                return True  # failed, or wake: look the answer up again
            head, chunks = unpack_batch(entry.data, self._generation.length)
            self._generation.head = self._generation.head or head
            for chunk in chunks:
                await self._generation.send(chunk)
            if entry.kind == b"end":
                self._generation.finish()
                return True
        return False
