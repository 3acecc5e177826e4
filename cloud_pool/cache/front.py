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

from ..call import Call, Head, Piece
from ..traced import OUTCOME
from .answer import Kept, Make
from .flight import Again, Alone, Flight, Listener
from .follow import Follow
from .lead import Lead
from .reply import FirstToken, Reply
from .resume import Resume, Said
from .rules import cached
from .shared import SharedCache
from .store import Away, Held, Leader, Lease, Slot

_ROUNDS = 3
_GOODBYE_S = 2.0
_FOUND: Mapping[type, str] = {Kept: "hit", Lease: "lead", Leader: "follow", Held: "crowded"}
"""What a trace says of a lookup."""
_log = logging.getLogger("causeway.cloud.cache")


class Front:
    """`cache` None: everything goes straight through. `make` is the service."""

    def __init__(self, cache: SharedCache | None, make: Make) -> None:
        self._cache = cache
        self._make = make
        self._tasks: TaskGroup | None = None
        self._flights: dict[Slot, Flight] = {}
        self._leads: dict[Slot, Lead] = {}
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

    def reply(self, call: Call, first_token: FirstToken = lambda _: None) -> tuple[Reply, AsyncGenerator[Piece, None]]:
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

    async def _straight(self, reply: Reply, call: Call, resume: Resume | None = None) -> AsyncGenerator[Chunk, None]:
        reply.alone(said=resume is not None)
        async with aclosing(self._make(call)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Head):
                    if resume is None:
                        reply.begun(piece)
                    continue
                reply.heard(piece)
                new = piece if resume is None else resume.take(piece)
                if new is not None:
                    yield new

    # --- one request's side ------------------------------------------------------------------------------------------

    async def _shared(self, cache: SharedCache, reply: Reply, call: Call, slot: Slot) -> AsyncGenerator[Chunk, None]:
        said = Said()
        with self._joined(cache, call, slot) as listener:
            reply.shared(listener)
            try:
                async with aclosing(_listened(listener, reply, said, streams=call.request.stream)) as chunks:
                    async for chunk in chunks:
                        yield chunk
                return
            except Alone:
                pass
        async with aclosing(self._straight(reply, call, said.resume())) as chunks:
            async for chunk in chunks:
                yield chunk

    @contextmanager
    def _joined(self, cache: SharedCache, call: Call, slot: Slot) -> Iterator[Listener]:
        """Raises Draining."""
        if self._tasks is None:
            raise Draining("this gateway has not started")
        flight = self._flights.get(slot)
        if flight is None or not flight.joinable:
            flight = self._flights[slot] = Flight(slot, cache.config.buffer_bytes)
            listener = flight.join(call)
            self._flying += 1
            self._tasks.start_soon(self._fly, cache, flight)
        else:
            if call.trace is not None and flight.listeners and (other := flight.listeners[0].call.trace) is not None:
                call.trace.joined(other)
            listener = flight.join(call)
        try:
            yield listener
        finally:
            flight.leave(listener)

    # --- the flight's side -------------------------------------------------------------------------------------------

    async def _fly(self, cache: SharedCache, flight: Flight) -> None:
        fault: Draining | Alone = Draining("this gateway is shutting down", retry_after_s=1.0)
        try:
            with anyio.CancelScope() as scope:
                for at in range(_ROUNDS):
                    if at:
                        flight.restart()
                    flight.on_leave = lambda: flight.abandon(scope)
                    await self._round(cache, flight)
                    if flight.landed or not flight.listeners:
                        return
            fault = Alone()
        except Exception as error:
            _log.error("an answer could not be shared: %s", type(error).__name__)
            fault = Alone()
        finally:
            if self._flights.get(flight.slot) is flight:
                del self._flights[flight.slot]
            if not flight.landed:
                flight.land(fault)
            self._flying -= 1
            self._landed.set()

    async def _round(self, cache: SharedCache, flight: Flight) -> None:
        """Afterwards the flight has landed, or what it followed or led has failed."""
        found = await self._look_up(cache, flight)
        if found is None:
            return await self._lead(cache, flight, None)
        if isinstance(found, Kept):
            flight.head, flight.kept_s = found.head, found.age_s
            for chunk in found.chunks:
                await flight.send(chunk)
            return flight.land()
        if isinstance(found, Leader):
            return await self._follow(cache, flight, found)
        if isinstance(found, Held):
            cache.metrics.fault("crowded")
            return await self._lead(cache, flight, None)
        if found.took_over:
            cache.metrics.fault("took_over")
        return await self._lead(cache, flight, found)

    async def _look_up(self, cache: SharedCache, flight: Flight) -> Kept | Lease | Leader | Held | None:
        """None: Redis is away."""
        step, outcome = flight.traced("lookup"), "away"
        try:
            # Whoever leaves now must not leave a lease behind that nobody knows of.
            with anyio.CancelScope(shield=True):
                found = await cache.store.enter(flight.slot, may_follow=self._following < cache.config.follows)
            outcome = _FOUND[type(found)]
            return found
        except Away:
            return None
        finally:
            if step is not None:
                step.end(said={OUTCOME: outcome})

    async def _follow(self, cache: SharedCache, flight: Flight, leader: Leader) -> None:
        self._following += 1
        step = flight.traced("follow")
        try:
            await Follow(cache.store, cache.metrics, flight, leader, poll_s=cache.config.lease_s / 3).run()
        finally:
            self._following -= 1
            if step is not None:
                step.end(said={OUTCOME: "whole" if flight.landed else "broken"})

    async def _lead(self, cache: SharedCache, flight: Flight, lease: Lease | None) -> None:
        lead = Lead(cache.store, cache.codec, cache.metrics, self._make, flight, lease, lease_s=cache.config.lease_s)
        self._leads[flight.slot] = lead
        try:
            await lead.run()
        finally:
            if self._leads.get(flight.slot) is lead:
                del self._leads[flight.slot]

    def _told(self, slot: Slot) -> None:
        lead = self._leads.get(slot)
        if lead is not None:
            lead.wanted()


async def _listened(listener: Listener, reply: Reply, said: Said, *, streams: bool) -> AsyncGenerator[Chunk, None]:
    """What a flight says, once. A whole answer is held back until it is whole: it can start over unseen."""
    held: list[Chunk] = []
    resume: Resume | None = None
    while True:
        try:
            chunk = await listener.next()
        except Again:
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


def _slot(key: str, call: Call) -> Slot:
    """The urgent wait for none who are less so, and who takes a tier's whole answer or none for none who take less."""
    return Slot(key, f"{call.priority}.stays" if call.stays else call.priority)


def _cached(chunk: Chunk) -> Chunk:
    assert chunk.usage is not None
    return msgspec.structs.replace(chunk, usage=cached(chunk.usage))
