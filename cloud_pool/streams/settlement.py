"""The settlement of messages in progress, each from its claim to its acknowledgement, with exactly one outcome.

1. A message without an outcome runs, and its outcome is recorded, unless another process has recorded one first.
2. A recorded outcome may have been published by the process that recorded it.
3. It is published after the previous message with the same key.
4. It is marked as published. Only then is the message acknowledged.
"""

from __future__ import annotations

import logging
import random
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import TypeVar

import anyio
import msgspec

from causeway_server.router.errors import CausewayError, JobStoreUnavailable

from ..brokers.port import BrokerUnavailable, IncomingMessage, MessageSink, MessageSource, MessageTooLarge
from ..jobs.worker.execution import JobResult
from ..storage.record import RunBill
from .attempts import EndedRun, MessageRunner
from .effects import EffectStore, KnownEffect
from .metrics import StreamMetrics
from .outcome import AUTHORIZATION, OutcomeWriter, StreamMessage, StreamOutcome

_EVENT_BYTES = 8192  # of an outcome's event beside the answer
_RETRY_S = 0.2
log = logging.getLogger(__name__)
T = TypeVar("T")


class DeliveredTooOften(CausewayError, code="worker_lost"):
    """The message was delivered too often, because every process that ran it ended without an outcome."""


async def pause() -> None:
    """Wait between two attempts."""
    await anyio.sleep(_RETRY_S * random.uniform(1.0, 2.0))


async def retry_until_done(step: Callable[[], Awaitable[T]]) -> T:
    """Repeat a step until it raises neither JobStoreUnavailable nor BrokerUnavailable."""
    fault = ""
    while True:
        try:
            return await step()
        except (JobStoreUnavailable, BrokerUnavailable) as error:
            if not fault:
                log.warning(
                    "A step is repeated until it succeeds, because a store or broker does not answer: %s", error.message
                )
            fault = error.message
            await pause()


@dataclass(eq=False, repr=False)
class MessageWork:
    """A message that this process works on. `before`: the one with the same key that must be published first; `twin`:
    another with the same id, because it was sent twice.
    """

    message: StreamMessage
    incoming: IncomingMessage  # latest delivery
    before: MessageWork | None = None
    twin: MessageWork | None = None
    # id of this run, which distinguishes a repeated record from another process's
    run: str = field(default_factory=lambda: secrets.token_hex(8))
    position: str = ""  # position in the topic of outcomes, before the outcome
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    ended: anyio.Event = field(default_factory=anyio.Event)
    published: bool = False


class WorkTable:
    """The messages in progress."""

    def __init__(self) -> None:
        self._by_position: dict[str, MessageWork] = {}
        self._by_effect: dict[str, MessageWork] = {}
        self._last_of_key: dict[str, MessageWork] = {}
        self._changed = anyio.Event()

    def __len__(self) -> int:
        return len(self._by_position)

    def all(self) -> list[MessageWork]:
        """Return the messages that are not done."""
        return list(self._by_position.values())

    def deliver(self, incoming: IncomingMessage) -> bool:
        """Record a further delivery of a message. Returns False if it is not in progress."""
        work = self._by_position.get(incoming.position)
        if work is not None:
            work.incoming = incoming
        return work is not None

    def enter(self, message: StreamMessage, incoming: IncomingMessage) -> MessageWork:
        work = MessageWork(message, incoming, self._last_of_key.get(message.key), self._by_effect.get(message.effect))
        self._by_position[incoming.position] = work
        if work.twin is None:
            self._by_effect[message.effect] = work
        if message.key:
            self._last_of_key[message.key] = work
        return work

    def leave(self, work: MessageWork) -> None:
        """Remove a message that is done, or that another process now has."""
        if self._by_position.get(work.incoming.position) is work:
            del self._by_position[work.incoming.position]
        if self._by_effect.get(work.message.effect) is work:
            del self._by_effect[work.message.effect]
        if self._last_of_key.get(work.message.key) is work:
            del self._last_of_key[work.message.key]
            if work.before is not None and not work.before.ended.is_set():
                self._last_of_key[work.message.key] = work.before
        self._changed.set()
        self._changed = anyio.Event()

    async def change(self) -> None:
        """Wait until a message has been removed."""
        await self._changed.wait()

    def clear(self) -> None:
        for held in (self._by_position, self._by_effect, self._last_of_key):
            held.clear()


class StreamPorts(msgspec.Struct, frozen=True):
    """Source, sinks and records of a pipeline."""

    source: MessageSource
    sink: MessageSink  # topic for answers and expiry notices
    dead: MessageSink  # topic for dead letters
    effects: EffectStore


