"""The loop of a pipeline: it receives messages and settles several of them at a time.

1. If the broker needs a lease, only its holder receives; the other processes stand by.
2. A batch is looked up in Redis in one call. The known state of each message determines how it is settled.
3. A message that is delivered again while it is worked on only changes which delivery is acknowledged.
4. If the lease is lost, all work stops; if a lane is lost, all work of that lane. The new holder gets every
unacknowledged message.
5. After SIGTERM no more messages are received. Those not done within `jobs.drain_s` are left to another process.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field

import anyio
from anyio.abc import TaskGroup

from causeway_server.router.errors import JobStoreUnavailable

from ..brokers.port import BrokerUnavailable, IncomingMessage
from ..lifetime import StopSignal
from .config import StreamsConfig
from .effects import KnownEffect, LeaseLost
from .metrics import StreamMetrics
from .outcome import read_message
from .settlement import MessageSettler, MessageWork, StreamPorts, WorkTable, pause

_WAIT_S = 1.0  # for messages
_RELEASE_S = 5.0
log = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class StreamPipeline:
    """A pipeline from one topic to another."""

    topic: str  # name of the source's topic, which distinguishes messages without an id
    ports: StreamPorts
    settler: MessageSettler
    config: StreamsConfig
    metrics: StreamMetrics
    _: KW_ONLY
    drain_s: float  # time to finish after SIGTERM, seconds
    measure_s: float = 2.0  # interval between two measurements of the lag, seconds
    _works: WorkTable = field(default_factory=WorkTable)

    async def run(self, stop: StopSignal) -> None:
        """Work until `stop` and until the pipeline has drained."""
        async with anyio.create_task_group() as outer:
            stopping = anyio.Event()

            async def watch() -> None:
                await stop.wait()
                stopping.set()

            outer.start_soon(watch)
            while not stopping.is_set():
                if self.ports.source.needs_lease and not await self._hold():
                    with anyio.move_on_after(self.config.lease_s / 3):
                        await stopping.wait()
                    continue
                await self._work(stopping)
            outer.cancel_scope.cancel()

    # --- the lease -----------------------------------------------------------------------------------------------

    async def _hold(self) -> bool:
        with contextlib.suppress(JobStoreUnavailable):
            return await self.ports.effects.hold(self.config.lease_s)
        return False

    async def _renew(self, lost: anyio.Event) -> None:
        """Renew the lease. `lost` is set when another process may have it."""
        while True:
            await anyio.sleep(self.config.lease_s / 3)
            # Without Redis no other process can take the lease, and this one cannot record outcomes.
            with contextlib.suppress(JobStoreUnavailable):
                if not await self.ports.effects.hold(self.config.lease_s):
                    break
        lost.set()

    async def _work(self, stopping: anyio.Event) -> None:
        """Receive and work until `stopping`, or until the lease is lost."""
        lost = anyio.Event()
        await self.ports.source.reset()
        async with anyio.create_task_group() as works, anyio.create_task_group() as upkeep:
            if self.ports.source.needs_lease:
                upkeep.start_soon(self._renew, lost)
            upkeep.start_soon(self._stop_lost_lanes)
            upkeep.start_soon(self._keep)
            async with anyio.create_task_group() as intake:
                intake.start_soon(self._receive, works, lost)
                intake.start_soon(self._measure)
                intake.start_soon(_cancel_after, stopping, intake)
                intake.start_soon(_cancel_after, lost, intake)
            self.metrics.stand_by()
            if not lost.is_set():
                await self._drain(lost)
            works.cancel_scope.cancel()
            upkeep.cancel_scope.cancel()
        if lost.is_set():
            log.warning("Another process now receives the messages, so this process stands by.")  # (4)
        self._works.clear()

    async def _drain(self, lost: anyio.Event) -> None:
        """Drain (5)."""
        with anyio.move_on_after(self.drain_s):
            while self._works and not lost.is_set():
                await self._works.change()
        unfinished = self._works.all()
        with anyio.CancelScope(shield=True), anyio.move_on_after(_RELEASE_S), contextlib.suppress(JobStoreUnavailable):
            await self._uncount(unfinished)
            if self.ports.source.needs_lease:
                await self.ports.effects.hold(0.0)

    # --- receiving -----------------------------------------------------------------------------------------------

    async def _receive(self, works: TaskGroup, lost: anyio.Event) -> None:
        fault = ""
        while not lost.is_set():
            try:
                while len(self._works) >= self.config.in_flight:
                    await self._works.change()
                free = self.config.in_flight - len(self._works)
                most = min(self.config.batch, free)
                received = await self.ports.source.receive(most, _WAIT_S, self.config.batch_wait_s)
                if fault:
                    log.info("Messages are received again.")
                    fault = ""
                # Shielded: messages that are claimed have begun.
                with anyio.CancelScope(shield=True):
                    await self._begin(received, works, lost)
            except BrokerUnavailable as error:
                if error.message != fault:
                    fault = error.message
                    log.warning("No messages are received: %s", error.message)
                await pause()

    async def _begin(self, received: Sequence[IncomingMessage], works: TaskGroup, lost: anyio.Event) -> None:
        begun = [
            self._works.enter(read_message(incoming, self.topic), incoming)
            for incoming in received
            if not self._works.deliver(incoming)  # (3)
        ]
        unknown = [work for work in begun if work.twin is None]
        try:
            known = await self.ports.effects.claim([work.message.effect for work in unknown]) if unknown else []  # (2)
        except LeaseLost:
            lost.set()
            return
        except JobStoreUnavailable as error:
            log.warning("Messages wait: %s", error.message)
            for work in reversed(begun):
                self._works.leave(work)
            await self.ports.source.reset()  # They come again, in order.
            await pause()
            return
        effects = {work.message.effect: effect for work, effect in zip(unknown, known, strict=True)}
        for work in begun:
            known_effect = effects[work.message.effect] if work.twin is None else None
            works.start_soon(self._process, work, known_effect, lost)

    async def _process(self, work: MessageWork, known: KnownEffect | None, lost: anyio.Event) -> None:
        with work.scope:
            try:
                await self.settler.settle(work, known)
            except LeaseLost:
                lost.set()
                return
        work.ended.set()
        self._works.leave(work)

    # --- upkeep --------------------------------------------------------------------------------------------------

    async def _stop_lost_lanes(self) -> None:
        """Stop the work of lost lanes (4)."""
        while True:
            lanes = await self.ports.source.lost_lanes()
            lost = [work for work in self._works.all() if work.incoming.lane in lanes]
            for work in lost:
                work.scope.cancel()
                self._works.leave(work)  # It may come again, when the lane returns.
            with contextlib.suppress(JobStoreUnavailable):
                await self._uncount(lost)

    async def _uncount(self, works: Iterable[MessageWork]) -> None:
        """Undo the attempts of messages that another process will run. Raises JobStoreUnavailable."""
        for work in works:
            if work.twin is None and not work.published:
                await self.ports.effects.count(work.message.effect, -1)

    async def _keep(self) -> None:
        """Extend the acknowledgement deadlines of the messages in progress."""
        while True:
            await anyio.sleep(self.config.lease_s / 3)
            with contextlib.suppress(BrokerUnavailable):
                await self.ports.source.extend_ack([work.incoming for work in self._works.all()])

    async def _measure(self) -> None:
        while True:
            now = time.time()
            oldest = min((work.incoming.published_at for work in self._works.all()), default=now)
            self.metrics.set_work(len(self._works), now - oldest)
            try:
                self.metrics.receives(await self.ports.source.lag())
            except BrokerUnavailable:
                self.metrics.waits_for_broker()
            await anyio.sleep(self.measure_s)


async def _cancel_after(event: anyio.Event, tasks: TaskGroup) -> None:
    await event.wait()
    tasks.cancel_scope.cancel()
