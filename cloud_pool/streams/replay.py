"""A range of messages answered again for an audit: no cursor moves, Redis learns nothing, and no tenant is billed.

Expired messages are answered too, each one by today's models. An outcome is shown, or
published to a topic of audits; never to the pipeline's own.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import anyio
import msgspec

from router.errors import CausewayError

from ..brokers.port import IncomingMessage, MessageHistory, MessageRange, MessageSink, TopicAddress
from ..jobs.worker.execution import JobResult
from ..storage.record import RunBill
from .attempts import MessageRunner
from .outcome import AUTHORIZATION, OutcomeWriter, StreamMessage, StreamOutcome, read_message
from .settlement import insist

_MAX_BYTES = 1 << 30  # of an outcome that is only shown


class _ReplayedMessage(msgspec.Struct, frozen=True):
    """A line about a message."""

    position: str
    published_at: float  # unix s
    outcome: msgspec.Raw  # a CloudEvent


class MessageReplay:
    """Answers messages of one topic.

    Args:
        name: of the replay, for ids in the topic of audits
        topic: as the pipeline knows it
        audit: gets the outcomes; None: `show` gets a line about each
    """

    def __init__(
        self,
        name: str,
        topic: str,
        history: MessageHistory,
        runner: MessageRunner,
        writer: OutcomeWriter,
        audit: MessageSink | None,
        show: Callable[[str], None],
        *,
        in_flight: int,
    ) -> None:
        self._name = name
        self._topic = topic
        self._history = history
        self._runner = runner
        self._writer = writer
        self._audit = audit
        self._slots = anyio.Semaphore(in_flight)
        self._show = show
        self.counts = Counter[str]()
        """Of outcomes, by kind."""

    async def run(self, wanted: MessageRange) -> None:
        """Answer a range. Raises BrokerUnavailable when the rest of it cannot be read, or ConfigError."""
        faults: list[CausewayError] = []
        async with anyio.create_task_group() as tasks:
            try:
                async for incoming in self._history.read(wanted):
                    await self._slots.acquire()
                    tasks.start_soon(self._answer, incoming)
            except CausewayError as error:
                faults.append(error)  # Raised below: a task group would wrap it.
        for fault in faults:
            raise fault

    async def _answer(self, incoming: IncomingMessage) -> None:
        try:
            outcome = await self._outcome(read_message(incoming, self._topic), incoming)
            self.counts[outcome.kind] += 1
            if self._audit is None:
                line = _ReplayedMessage(incoming.position, incoming.published_at, msgspec.Raw(outcome.message.body))
                self._show(msgspec.json.encode(line).decode())
            else:
                await self._publish(self._audit, outcome, incoming)
        finally:
            self._slots.release()

    async def _outcome(self, message: StreamMessage, incoming: IncomingMessage) -> StreamOutcome:
        if message.event is not None:
            lasting = msgspec.structs.replace(message.event, expirytime=None, time=None)
            message = msgspec.structs.replace(message, event=lasting, format="json")
        max_bytes = _MAX_BYTES if self._audit is None else self._audit.max_bytes
        authorization = incoming.headers.get(AUTHORIZATION, "")
        ended = await self._runner.run(message, authorization, 1, _report_nothing, max_bytes)
        ended.receipt.close(accepted=False)
        now = time.time()
        if isinstance(ended.result, JobResult):
            return self._writer.answered(message, ended.result.body, now)
        return self._writer.dead(message, incoming, ended.result, ended.attempts, now, max_bytes)

    async def _publish(self, audit: MessageSink, outcome: StreamOutcome, incoming: IncomingMessage) -> None:
        message = msgspec.structs.replace(outcome.message, id=f"{self._name}.{incoming.position}")
        position = await insist(lambda: audit.position(self._name))
        tries = 0

        async def publish() -> None:
            nonlocal tries
            tries += 1
            await audit.publish(message, self._name, position, repeated=tries > 1)

        await insist(publish)


async def _report_nothing(_bill: RunBill | None) -> None:
    """A run that failed is not billed either."""


class ReplayTopics(msgspec.Struct, frozen=True, kw_only=True):
    """What is replayed, and where to."""

    name: str  # of the pipeline
    source: TopicAddress
    wanted: MessageRange
    audit: TopicAddress | None  # None: stdout
