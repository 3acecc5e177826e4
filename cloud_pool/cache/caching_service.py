"""The cache in front of the service: each reply comes from the cache, from a generation in progress, or is generated.

1. The request must not use the cache, or there is none: the service answers.               bypass
2. An identical request is in progress on this gateway: subscribe to its generation.        coalesced
3. Otherwise start a generation with one call to Redis: there is a stored answer.           hit
4.                                                      another gateway leads: follow it.   coalesced
5.                                                      no gateway leads, or Redis is
                                                        unavailable: generate the answer.   miss
6. The leader failed or died: (3) again for the remaining subscribers, `_ROUNDS` times, then each generates for itself.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from typing import Literal

import anyio
import msgspec
from anyio.abc import TaskGroup

from causeway_server.router.errors import Draining
from causeway_server.router.serving.reply import GenerationRestarted
from causeway_server.router.tool_calls.schema import with_own_ids
from causeway_server.router.types import Chunk, Usage

from ..core.request_context import AnswerHead, CachedAnswer, Generate, Piece, RequestContext
from .leader import GenerationFollower, GenerationLeader
from .shared_cache import SharedCache, cached_usage
from .shared_generation import (
    CoalescedGeneration,
    CoalescedSubscriber,
    EmittedPrefix,
    GenerationUsage,
    ResumeFilter,
    SharingFailed,
)
from .store import CacheStatus, FollowLimitReached, GenerationKey, LeaderLease, RedisUnavailable, RemoteLeader

STATUS_HEADER = "x-causeway-cache"
OnFirstToken = Callable[[str], None]
"""Called at the first token with the answering tier."""


class Billing:
    """The source of one request's answer, its head, and the part billed to it; final from the first chunk on."""

    def __init__(self, on_first_token: OnFirstToken, status: CacheStatus | Literal[""] = "bypass") -> None:
        self.status: CacheStatus | Literal[""] = status  # "": there is no cache
        self._on_first_token = on_first_token
        self._subscriber: CoalescedSubscriber | None = None
        self._detached = True
        self._head = AnswerHead()

    @property
    def billable(self) -> bool:
        """Return whether tokens were generated that are billed to this request."""
        return self._head.stale_s is None and (self._detached or self.usage is not None)

    @property
    def usage(self) -> GenerationUsage | None:
        """Usage of a shared generation that is billed to this request, which it may outlast."""
        return None if self._subscriber is None else self._subscriber.usage

    @property
    def goes_on(self) -> bool:
        """Return whether this request's generation continues for others, although it has left."""
        if self._detached or self._subscriber is None:
            return False
        return bool(self._subscriber.generation.subscribers)

    @property
    def head(self) -> AnswerHead:
        """Head of the answer with the cache's headers."""
        generation = None if self._detached or self._subscriber is None else self._subscriber.generation
        age_s = self._head.stale_s if generation is None or generation.cached_age_s is None else generation.cached_age_s
        age = () if age_s is None else (("age", str(int(age_s))),)
        return msgspec.structs.replace(self._head, headers=(*self._head.headers, (STATUS_HEADER, self.status), *age))

    def billed(self, reported: Usage) -> Usage:
        """Return the usage so far that is billed to this request. `reported`: usage that the answer itself reported."""
        usage = self.usage if self.billable else None
        return Usage() if not self.billable else reported if usage is None else usage.total

    def settle(self, reported: Usage, on_usage: Callable[[Usage], None]) -> bool:
        """Call `on_usage` exactly once with the usage billed to this request; `reported`: the answer's own.

        Returns False if that happens later: at the end of a generation that continues for other subscribers.
        """
        usage = self.usage if self.billable else None
        if usage is not None and not usage.ended:
            usage.on_end(on_usage)
            return False
        on_usage(self.billed(reported))
        return True

    def joined(self, subscriber: CoalescedSubscriber) -> None:
        """Record that the request subscribed to a generation, perhaps to its own."""
        self._subscriber, self._detached, self.status = subscriber, False, "miss"

    def detached(self, *, resumed: bool) -> None:
        """Record that the request is answered alone (sharing failed or is forbidden). `resumed`: in mid-answer."""
        self._detached = True
        if self._subscriber is not None and not resumed:
            self.status = "miss"

    def on_head(self, head: AnswerHead) -> None:
        self._head = head
        if head.stale_s is not None:
            self.status = "stale"

    def on_chunk(self, chunk: Chunk) -> None:
        """Record a chunk that has arrived. The client may not have received it yet."""
        if self._subscriber is not None and not self._detached:
            generation = self._subscriber.generation
            self.status = "miss" if self.usage else "coalesced" if generation.cached_age_s is None else "hit"
            self.on_head(generation.head or AnswerHead())
        if chunk.tokens and self.billable:
            self._on_first_token(self._head.model)


_ROUNDS = 3
_SHUTDOWN_S = 2.0
_LOOKUP_OUTCOMES: Mapping[type, str] = {
    CachedAnswer: "hit",
    LeaderLease: "lead",
    RemoteLeader: "follow",
    FollowLimitReached: "follow_limit",
}
"""Names of the outcomes of a look-up in traces."""
log = logging.getLogger(__name__)


