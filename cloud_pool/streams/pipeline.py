"""A pipeline at work: receives messages, runs them, and publishes one outcome for each, in order by key.

1. Only the holder of the lease receives, where the broker needs one; the others stand by.
2. A batch is looked up in Redis in one call: what is published already is acknowledged, what was recorded by a process
   that was killed is published, unless it is in the topic.
3. Messages run at the same time, at most `in_flight`. A message of a key publishes after the one before it.
4. The outcome is recorded, published, marked as published, and only then acknowledged. Each step is repeated until
   Redis and the broker answer.
5. A message that is delivered again while it runs only changes which delivery is acknowledged.
6. When the lease is lost, all work stops: the new holder gets every message that is not acknowledged.
7. On SIGTERM nothing more is received; what does not end within `jobs.drain_s` is left to the next process.
"""

from __future__ import annotations

import contextlib
import logging
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import anyio
from anyio.abc import TaskGroup

from router.errors import CausewayError, JobStoreUnavailable

from ..brokers.errors import BrokerUnavailable, MessageTooLarge
from ..brokers.port import IncomingMessage, MessageSink, MessageSource
from ..jobs.record import RunBill
from ..jobs.worker.execution import JobResult
from ..jobs.worker.worker import StopSignal
from .attempts import AUTHORIZATION, EndedRun, MessageRunner
from .config import StreamsConfig
from .effects import EffectStore, KnownEffect
from .errors import DeliveredTooOften, LeaseLost
from .metrics import StreamMetrics
from .outcome import OutcomeWriter, StreamMessage, StreamOutcome, decode_outcome, read_message

_WAIT_S = 1.0  # for messages
_RETRY_S = 0.2
_MEASURE_S = 2.0
_EVENT_BYTES = 8192  # of an outcome's event beside the answer
_RELEASE_S = 5.0
_log = logging.getLogger("causeway.cloud.streams")
T = TypeVar("T")


class MessageWork:
    """A message that this process works on.

    `before`: the message of the same key that publishes first. `twin`: a message with the same id: it was sent twice.
    """

    def __init__(
        self,
        message: StreamMessage,
        incoming: IncomingMessage,
        before: MessageWork | None = None,
        twin: MessageWork | None = None,
    ) -> None:
        self.message = message
        self.incoming = incoming  # the latest delivery
        self.before = before
        self.twin = twin
        self.run = secrets.token_hex(8)  # tells a repeated record from another process's
        self.position = ""  # in the topic of outcomes, before the outcome
        self.ended = anyio.Event()
        self.published = False


