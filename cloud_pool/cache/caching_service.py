"""In front of the service: one reply for each request, from the cache, from somebody else's answer, or made.

1. kept out of the cache (or there is none): straight from the service                    bypass
2. somebody here asks the same already: listen to that flight                             coalesced
3. one call to Redis for a new flight: an answer                                          hit
4.                                     another gateway makes it: follow                   coalesced
5.                                     nobody does, or Redis is away: make it             miss
6. who made it failed or died: (3) again for those who still listen, `_ROUNDS` times, then each for itself
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager

import anyio
import msgspec
from anyio.abc import TaskGroup

from router.errors import Draining
from router.types import Chunk

from ..observability.tracing import OUTCOME
from ..serving.request_context import AnswerHead, CachedAnswer, Generate, Piece, RequestContext
from .rules import cached
from .shared_cache import SharedCache
from .single_flight.follower import GenerationFollower
from .single_flight.leader import GenerationLeader
from .single_flight.reply import FirstToken, Reply
from .single_flight.resume import EmittedPrefix, ResumeFilter
from .single_flight.shared_generation import GenerationRestarted, SharedGeneration, SharingFailed, Subscriber
from .store import FollowLimitReached, GenerationKey, LeaderLease, RedisUnavailable, RemoteLeader

_ROUNDS = 3
_GOODBYE_S = 2.0
_FOUND: Mapping[type, str] = {
    CachedAnswer: "hit",
    LeaderLease: "lead",
    RemoteLeader: "follow",
    FollowLimitReached: "follow_limit",
}
"""What a trace says of a lookup."""
_log = logging.getLogger("causeway.cloud.cache")


class CachingService:
    """`cache` None: everything goes straight through. `make` is the service."""

    def __init__(self, cache: SharedCache | None, make: Generate) -> None:
        self._cache = cache
        self._make = make
        self._tasks: TaskGroup | None = None
        self._flights: dict[GenerationKey, SharedGeneration] = {}
        self._leads: dict[GenerationKey, GenerationLeader] = {}
        self._following = 0
        self._flying = 0
        self._landed = anyio.Event()

    def start(self, tasks: TaskGroup) -> None:
        """`tasks` is the parent of all answers in the making from now on."""
        self._tasks = tasks
        if self._cache is not None:
            tasks.start_soon(self._cache.store.listen, self._told)

    async def close(self) -> None:
        """After the tasks were cancelled: what is in the making gives its leases back."""
        if self._cache is None:
            return
        with anyio.move_on_after(_GOODBYE_S):
            while self._flying:
                self._landed = anyio.Event()
                await self._landed.wait()
        await self._cache.store.close()

    def reply(
        self, call: RequestContext, first_token: FirstToken = lambda _: None
    ) -> tuple[Reply, AsyncGenerator[Piece, None]]:
        """The reply, and its Head and chunks. They raise CausewayError; closing them leaves the answer to the others.

        `first_token` is told the tier, more than once, when a token is here that was made on this request's account.
        """
        cache = self._cache
        if cache is None:
            return Reply(first_token, ""), self._make(call)
        reply = Reply(first_token)
        key = cache.key(call.request, call.tenant)
        chunks = self._straight(reply, call) if key is None else self._shared(cache, reply, call, _slot(key, call))
        return reply, self._headed(cache, reply, chunks)

    async def _headed(
        self, cache: SharedCache, reply: Reply, chunks: AsyncGenerator[Chunk, None]
    ) -> AsyncGenerator[Piece, None]:
        headed = False
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    if not headed:
                        headed = True
                        yield reply.head
                    yield chunk if reply.paid or chunk.usage is None else _cached(chunk)
        finally:
            cache.metrics.answered(reply.status or "bypass")

    async def _straight(
        self, reply: Reply, call: RequestContext, resume: ResumeFilter | None = None
    ) -> AsyncGenerator[Chunk, None]:
        reply.alone(said=resume is not None)
        async with aclosing(self._make(call)) as pieces:
            async for piece in pieces:
                if isinstance(piece, AnswerHead):
                    if resume is None:
                        reply.begun(piece)
                    continue
                reply.heard(piece)
                new = piece if resume is None else resume.take(piece)
                if new is not None:
                    yield new

    # --- one request's side ------------------------------------------------------------------------------------------

    async def _shared(
        self, cache: SharedCache, reply: Reply, call: RequestContext, slot: GenerationKey
    ) -> AsyncGenerator[Chunk, None]:
        said = EmittedPrefix()
        with self._joined(cache, call, slot) as subscriber:
            reply.shared(subscriber)
            try:
                async with aclosing(_listened(subscriber, reply, said, streams=call.request.stream)) as chunks:
                    async for chunk in chunks:
                        yield chunk
                return
            except SharingFailed:
                pass
        async with aclosing(self._straight(reply, call, said.resume())) as chunks:
            async for chunk in chunks:
                yield chunk

    @contextmanager
    def _joined(self, cache: SharedCache, call: RequestContext, slot: GenerationKey) -> Iterator[Subscriber]:
        """Raises Draining."""
        if self._tasks is None:
            raise Draining("this gateway has not started")
        generation = self._flights.get(slot)
        if generation is None or not generation.joinable:
            generation = self._flights[slot] = SharedGeneration(slot, cache.config.max_buffer_bytes)
            subscriber = generation.join(call)
            self._flying += 1
            self._tasks.start_soon(self._fly, cache, generation)
        else:
            if (
                call.trace is not None
                and generation.listeners
                and (other := generation.listeners[0].call.trace) is not None
            ):
                call.trace.joined(other)
            subscriber = generation.join(call)
        try:
            yield subscriber
        finally:
            generation.leave(subscriber)

    # --- the flight's side -------------------------------------------------------------------------------------------

    async def _fly(self, cache: SharedCache, generation: SharedGeneration) -> None:
        fault: Draining | SharingFailed = Draining("this gateway is shutting down", retry_after_s=1.0)
        try:
            with anyio.CancelScope() as scope:
                for at in range(_ROUNDS):
                    if at:
                        generation.restart()
                    generation.on_leave = lambda: generation.abandon(scope)
                    await self._round(cache, generation)
                    if generation.finished or not generation.listeners:
                        return
            fault = SharingFailed()
        except Exception as error:
            _log.error("an answer could not be shared: %s", type(error).__name__)
            fault = SharingFailed()
        finally:
            if self._flights.get(generation.slot) is generation:
                del self._flights[generation.slot]
            if not generation.finished:
                generation.finish(fault)
            self._flying -= 1
            self._landed.set()

    async def _round(self, cache: SharedCache, generation: SharedGeneration) -> None:
        """Afterwards the flight has landed, or what it followed or led has failed."""
        found = await self._look_up(cache, generation)
        if found is None:
            return await self._lead(cache, generation, None)
        if isinstance(found, CachedAnswer):
            generation.head, generation.kept_s = found.head, found.age_s
            for chunk in found.chunks:
                await generation.send(chunk)
            return generation.finish()
        if isinstance(found, RemoteLeader):
            return await self._follow(cache, generation, found)
        if isinstance(found, FollowLimitReached):
            cache.metrics.fault("follow_limit")
            return await self._lead(cache, generation, None)
        if found.took_over:
            cache.metrics.fault("leader_takeover")
        return await self._lead(cache, generation, found)

    async def _look_up(
        self, cache: SharedCache, generation: SharedGeneration
    ) -> CachedAnswer | LeaderLease | RemoteLeader | FollowLimitReached | None:
        """None: Redis is away."""
        step, outcome = generation.traced("lookup"), "redis_unavailable"
        try:
            # Whoever leaves now must not leave a lease behind that nobody knows of.
            with anyio.CancelScope(shield=True):
                found = await cache.store.enter(generation.slot, may_follow=self._following < cache.config.max_followed)
            outcome = _FOUND[type(found)]
            return found
        except RedisUnavailable:
            return None
        finally:
            if step is not None:
                step.end(said={OUTCOME: outcome})

    async def _follow(self, cache: SharedCache, generation: SharedGeneration, leader: RemoteLeader) -> None:
        self._following += 1
        step = generation.traced("follow")
        try:
            await GenerationFollower(
                cache.store, cache.metrics, generation, leader, poll_s=cache.config.lease_s / 3
            ).run()
        finally:
            self._following -= 1
            if step is not None:
                step.end(said={OUTCOME: "whole" if generation.finished else "broken"})

    async def _lead(self, cache: SharedCache, generation: SharedGeneration, lease: LeaderLease | None) -> None:
        lead = GenerationLeader(
            cache.store, cache.codec, cache.metrics, self._make, generation, lease, lease_s=cache.config.lease_s
        )
        self._leads[generation.slot] = lead
        try:
            await lead.run()
        finally:
            if self._leads.get(generation.slot) is lead:
                del self._leads[generation.slot]

    def _told(self, slot: GenerationKey) -> None:
        lead = self._leads.get(slot)
        if lead is not None:
            lead.wanted()


async def _listened(
    subscriber: Subscriber, reply: Reply, said: EmittedPrefix, *, streams: bool
) -> AsyncGenerator[Chunk, None]:
    """What a flight says, once. A whole answer is held back until it is whole: it can start over unseen."""
    held: list[Chunk] = []
    resume: ResumeFilter | None = None
    while True:
        try:
            chunk = await subscriber.next()
        except GenerationRestarted:
            held.clear()
            resume = said.resume()
            continue
        if chunk is None:
            break
        if resume is None:
            reply.heard(chunk)
        new = chunk if resume is None else resume.take(chunk)
        if new is None:
            continue
        if streams:
            said.note(new)
            yield new
        else:
            held.append(new)
    for chunk in held:
        yield chunk


def _slot(key: str, call: RequestContext) -> GenerationKey:
    """The urgent wait for none who are less so, and who takes a tier's whole answer or none for none who take less."""
    return GenerationKey(key, f"{call.priority}.critical" if call.critical else call.priority)


def _cached(chunk: Chunk) -> Chunk:
    assert chunk.usage is not None
    return msgspec.structs.replace(chunk, usage=cached(chunk.usage))
