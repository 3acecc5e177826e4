"""The replay of a range of messages for an audit: no cursor moves, Redis gets nothing, and no tenant is billed.

Expired messages are answered, too, by the present models. An outcome is shown, or published to an audit topic; never to
the pipeline's own topics.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

import anyio
import msgspec

from causeway_server.router.errors import CausewayError

from ..brokers.port import IncomingMessage, MessageHistory, MessageRange, MessageSink, TopicAddress
from ..jobs.worker.execution import JobResult
from ..storage.record import RunBill
from .attempts import MessageRunner
from .outcome import AUTHORIZATION, OutcomeWriter, StreamMessage, StreamOutcome, read_message
from .settlement import retry_until_done

_MAX_BYTES = 1 << 30  # of an outcome that is only shown


class _ReplayedMessage(msgspec.Struct, frozen=True):
    """The output line about one message."""

    position: str
    published_at: float  # Unix seconds
    outcome: msgspec.Raw  # the CloudEvent


@dataclass(eq=False, repr=False)
class MessageReplay:
    """A replay of messages of one topic."""

    name: str  # name of the replay, for ids in the audit topic
    topic: str  # name of the topic, as the pipeline knows it
    history: MessageHistory
    runner: MessageRunner
    writer: OutcomeWriter
    audit: MessageSink | None  # sink of the outcomes; None if `show` prints a line about each
    show: Callable[[str], None]
    _: KW_ONLY
    in_flight: int
    counts: Counter[str] = field(default_factory=Counter)  # number of outcomes by kind

    def __post_init__(self) -> None:
        self._slots = anyio.Semaphore(self.in_flight)

    async def run(self, wanted: MessageRange) -> None:
        """Answer a range. Raises BrokerUnavailable if the rest of it cannot be read, or ConfigError."""
        faults: list[CausewayError] = []
        async with anyio.create_task_group() as tasks:
            try:
                async for incoming in self.history.read(wanted):
                    await self._slots.acquire()
                    tasks.start_soon(self._answer, incoming)
            except CausewayError as error:
                faults.append(error)  # Raised below: a task group would wrap it.
        for fault in faults:
            raise fault

    async def _answer(self, incoming: IncomingMessage) -> None:
        try:
            outcome = await self._outcome(read_message(incoming, self.topic), incoming)
            self.counts[outcome.kind] += 1
            if self.audit is None:
                line = _ReplayedMessage(incoming.position, incoming.published_at, msgspec.Raw(outcome.message.body))
                self.show(msgspec.json.encode(line).decode())
            else:
                await self._publish(self.audit, outcome, incoming)
        finally:
            self._slots.release()

    async def _outcome(self, message: StreamMessage, incoming: IncomingMessage) -> StreamOutcome:
        if message.event is not None:
            lasting = msgspec.structs.replace(message.event, expirytime=None, time=None)
            message = msgspec.structs.replace(message, event=lasting, format="json")
        max_bytes = _MAX_BYTES if self.audit is None else self.audit.max_bytes
        authorization = incoming.headers.get(AUTHORIZATION, "")
        ended = await self.runner.run(message, authorization, 1, _report_nothing, max_bytes)
        ended.receipt.close(accepted=False)
        now = time.time()
        if isinstance(ended.result, JobResult):
            return self.writer.answered(message, ended.result.body, now)
        return self.writer.dead(message, incoming, ended.result, ended.attempts, now, max_bytes)

    async def _publish(self, audit: MessageSink, outcome: StreamOutcome, incoming: IncomingMessage) -> None:
        message = msgspec.structs.replace(outcome.message, id=f"{self.name}.{incoming.position}")
        position = await retry_until_done(lambda: audit.position(self.name))
        tries = 0

        async def publish() -> None:
            nonlocal tries
            tries += 1
            await audit.publish(message, self.name, position, repeated=tries > 1)

        await retry_until_done(publish)


async def _report_nothing(_bill: RunBill | None) -> None:
    """Ignore the bill, also of a failed run."""


class ReplayTopics(msgspec.Struct, frozen=True, kw_only=True):
    """Source and target of a replay."""

    name: str  # name of the pipeline
    source: TopicAddress
    wanted: MessageRange
    audit: TopicAddress | None  # topic of the outcomes; None for stdout