class StreamPipeline:
    """Works from one topic to another.

    Args:
        topic: name of the source's topic, which tells messages without an id apart
        sink: gets answers, and what expired
        dead: gets dead letters
        drain_s: on SIGTERM
        clock: monotonic time, s
        wall_clock: unix time, s
        rng: uniform in [0, 1)
    """

    def __init__(
        self,
        name: str,
        topic: str,
        source: MessageSource,
        sink: MessageSink,
        dead: MessageSink,
        effects: EffectStore,
        runner: MessageRunner,
        config: StreamsConfig,
        metrics: StreamMetrics,
        *,
        drain_s: float,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        rng: Callable[[], float] = random.random,
    ) -> None:
        self._topic = topic
        self._source = source
        self._sinks = {"answered": sink, "expired": sink, "dead": dead}
        self._effects = effects
        self._runner = runner
        self._config = config
        self._metrics = metrics
        self._writer = OutcomeWriter(name)
        self._drain_s = drain_s
        self._clock = clock
        self._wall_clock = wall_clock
        self._rng = rng
        self._works: dict[str, MessageWork] = {}  # by position
        self._works_by_effect: dict[str, MessageWork] = {}
        self._last_of_key: dict[str, MessageWork] = {}
        self._changed = anyio.Event()

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
            upkeep.start_soon(self._keep)
            upkeep.start_soon(self._measure)
            self._metrics.set_active(True)
            async with anyio.create_task_group() as intake:
                intake.start_soon(self._receive, works, lost)
                intake.start_soon(_cancel_after, stopping, intake)
                intake.start_soon(_cancel_after, lost, intake)
            self._metrics.set_active(False)
            if not lost.is_set():
                await self._drain(lost)
            works.cancel_scope.cancel()
            upkeep.cancel_scope.cancel()
        if lost.is_set():
            _log.warning("another process receives now: this one stands by")  # (6)
        for held in (self._works, self._works_by_effect, self._last_of_key):
            held.clear()

    async def _drain(self, lost: anyio.Event) -> None:
        """(7)"""
        with anyio.move_on_after(self._drain_s):
            while self._works and not lost.is_set():
                await self._change()
        unfinished = [work for work in self._works.values() if not work.published]
        with anyio.CancelScope(shield=True), anyio.move_on_after(_RELEASE_S), contextlib.suppress(JobStoreUnavailable):
            for work in unfinished:
                await self._effects.count(work.message.effect, -1)
            if self._source.needs_lease:
                await self._effects.hold(0.0)

    # --- receiving -----------------------------------------------------------------------------------------------

    async def _receive(self, works: TaskGroup, lost: anyio.Event) -> None:
        fault = ""
        while not lost.is_set():
            try:
                while len(self._works) >= self._config.in_flight:
                    await self._change()
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
                await anyio.sleep(self._pause_s())

    async def _begin(self, received: Sequence[IncomingMessage], works: TaskGroup, lost: anyio.Event) -> None:
        begun: list[MessageWork] = []
        for incoming in received:
            if (work := self._works.get(incoming.position)) is not None:
                work.incoming = incoming  # (5)
                continue
            message = read_message(incoming, self._topic)
            twin = self._works_by_effect.get(message.effect)
            work = MessageWork(message, incoming, self._last_of_key.get(message.key), twin)
            begun.append(work)
            self._enter(work)
        unknown = [work for work in begun if work.twin is None]
        try:
            known = await self._effects.claim([work.message.effect for work in unknown]) if unknown else []  # (2)
        except LeaseLost:
            lost.set()
            return
        except JobStoreUnavailable as error:
            _log.warning("messages wait: %s", error.message)
            for work in reversed(begun):
                self._leave(work)
            await self._source.forget()  # They come again, in order.
            await anyio.sleep(self._pause_s())
            return
        effects = {work.message.effect: effect for work, effect in zip(unknown, known, strict=True)}
        for work in begun:
            known_effect = effects[work.message.effect] if work.twin is None else None
            works.start_soon(self._process, work, known_effect, lost)

    def _enter(self, work: MessageWork) -> None:
        self._works[work.incoming.position] = work
        if work.twin is None:
            self._works_by_effect[work.message.effect] = work
        if work.message.key:
            self._last_of_key[work.message.key] = work

    def _leave(self, work: MessageWork) -> None:
        self._works.pop(work.incoming.position, None)
        if self._works_by_effect.get(work.message.effect) is work:
            del self._works_by_effect[work.message.effect]
        if self._last_of_key.get(work.message.key) is work:
            del self._last_of_key[work.message.key]
            if work.before is not None and not work.before.ended.is_set():
                self._last_of_key[work.message.key] = work.before

    # --- one message ---------------------------------------------------------------------------------------------

    async def _process(self, work: MessageWork, known: KnownEffect | None, lost: anyio.Event) -> None:
        try:
            await self._settle(work, known)
        except LeaseLost:
            lost.set()
            return
        self._leave(work)
        work.ended.set()
        self._changed.set()
        self._changed = anyio.Event()

    async def _settle(self, work: MessageWork, known: KnownEffect | None) -> None:
        """`known` None: the outcome is that of the twin."""
        message, found = work.message, False
        outcome: StreamOutcome | None = None
        if work.twin is not None:
            await work.twin.ended.wait()
        if known is not None and not known.state:
            outcome = await self._make_outcome(work, known.attempts)
            if outcome is None:
                (known,) = await self._insist(lambda: self._effects.claim([message.effect]))
        if known is not None and known.state == "recorded":  # (2)
            outcome = decode_outcome(known.outcome)
            work.position = known.position
            found = await self._is_published(self._sinks[outcome.kind], outcome, work)
            self._metrics.count_recovered()
        if work.before is not None:  # (3)
            await work.before.ended.wait()
            work.before = None  # lets the chain go
        if outcome is not None:
            if not found:
                await self._publish(work, outcome)
            work.published = True
            await self._insist(lambda: self._effects.published([message.effect]))
        work.published = True
        await self._insist(lambda: self._source.acknowledge(work.incoming))
        if outcome is None:
            self._metrics.count("duplicate")
        else:
            self._metrics.count(outcome.kind, self._wall_clock() - work.incoming.published_at)

    async def _make_outcome(self, work: MessageWork, attempts: int) -> StreamOutcome | None:
        """Run a message and record its outcome. None: another process has recorded one first."""
        message = work.message
        if attempts > self._config.max_attempts:
            error = DeliveredTooOften("The message was delivered too often: it may end the process that runs it.")
            return await self._record(work, self._dead(work, error, attempts - 1), None)

        async def report(bill: RunBill | None) -> None:
            await self._insist(lambda: self._effects.count(message.effect, 1, bill))

        max_bytes = self._sinks["answered"].max_bytes - _EVENT_BYTES
        authorization = work.incoming.headers.get(AUTHORIZATION, "")
        ended = await self._runner.run(message, authorization, attempts, report, max_bytes)
        accepted = False
        try:
            outcome = await self._record(work, self._outcome_of(work, ended), ended.receipt.bill)
            accepted = outcome is not None
            return outcome
        finally:
            ended.receipt.close(accepted=accepted)

    def _outcome_of(self, work: MessageWork, ended: EndedRun) -> StreamOutcome:
        now, result = self._wall_clock(), ended.result
        if isinstance(result, JobResult):
            return self._writer.answered(work.message, result.body, now)
        if ended.expired:
            return self._writer.expired(work.message, result, now)
        return self._dead(work, result, ended.attempts)

    def _dead(self, work: MessageWork, error: CausewayError, attempts: int) -> StreamOutcome:
        _log.warning("a dead letter, from position %s: %s", work.incoming.position, error.code)
        max_bytes = self._sinks["dead"].max_bytes
        return self._writer.dead(work.message, work.incoming, error, attempts, self._wall_clock(), max_bytes)

    async def _record(self, work: MessageWork, outcome: StreamOutcome, bill: RunBill | None) -> StreamOutcome | None:
        position, stored = self._sinks[outcome.kind].position(), outcome.encoded()
        work.position, effect = position, work.message.effect
        recorded = await self._insist(lambda: self._effects.record(effect, work.run, stored, position, bill))
        return outcome if recorded else None

    async def _publish(self, work: MessageWork, outcome: StreamOutcome) -> None:
        """Publish once: a publication whose end is unknown is looked for before it is repeated."""
        while True:
            sink, lane = self._sinks[outcome.kind], work.incoming.lane
            try:
                await sink.publish(outcome.message, lane)
                return
            except BrokerUnavailable as error:
                _log.warning("an outcome waits: %s", error.message)
                await anyio.sleep(self._pause_s())
            except MessageTooLarge as error:  # The bound is smaller than when the outcome was made.
                outcome = self._writer.dead(work.message, work.incoming, error, 0, self._wall_clock(), max_bytes=0)
                continue
            if await self._is_published(sink, outcome, work):
                return

    async def _is_published(self, sink: MessageSink, outcome: StreamOutcome, work: MessageWork) -> bool:
        since = {outcome.message.id: work.position}
        return bool(await self._insist(lambda: sink.find(since, work.incoming.lane)))

    # --- upkeep --------------------------------------------------------------------------------------------------

    async def _insist(self, step: Callable[[], Awaitable[T]]) -> T:
        """Repeat a step until Redis and the broker answer."""
        fault = ""
        while True:
            try:
                return await step()
            except (JobStoreUnavailable, BrokerUnavailable) as error:
                if not fault:
                    _log.warning("a message waits: %s", error.message)
                fault = error.message
                await anyio.sleep(self._pause_s())

    async def _keep(self) -> None:
        """Tell the broker what is being worked on."""
        while True:
            await anyio.sleep(self._config.lease_s / 3)
            with contextlib.suppress(BrokerUnavailable):
                await self._source.keep([work.incoming for work in self._works.values()])

    async def _measure(self) -> None:
        while True:
            now = self._wall_clock()
            oldest = min((work.incoming.published_at for work in self._works.values()), default=now)
            self._metrics.set_work(len(self._works), now - oldest)
            with contextlib.suppress(BrokerUnavailable):
                self._metrics.set_lag(await self._source.lag())
            await anyio.sleep(_MEASURE_S)

    async def _change(self) -> None:
        """Wait until a message has ended."""
        await self._changed.wait()

    def _pause_s(self) -> float:
        return _RETRY_S * (1.0 + self._rng())


async def _cancel_after(event: anyio.Event, tasks: TaskGroup) -> None:
    await event.wait()
    tasks.cancel_scope.cancel()
