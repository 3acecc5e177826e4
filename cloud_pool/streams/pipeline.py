"""A pipeline at work: receives messages, and has them settled, so many at the same time.

1. Only the holder of the lease receives, where the broker needs one; the others stand by.
2. A batch is looked up in Redis in one call: what is known of each message says how it is settled.
3. A message that is delivered again while it is worked on only changes which delivery is acknowledged.
4. When the lease is lost, all work stops, and when a lane is, all work of the lane: their new holder gets every message
   that is not acknowledged.
5. On SIGTERM nothing more is received; what does not end within `jobs.drain_s` is left to the next process.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Sequence

import anyio
from anyio.abc import TaskGroup

from router.errors import JobStoreUnavailable

from ..brokers.port import BrokerUnavailable, IncomingMessage
from ..lifetime import StopSignal
from .config import StreamsConfig
from .effects import KnownEffect, LeaseLost
from .metrics import StreamMetrics
from .outcome import read_message
from .settlement import MessageSettler, MessageWork, StreamPorts, WorkTable, pause

_WAIT_S = 1.0  # for messages
_RELEASE_S = 5.0
_log = logging.getLogger("causeway.cloud.streams")


class StreamPipeline:
    """Works from one topic to another.

    Args:
        topic: name of the source's topic, which tells messages without an id apart
        drain_s: on SIGTERM
        measure_s: between two looks at the lag
    """

    def __init__(
        self,
        topic: str,
        ports: StreamPorts,
        settler: MessageSettler,
        config: StreamsConfig,
        metrics: StreamMetrics,
        *,
        drain_s: float,
        measure_s: float = 2.0,
    ) -> None:
        self._topic = topic
        self._source = ports.source
        self._settler = settler
        self._effects = ports.effects
        self._config = config
        self._metrics = metrics
        self._drain_s = drain_s
        self._measure_s = measure_s
        self._works = WorkTable()

    async def run(self, stop: StopSignal) -> None:
        """Work until `stop` and until the pipeline has drained."""
        async with anyio.create_task_group() as outer:
            stopping = anyio.Event()

            async def watch() -> None:
                await stop.wait()
                stopping.set()

            outer.start_soon(watch)
            while not stopping.is_set():
                if self._source.needs_lease and not await self._hold():
                    with anyio.move_on_after(self._config.lease_s / 3):
                        await stopping.wait()
                    continue
                await self._work(stopping)
            outer.cancel_scope.cancel()

    # --- the lease -----------------------------------------------------------------------------------------------

    async def _hold(self) -> bool:
        with contextlib.suppress(JobStoreUnavailable):
            return await self._effects.hold(self._config.lease_s)
        return False

    async def _renew(self, lost: anyio.Event) -> None:
        """Renew the lease. `lost` is set when another process may have it."""
        while True:
            await anyio.sleep(self._config.lease_s / 3)
            # Without Redis no other process can take the lease, and this one can record nothing.
            with contextlib.suppress(JobStoreUnavailable):
                if not await self._effects.hold(self._config.lease_s):
                    break
        lost.set()

    async def _work(self, stopping: anyio.Event) -> None:
        """Receive and work until `stopping`, or until the lease is lost."""
        lost = anyio.Event()
        await self._source.forget()
        async with anyio.create_task_group() as works, anyio.create_task_group() as upkeep:
            if self._source.needs_lease:
                upkeep.start_soon(self._renew, lost)
            upkeep.start_soon(self._stop_lost_lanes)
            upkeep.start_soon(self._keep)
            async with anyio.create_task_group() as intake:
                intake.start_soon(self._receive, works, lost)
                intake.start_soon(self._measure)
                intake.start_soon(_cancel_after, stopping, intake)
                intake.start_soon(_cancel_after, lost, intake)
            self._metrics.stand_by()
            if not lost.is_set():
                await self._drain(lost)
            works.cancel_scope.cancel()
            upkeep.cancel_scope.cancel()
        if lost.is_set():
            _log.warning("another process receives now: this one stands by")  # (4)
        self._works.clear()

    async def _drain(self, lost: anyio.Event) -> None:
        """(5)"""
        with anyio.move_on_after(self._drain_s):
            while self._works and not lost.is_set():
                await self._works.change()
        unfinished = self._works.all()
        with anyio.CancelScope(shield=True), anyio.move_on_after(_RELEASE_S), contextlib.suppress(JobStoreUnavailable):
            await self._uncount(unfinished)
            if self._source.needs_lease:
                await self._effects.hold(0.0)

    # --- receiving -----------------------------------------------------------------------------------------------

    async def _receive(self, works: TaskGroup, lost: anyio.Event) -> None:
        fault = ""
        while not lost.is_set():
            try:
                while len(self._works) >= self._config.in_flight:
                    await self._works.change()
                free = self._config.in_flight - len(self._works)
                most = min(self._config.batch, free)
                received = await self._source.receive(most, _WAIT_S, self._config.batch_wait_s)
                if fault:
                    _log.info("messages are received again")
                    fault = ""
                # Shielded: messages that are claimed have begun.
                with anyio.CancelScope(shield=True):
                    await self._begin(received, works, lost)
            except BrokerUnavailable as error:
                if error.message != fault:
                    fault = error.message
                    _log.warning("no messages are received: %s", error.message)
                await pause()

    async def _begin(self, received: Sequence[IncomingMessage], works: TaskGroup, lost: anyio.Event) -> None:
        begun = [
            self._works.enter(read_message(incoming, self._topic), incoming)
            for incoming in received
            if not self._works.deliver(incoming)  # (3)
        ]
        unknown = [work for work in begun if work.twin is None]
        try:
            known = await self._effects.claim([work.message.effect for work in unknown]) if unknown else []  # (2)
        except LeaseLost:
            lost.set()
            return
        except JobStoreUnavailable as error:
            _log.warning("messages wait: %s", error.message)
            for work in reversed(begun):
                self._works.leave(work)
            await self._source.forget()  # They come again, in order.
            await pause()
            return
        effects = {work.message.effect: effect for work, effect in zip(unknown, known, strict=True)}
        for work in begun:
            known_effect = effects[work.message.effect] if work.twin is None else None
            works.start_soon(self._process, work, known_effect, lost)

    async def _process(self, work: MessageWork, known: KnownEffect | None, lost: anyio.Event) -> None:
        with work.scope:
            try:
                await self._settler.settle(work, known)
            except LeaseLost:
                lost.set()
                return
        work.ended.set()
        self._works.leave(work)

    # --- upkeep --------------------------------------------------------------------------------------------------

    async def _stop_lost_lanes(self) -> None:
        """(4)"""
        while True:
            lanes = await self._source.lost_lanes()
            lost = [work for work in self._works.all() if work.incoming.lane in lanes]
            for work in lost:
                work.scope.cancel()
                self._works.leave(work)  # It may come again, when the lane returns.
            with contextlib.suppress(JobStoreUnavailable):
                await self._uncount(lost)

    async def _uncount(self, works: Iterable[MessageWork]) -> None:
        """Take back the attempts of messages that another process will run. Raises JobStoreUnavailable."""
        for work in works:
            if work.twin is None and not work.published:
                await self._effects.count(work.message.effect, -1)

    async def _keep(self) -> None:
        """Tell the broker what is being worked on."""
        while True:
            await anyio.sleep(self._config.lease_s / 3)
            with contextlib.suppress(BrokerUnavailable):
                await self._source.keep([work.incoming for work in self._works.all()])

    async def _measure(self) -> None:
        while True:
            now = time.time()
            oldest = min((work.incoming.published_at for work in self._works.all()), default=now)
            self._metrics.set_work(len(self._works), now - oldest)
            try:
                self._metrics.receives(await self._source.lag())
            except BrokerUnavailable:
                self._metrics.waits_for_broker()
            await anyio.sleep(self._measure_s)


async def _cancel_after(event: anyio.Event, tasks: TaskGroup) -> None:
    await event.wait()
    tasks.cancel_scope.cancel()