class CachingService:
    """Answers requests from the cache or the service, and owns this gateway's generations. `cache` None: no cache."""

    def __init__(self, cache: SharedCache | None, generate: Generate) -> None:
        self._cache = cache
        self._generate = generate
        self._tasks: TaskGroup | None = None
        self.generations: dict[GenerationKey, CoalescedGeneration] = {}
        self.leaders: dict[GenerationKey, GenerationLeader] = {}
        self.following = 0  # leaders on other gateways that this one follows now
        self._running = 0
        self._generation_ended = anyio.Event()

    def is_plain(self, service: object) -> bool:
        """Return whether each answer is just what this service's `answer` yields."""
        return self._cache is None and getattr(self._generate, "__self__", None) is service

    def start(self, tasks: TaskGroup) -> None:
        """Make `tasks` the parent of all generations from now on."""
        self._tasks = tasks
        if self._cache is not None:
            tasks.start_soon(self._cache.store.watch_wakeups, self._wake_leader)

    async def close(self) -> None:
        """Wait until the leaders have released their leases, then disconnect. Cancel the tasks before."""
        if self._cache is None:
            return
        with anyio.move_on_after(_SHUTDOWN_S):
            while self._running:
                self._generation_ended = anyio.Event()
                await self._generation_ended.wait()
        await self._cache.store.close()

    def reply(
        self, context: RequestContext, on_first_token: OnFirstToken = lambda _: None
    ) -> tuple[Billing, AsyncGenerator[Piece, None]]:
        """Return the billing of an answer, and a generator of its pieces.

        The generator raises CausewayError; closing it ends only this request's part in the answer. `on_first_token` is
        called with the tier, possibly more than once, when a token billed to this request arrives.
        """
        cache = self._cache
        if cache is None:
            return Billing(on_first_token, ""), self._generate(context)
        billing = Billing(on_first_token)
        is_pinned = context.session is not None and bool(context.session.pinned)
        cache_key = None if is_pinned else cache.key(context.request, context.tenant)
        key = None if cache_key is None else _generation_key(cache_key, context)
        return billing, self._pieces(cache, billing, context, key)

    # --- one request -------------------------------------------------------------------------------------------------

    async def _pieces(
        self, cache: SharedCache, billing: Billing, context: RequestContext, key: GenerationKey | None
    ) -> AsyncGenerator[Piece, None]:
        """Yield a request's pieces, in one generator, as each is resumed per token. `key`: None if it is not shared."""
        client_pieces, emitted = _OwnPieces(billing, context.id), EmittedPrefix()
        try:
            if key is not None:
                with self._subscription(cache, context, key) as subscriber, suppress(SharingFailed):
                    billing.joined(subscriber)
                    reader = _SharedReader(subscriber, billing, emitted, streams=context.request.stream)
                    while (chunk := await reader.next()) is not None:
                        for piece in client_pieces.of(chunk):
                            yield piece
                    return
            resume = None if key is None else emitted.resume()
            billing.detached(resumed=resume is not None)
            async with aclosing(self._generate(context)) as pieces:
                async for generated in pieces:
                    if isinstance(generated, AnswerHead):
                        if resume is None:
                            billing.on_head(generated)
                        continue
                    billing.on_chunk(generated)
                    new = generated if resume is None else resume.filter(generated)
                    for piece in () if new is None else client_pieces.of(new):
                        yield piece
        finally:
            cache.metrics.answered(billing.status or "bypass")

    @contextmanager
    def _subscription(
        self, cache: SharedCache, context: RequestContext, key: GenerationKey
    ) -> Iterator[CoalescedSubscriber]:
        """Subscribe to the generation of `key`. Raises Draining."""
        if self._tasks is None:
            raise Draining("This gateway has not started.")
        generation = self.generations.get(key)
        if generation is None or not generation.joinable:
            generation = self.generations[key] = CoalescedGeneration(key, cache.config.max_buffer_bytes)
            subscriber = generation.join(context)
            self._running += 1
            self._tasks.start_soon(self._run_generation, cache, generation)
        else:
            generation.link_traces(context)
            subscriber = generation.join(context)
        try:
            yield subscriber
        finally:
            generation.leave(subscriber)

    # --- one generation ----------------------------------------------------------------------------------------------

    async def _run_generation(self, cache: SharedCache, generation: CoalescedGeneration) -> None:
        fault: Draining | SharingFailed = Draining("This gateway is shutting down.", retry_after_s=1.0)
        try:
            with anyio.CancelScope() as scope:
                for number in range(_ROUNDS):
                    if number:
                        generation.restart()
                    generation.on_leave = lambda: generation.abandon(scope)
                    await self._run_round(cache, generation)
                    if generation.finished or not generation.subscribers:
                        return
            fault = SharingFailed()
        except Exception as error:
            log.error(
                "An answer could not be sent to other clients with an identical request: %s", type(error).__name__
            )
            fault = SharingFailed()
        finally:
            if self.generations.get(generation.key) is generation:
                del self.generations[generation.key]
            if not generation.finished:
                generation.finish(fault)
            self._running -= 1
            self._generation_ended.set()

    async def _run_round(self, cache: SharedCache, generation: CoalescedGeneration) -> None:
        """Run one round; afterwards the generation is finished, or its leader (local or remote) has failed."""
        result = await self._look_up(cache, generation)
        if result is None:
            return await self._lead(cache, generation, None)
        if isinstance(result, CachedAnswer):
            generation.head, generation.cached_age_s = result.head, result.age_s
            for chunk in result.chunks:
                await generation.send(chunk)
            return generation.finish()
        if isinstance(result, RemoteLeader):
            return await self._follow(cache, generation, result)
        if isinstance(result, FollowLimitReached):
            cache.metrics.fault("follow_limit")
            return await self._lead(cache, generation, None)
        if result.took_over:
            cache.metrics.fault("leader_takeover")
        return await self._lead(cache, generation, result)

    async def _look_up(
        self, cache: SharedCache, generation: CoalescedGeneration
    ) -> CachedAnswer | LeaderLease | RemoteLeader | FollowLimitReached | None:
        """Look up the answer; return None if Redis is unavailable."""
        span, outcome = generation.start_span("lookup"), "redis_unavailable"
        may_follow = self.following < cache.config.max_followed
        try:
            # Shielded: a request that leaves now must not leave a lease behind that this gateway does not know of.
            with anyio.CancelScope(shield=True):
                result = await cache.store.join_or_lead(generation.key, may_follow=may_follow)
            outcome = _LOOKUP_OUTCOMES[type(result)]
            return result
        except RedisUnavailable:
            return None
        finally:
            if span is not None:
                span.end(outcome=outcome)

    async def _follow(self, cache: SharedCache, generation: CoalescedGeneration, leader: RemoteLeader) -> None:
        self.following += 1
        span = generation.start_span("follow")
        try:
            await GenerationFollower(cache, generation, leader).run()
        finally:
            self.following -= 1
            if span is not None:
                span.end(outcome="whole" if generation.finished else "broken")

    async def _lead(self, cache: SharedCache, generation: CoalescedGeneration, lease: LeaderLease | None) -> None:
        leader = self.leaders[generation.key] = GenerationLeader(cache, self._generate, generation, lease)
        try:
            await leader.run()
        finally:
            if self.leaders.get(generation.key) is leader:
                del self.leaders[generation.key]

    def _wake_leader(self, key: GenerationKey) -> None:
        leader = self.leaders.get(key)
        if leader is not None:
            leader.on_remote_follower()


