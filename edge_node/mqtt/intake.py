"""Takes messages: each is stored as a job, or refused with an answer, before it is acknowledged.

Acknowledgements leave in the order in which the messages came, as MQTT 5 demands. What is done with a message:

1. It is stored, or it is a job that is known: acknowledged.
2. It cannot be a job: the error is published as its answer, then it is acknowledged.
3. There is no room, or the disk fails: it is kept and tried again, and not acknowledged, so that the broker keeps the
   others. A bulk message, and one with QoS 0, gets (2) for want of room.
4. The connection is lost: it comes again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

import anyio
import anyio.abc
import msgspec

from router.errors import CausewayError, Draining, JobStoreUnavailable, RateLimited
from router.jobs.submission import RANK
from router.serving.logs import redacted
from router.serving.request import PRIORITY, read_choice

from ..config.schema import MqttConfig, MqttTopicConfig
from ..http.api import Caller, routing_hints
from ..jobs.api import SubmittedJob
from ..jobs.entry import JobParts
from ..jobs.record import OutboxFull, ReplyTo
from ..observability.logs import Fault
from .connection import Connection
from .messages import (
    AnswerAddress,
    AnswerTooLarge,
    BrokerError,
    Message,
    PublishRefused,
    address_of,
    check_message,
    in_binary_mode,
    read_message,
    refusal,
)
from .topics import Topics

log = logging.getLogger(__name__)

_SHORTEST_S, _LONGEST_S = 1.0, 30.0  # until a message is tried again for which there was no room
_NO_ROOM = (OutboxFull, RateLimited, JobStoreUnavailable, Draining)


class MqttStats(msgspec.Struct):
    """Counted since the start of the daemon."""

    connected: bool = False
    messages: dict[str, int] = {}  # by what was done with them
    answers: int = 0

    def count(self, result: str) -> None:
        self.messages[result] = self.messages.get(result, 0) + 1


class _Delivery:
    __slots__ = ("message", "settled")

    def __init__(self, message: Message) -> None:
        self.message = message
        self.settled = False


class MessageIntake:
    """Takes the messages of one connection after the other, each message in a task of its own.

    Args:
        config: its bounds.
        topics: what is taken.
        client_id: the session's name.
        jobs: stores jobs, waits for one to start or end, and has the clock.
        admit: charges a client's rate. Raises RateLimited or Draining.
        refused: counts a message that is refused, by the error's code.
        stats: counts what is done.
    """

    def __init__(
        self,
        config: MqttConfig,
        topics: Topics,
        client_id: str,
        jobs: JobParts,
        admit: Callable[[str], None],
        refused: Callable[[str], None],
        stats: MqttStats,
    ) -> None:
        self._config = config
        self._topics = topics
        self._client_id = client_id
        self._jobs = jobs
        self._admit = admit
        self._refused = refused
        self._stats = stats
        self._unsettled: deque[_Delivery] = deque()
        self._arrived: asyncio.Queue[_Delivery] = asyncio.Queue()
        self._waiting = Fault(log, logging.WARNING)
        self._refusing = Fault(log, logging.WARNING)
        self._told: set[tuple[str, str]] = set()  # kinds of refusals that were logged on this connection

    @property
    def problems(self) -> tuple[str, ...]:
        return tuple(problem for problem in (self._waiting.problem, self._refusing.problem) if problem)

    async def run(
        self, connection: Connection, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Take the messages of a connection until cancelled. What was not settled on an earlier one comes again."""
        self._unsettled.clear()
        self._told.clear()
        arrived = self._arrived = asyncio.Queue[_Delivery]()
        async with anyio.create_task_group() as tasks:
            task_status.started()
            while True:
                tasks.start_soon(self._take, connection, await arrived.get())

    def receive(self, message: Message) -> None:
        """Take a message. The broker sends at most `mqtt.receive_maximum` with QoS 1 before one is acknowledged."""
        if message.qos == 0 and len(self._unsettled) >= self._config.receive_maximum:
            self._stats.count("dropped")
            return
        delivery = _Delivery(message)
        self._unsettled.append(delivery)
        self._arrived.put_nowait(delivery)

    async def _take(self, connection: Connection, delivery: _Delivery) -> None:
        try:
            result = await self._settle(connection, delivery.message)
        except BrokerError:
            return
        self._stats.count(result)
        delivery.settled = True
        while self._unsettled and self._unsettled[0].settled:
            connection.acknowledge(self._unsettled.popleft().message)

    async def _settle(self, connection: Connection, message: Message) -> str:
        """Return what was done with the message. Raises BrokerError."""
        config = self._topics.find(message.topic)
        if config is None:  # the session has subscriptions of an earlier configuration
            return "ignored"
        own_topic = self._topics.own_answer_topic(config, message.topic)
        address = address_of(message, config, own_topic, self._client_id)
        try:
            topic = self._topics.answer_topic(config, message.topic, message.response_topic)
            address = msgspec.structs.replace(address, topic=topic)
            check_message(message, self._config.max_message_bytes)
            message = in_binary_mode(message, config.form)
            address = address_of(message, config, topic, self._client_id)
            submission = read_message(message, config, self._jobs.store.time.unix())
            hints = routing_hints(submission.headers, Caller(f"mqtt:{config.filter}", config.tags))
            deadlines_ms = [one for one in (hints.deadline_ms, submission.deadline_ms) if one is not None]
            hints = msgspec.structs.replace(hints, deadline_ms=min(deadlines_ms, default=None))
            priority = read_choice(submission.headers, PRIORITY, RANK) or config.priority
            reply, key = ReplyTo(address.encoded(), submission.is_new), submission.key
            return await self._accept(message, SubmittedJob(submission.body, hints, priority, key, key, reply=reply))
        except CausewayError as error:
            await self._refuse(connection, config, address, error)
        except Exception as error:
            log.error("a message could not be taken: %s", redacted(error))
            failure = CausewayError("the message could not be taken; the log of the box says why")
            await self._refuse(connection, config, address, failure)
        return "refused"

    async def _accept(self, message: Message, job: SubmittedJob) -> str:
        """Store the job, as soon as there is room. Raises CausewayError."""
        is_admitted = False
        while True:
            try:
                if not is_admitted:
                    self._admit(job.hints.client)
                    is_admitted = True
                accepted = await self._jobs.intake.accept(job)
            except _NO_ROOM as error:
                if message.qos == 0 or (job.priority == "bulk" and isinstance(error, OutboxFull)):
                    raise
                self._waiting.begin(f"messages wait unacknowledged, and the broker keeps the others: {error.message}")
                if isinstance(error, JobStoreUnavailable) and job.reply is not None:  # it may be stored
                    job = msgspec.structs.replace(job, reply=ReplyTo(job.reply.address))
                await self._jobs.runner.feed.change(min(max(error.retry_after_s or 0.0, _SHORTEST_S), _LONGEST_S))
            else:
                self._waiting.end("messages are taken again")
                return "known" if accepted.known else "accepted"

    async def _refuse(
        self, connection: Connection, config: MqttTopicConfig, address: AnswerAddress, error: CausewayError
    ) -> None:
        """Answer a message with an error, if there is a topic for that. Raises BrokerError."""
        self._refused(error.code)
        if (config.filter, error.code) not in self._told:
            self._told.add((config.filter, error.code))
            log.warning("messages on %r are refused (%s); the metrics count them", config.filter, error.code)
        if not address.topic:
            return
        try:
            await connection.publish(refusal(address, error))
        except (PublishRefused, AnswerTooLarge) as failure:
            self._refusing.begin(f"errors cannot be published to {address.topic!r}: {failure}")
        else:
            self._refusing.end("errors are published again")
