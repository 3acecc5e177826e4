"""Making an answer, under a lease where Redis gave one, and telling other gateways about it once they ask."""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from contextlib import aclosing

import anyio

from router.errors import CausewayError, DeadlineExceeded, Draining, InvalidRequest

from ...observability.tracing import OUTCOME, Trace
from ...serving.request_context import AnswerHead, Generate
from ..entry_codec import EntryCodec, pack_pieces
from ..metrics import CacheMetrics
from ..store import AnswerStore, LeaderLease, RedisUnavailable
from .shared_generation import GenerationUsage, SharedGeneration, Subscriber

_log = logging.getLogger("causeway.cloud.cache")
_GOODBYE_S = 1.0  # for giving a lease back: also when this gateway stops


class GenerationLeader:
    """One try at an answer, on the account of the listener that has waited longest.

    1. it ends well: the flight lands, and the answer is kept
    2. it is the question's fault (InvalidRequest): so it is everybody's
    3. it breaks otherwise: the error is that listener's alone, the others may ask again
    4. nobody here listens any more: it goes on while somebody on another gateway waits, else it stops
    """

    def __init__(
        self,
        store: AnswerStore,
        codec: EntryCodec,
        metrics: CacheMetrics,
        make: Generate,
        generation: SharedGeneration,
        lease: LeaderLease | None,
        *,
        lease_s: float,
    ) -> None:
        self._store = store
        self._codec = codec
        self._metrics = metrics
        self._make = make
        self._flight = generation
        self._lease = lease
        self._tick_s = lease_s / 3
        self._stir = anyio.Event()
        self._waited_for = False  # on another gateway
        self._published = 0  # chunks

    def wanted(self) -> None:
        """Somebody on another gateway waits for this answer."""
        if not self._waited_for:
            self._waited_for = True
            self._flight.on_send = self._poke
            self._poke()

    async def run(self) -> None:
        """Afterwards the flight has landed, or those who are left may ask again. Never raises CausewayError."""
        error: CausewayError | None = Draining("this gateway is shutting down", retry_after_s=1.0)
        if not self._flight.listeners:  # they left while Redis was asked
            with anyio.move_on_after(_GOODBYE_S, shield=True):
                return await self._give_back(error)
        payer = self._flight.listeners[0]
        work = payer.work = GenerationUsage()
        self._flight.on_leave = self._poke
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._tend, tasks.cancel_scope)
                error = await self._work(payer, work)
                tasks.cancel_scope.cancel()
        finally:
            work.end()
            self._flight.on_send = self._flight.on_leave = lambda: None
            self._conclude(payer, error)
            with anyio.move_on_after(_GOODBYE_S, shield=True):
                await self._give_back(error, payer.call.trace)

    async def _work(self, payer: Subscriber, work: GenerationUsage) -> CausewayError | None:
        try:
            with anyio.fail_after(max(0.0, payer.call.deadline - anyio.current_time())):
                async with aclosing(self._make(payer.call)) as pieces:
                    async for piece in pieces:
                        if isinstance(piece, AnswerHead):
                            self._flight.head = piece
                            continue
                        work.count(piece)
                        await self._flight.send(piece)
        except CausewayError as error:
            return error
        except TimeoutError:
            return DeadlineExceeded("the deadline passed while the answer was being made")
        except Exception as error:
            _log.error("an answer failed unexpectedly: %s", type(error).__name__)
            return CausewayError("The gateway failed.")
        return None

    def _conclude(self, payer: Subscriber, error: CausewayError | None) -> None:
        if error is None:
            self._flight.finish()  # (1)
        elif isinstance(error, InvalidRequest):
            self._flight.finish(error)  # (2)
        else:
            self._flight.fail(payer, error)  # (3), (4)

    async def _give_back(self, error: CausewayError | None, trace: Trace | None = None) -> None:
        """The lease, with the answer if there is one. `trace`: of who had it made."""
        lease, self._lease = self._lease, None
        if lease is None:
            return
        try:
            if error is not None or not self._flight.whole:
                await self._store.release(lease)
                return
            step, outcome = None if trace is None else trace.cache("keep"), "redis_unavailable"
            try:
                outcome = await self._keep(lease)
            finally:
                if step is not None:
                    step.end(said={OUTCOME: outcome})
        except RedisUnavailable:
            return  # it runs out

    async def _keep(self, lease: LeaderLease) -> str:
        """What a trace says of it. Raises Away."""
        head, chunks = self._flight.head or AnswerHead(), self._flight.chunks()
        value = self._codec.pack(lease.slot.key, head, chunks) if head.keep else None
        if value is None:
            self._metrics.fault("not_stored")
        if not await self._store.keep(lease, value or b"", self._unsaid() if self._waited_for else b""):
            self._metrics.fault("lost_lease")
            return "lost_lease"
        return "not_stored" if value is None else "kept"

    # --- beside the work ---------------------------------------------------------------------------------------------

    def _poke(self) -> None:
        self._stir.set()

    async def _tend(self, scope: anyio.CancelScope) -> None:
        """Renews the lease, tells who waits elsewhere, and stops the work when nobody wants it."""
        while True:
            with anyio.move_on_after(self._tick_s) as tick:
                await self._stir.wait()
            self._stir = anyio.Event()
            if not self._flight.listeners and not await self._wanted_elsewhere():
                if not self._flight.listeners:  # nobody came meanwhile
                    self._flight.abandon(scope)
                    return
                continue
            if self._lease is not None:
                await self._tell(self._lease, due=tick.cancelled_caught)

    async def _wanted_elsewhere(self) -> bool:
        lease = self._lease
        if lease is None:
            return False
        try:
            if await self._store.leave(lease):
                self.wanted()
                return True
        except RedisUnavailable:
            pass
        self._lease = None
        return False

    async def _tell(self, lease: LeaderLease, *, due: bool) -> None:
        if not self._flight.whole:  # too long to be shared
            self._lease = None
            await _quietly(self._store.release(lease))
            return
        try:
            if self._waited_for and self._published < self._flight.length:
                interest = await self._publish(lease)
            elif due:
                interest = await self._store.renew(lease)
            else:
                return
        except RedisUnavailable:
            return  # asked again at the next tick: the lease outlives two of them
        if interest is None:
            self._metrics.fault("lost_lease")
            self._lease = None
        elif interest:
            self.wanted()

    async def _publish(self, lease: LeaderLease) -> bool | None:
        until = self._flight.length
        interest = await self._store.publish(lease, self._unsaid())
        self._published = until
        return interest

    def _unsaid(self) -> bytes:
        """What was not said for sure: a call that was cut off may have arrived."""
        at = self._published
        return pack_pieces(at, None if at else self._flight.head, self._flight.chunks(at))


async def _quietly(call: Awaitable[None]) -> None:
    try:
        await call
    except RedisUnavailable:
        return