class _SharedReader:
    """The reader of a shared generation for one client. Without streaming it holds chunks back until the end."""

    def __init__(
        self, subscriber: CoalescedSubscriber, billing: Billing, emitted: EmittedPrefix, *, streams: bool
    ) -> None:
        self._subscriber = subscriber
        self._billing = billing
        self._emitted = emitted
        self._streams = streams
        self._resume: ResumeFilter | None = None
        self._held: deque[Chunk] = deque()
        self._over = False

    async def next(self) -> Chunk | None:
        """Return the next chunk for the client; None after the last. Raises like `CoalescedSubscriber.next`."""
        while not self._over:
            try:
                chunk = await self._subscriber.next()
            except GenerationRestarted:
                self._held.clear()
                self._resume = self._emitted.resume()
                continue
            if chunk is None:
                self._over = True
                break
            if self._resume is None:
                self._billing.on_chunk(chunk)
            new = chunk if self._resume is None else self._resume.filter(chunk)
            if new is None:
                continue
            if self._streams:
                self._emitted.add(new)
                return new
            self._held.append(new)
        return self._held.popleft() if self._held else None


class _OwnPieces:
    """Converts shared pieces for a client: chunks with its own ids, and the head before the first one."""

    def __init__(self, billing: Billing, request_id: str) -> None:
        self._billing = billing
        self._request_id = request_id
        self._has_head = False

    def of(self, chunk: Chunk) -> tuple[Piece, ...]:
        own_chunk = with_own_ids(chunk, self._request_id)
        if chunk.usage is not None and not self._billing.billable:
            own_chunk = msgspec.structs.replace(own_chunk, usage=cached_usage(chunk.usage))
        if self._has_head:
            return (own_chunk,)
        self._has_head = True
        return (self._billing.head, own_chunk)


def _generation_key(cache_key: str, context: RequestContext) -> GenerationKey:
    """Return the key under which requests share a generation.

    They share within a priority, critical ones apart, and, as a fallback may answer, between callers of the same tiers.
    """
    rank = f"{context.priority}.critical" if context.critical else context.priority
    if context.allowed_tiers is not None:
        names = "\0".join(sorted(context.allowed_tiers)).encode()
        rank += f".{hashlib.blake2b(names, digest_size=8).hexdigest()}"
    return GenerationKey(cache_key, rank)