@dataclass(eq=False, repr=False)
class MessageSettler:
    """Settles messages."""

    ports: StreamPorts
    runner: MessageRunner
    writer: OutcomeWriter
    metrics: StreamMetrics
    _: KW_ONLY
    max_attempts: int  # maximum number of deliveries and failed runs

    def __post_init__(self) -> None:
        self._sinks = {"answered": self.ports.sink, "expired": self.ports.sink, "dead": self.ports.dead}

    async def settle(self, work: MessageWork, known: KnownEffect | None) -> None:
        """Settle a message. `known`: None if its outcome is its twin's. Raises LeaseLost."""
        message, repeated = work.message, False
        outcome: StreamOutcome | None = None
        if work.twin is not None:
            await work.twin.ended.wait()
        if known is not None and not known.state:  # (1)
            outcome = await self.make_outcome(work, known.attempts)
            if outcome is None:
                (known,) = await retry_until_done(lambda: self.ports.effects.claim([message.effect]))
        if known is not None and known.state == "recorded":  # (2)
            outcome = msgspec.msgpack.decode(known.outcome, type=StreamOutcome)
            work.position, repeated = known.position, True
            self.metrics.recovered.inc()
        if work.before is not None:  # (3)
            await work.before.ended.wait()
            work.before = None  # lets the chain go
        if outcome is not None:
            await self._publish(work, outcome, repeated)
            work.published = True
            await retry_until_done(lambda: self.ports.effects.published([message.effect]))  # (4)
        work.published = True
        await retry_until_done(lambda: self.ports.source.acknowledge(work.incoming))
        if outcome is None:
            self.metrics.count("duplicate")
        else:
            self.metrics.count(outcome.kind, time.time() - work.incoming.published_at)

    async def make_outcome(self, work: MessageWork, attempts: int) -> StreamOutcome | None:
        """Run a message and record its outcome; return None if another process has recorded one first."""
        message = work.message
        if attempts > self.max_attempts:
            error = DeliveredTooOften("The message was delivered too often. It may crash the process that runs it.")
            return await self._record(work, self._dead(work, error, attempts - 1), None)

        async def report(bill: RunBill | None) -> None:
            await retry_until_done(lambda: self.ports.effects.count(message.effect, 1, bill))

        max_bytes = self._sinks["answered"].max_bytes - _EVENT_BYTES
        authorization = work.incoming.headers.get(AUTHORIZATION, "")
        ended = await self.runner.run(message, authorization, attempts, report, max_bytes)
        accepted = False
        try:
            outcome = await self._record(work, self._outcome_of(work, ended), ended.receipt.bill)
            accepted = outcome is not None
            return outcome
        finally:
            ended.receipt.close(accepted=accepted)

    def _outcome_of(self, work: MessageWork, ended: EndedRun) -> StreamOutcome:
        now, result = time.time(), ended.result
        if isinstance(result, JobResult):
            return self.writer.answered(work.message, result.body, now)
        if ended.expired:
            return self.writer.expired(work.message, result, now)
        return self._dead(work, result, ended.attempts)

    def _dead(self, work: MessageWork, error: CausewayError, attempts: int) -> StreamOutcome:
        log.warning("The message at position %s becomes a dead letter: %s", work.incoming.position, error.code)
        max_bytes = self._sinks["dead"].max_bytes
        return self.writer.dead(work.message, work.incoming, error, attempts, time.time(), max_bytes)

    async def _record(self, work: MessageWork, outcome: StreamOutcome, bill: RunBill | None) -> StreamOutcome | None:
        await self._take_position(work, outcome)
        stored, effect = msgspec.msgpack.encode(outcome), work.message.effect
        recorded = await retry_until_done(
            lambda: self.ports.effects.record(effect, work.run, stored, work.position, bill)
        )
        return outcome if recorded else None

    async def _take_position(self, work: MessageWork, outcome: StreamOutcome) -> None:
        sink = self._sinks[outcome.kind]
        work.position = await retry_until_done(lambda: sink.position(work.incoming.lane))

    async def _publish(self, work: MessageWork, outcome: StreamOutcome, repeated: bool) -> None:
        """Publish an outcome, trying until the broker answers. `repeated`: it may be in the topic already."""
        logged = ""
        while True:
            sink, lane = self._sinks[outcome.kind], work.incoming.lane
            try:
                await sink.publish(outcome.message, lane, work.position, repeated=repeated)
                return
            except BrokerUnavailable as error:
                if error.message != logged:
                    log.warning("The outcome of a message cannot be published yet: %s", error.message)
                repeated, logged = True, error.message
                await pause()
            except MessageTooLarge as error:  # The bound is smaller than when the outcome was made.
                outcome = self.writer.dead(work.message, work.incoming, error, 0, time.time(), max_bytes=0)
                await self._take_position(work, outcome)
