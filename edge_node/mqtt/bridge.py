"""The bridge to a broker: reconnects, accepts messages, publishes answers and this device's state."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import anyio
import anyio.abc
import msgspec

from causeway_server.router.errors import CausewayError, Draining, JobStoreUnavailable, RateLimited, ResultTooLarge
from causeway_server.router.jobs.submission import RANK
from causeway_server.router.serving.logs import redacted
from causeway_server.router.serving.metrics import Sample
from causeway_server.router.serving.request import PRIORITY, read_choice

from ..config.schema import MqttConfig, MqttTopicConfig
from ..http.api import Caller, routing_hints
from ..jobs.api import SubmittedJob
from ..jobs.lazy_jobs import JobParts, LazyJobs
from ..jobs.record import DueReply, OutboxFull, ReplyTo
from ..jobs.run import JobFeed
from ..jobs.store import JobOutbox
from ..observability.logs import Fault
from ..observability.metrics import Metrics
from ..serving.service import Service
from .connection import Connection
from .messages import (
    AnswerAddress,
    AnswerTooLarge,
    BrokerError,
    Message,
    PublishRefused,
    address_of,
    answer_of,
    check_message,
    error_answer,
    read_message,
    refusal,
)
from .topics import BrokerUrl, Topics

log = logging.getLogger(__name__)

_MIN_PAUSE_S, _MAX_PAUSE_S = 1.0, 60.0  # pause between two attempts to connect
_GOODBYE_S = 2.0
_SHORT_S = 10.0  # a connection that lasts no longer indicates a fault,
_SHORT_ONES = 3  # and this many of them in a row are reported
_ONLINE, _OFFLINE = "online", "offline"
_AT_ONCE = 8
_POLL_S = 1.0  # for jobs that end without a run
_REFUSED_S = 60.0  # pause before an answer that the broker refused is sent again
_MIN_WAIT_S, _MAX_WAIT_S = 1.0, 30.0  # pause before a message without room is tried again
_NO_ROOM = (OutboxFull, RateLimited, JobStoreUnavailable, Draining)


class MqttStats(msgspec.Struct):
    """Counts since the start of the daemon."""

    connected: bool = False
    messages: Counter[str] = msgspec.field(default_factory=Counter)  # messages by result
    answers: int = 0


@dataclass(eq=False, repr=False)
class _Delivery:
    message: Message
    settled: bool = False


@dataclass(eq=False, repr=False)
class MessageIntake:
    """Accepts the messages of successive connections, each message in its own task.

    Each message is stored as a job, or refused with an answer, before it is acknowledged. Acknowledgements are sent in
    the order in which the messages came, as MQTT 5 requires. The cases:

    1. The message is stored, or is a known job: acknowledged.
    2. It cannot be a job: the error is published as its answer, then it is acknowledged.
    3. There is no room, or the disk fails: the message is kept and tried again, and not acknowledged, so that the
       broker holds the others back. A bulk message, and one with QoS 0, is refused as in (2) if there is no room.
    4. The connection is lost: the broker delivers the message again.
    """

    config: MqttConfig
    topics: Topics
    client_id: str  # the session's name
    jobs: JobParts  # stores jobs, waits for one to start or end, and has the clock
    service: Service
    metrics: Metrics
    stats: MqttStats
    _unsettled: deque[_Delivery] = field(default_factory=deque)
    _arrived: asyncio.Queue[_Delivery] = field(default_factory=asyncio.Queue)
    _waiting: Fault = field(default_factory=lambda: Fault(log, logging.WARNING))
    _refusing: Fault = field(default_factory=lambda: Fault(log, logging.WARNING))
    _logged_refusals: set[tuple[str, str]] = field(default_factory=set)  # on this connection

    @property
    def problems(self) -> tuple[str, ...]:
        return self._waiting.problem, self._refusing.problem

    async def run(
        self, connection: Connection, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Accept a connection's messages until cancelled; unsettled earlier ones are delivered again."""
        self._unsettled.clear()
        self._logged_refusals.clear()
        arrived = self._arrived = asyncio.Queue[_Delivery]()
        async with anyio.create_task_group() as tasks:
            task_status.started()
            while True:
                tasks.start_soon(self._take, connection, await arrived.get())

    def receive(self, message: Message) -> None:
        """Accept a message. The broker sends at most `mqtt.receive_maximum` with QoS 1 before one is acknowledged."""
        if message.qos == 0 and len(self._unsettled) >= self.config.receive_maximum:
            self.stats.messages["dropped"] += 1
            return
        delivery = _Delivery(message)
        self._unsettled.append(delivery)
        self._arrived.put_nowait(delivery)

    async def _take(self, connection: Connection, delivery: _Delivery) -> None:
        try:
            result = await self._settle(connection, delivery.message)
        except BrokerError:
            return
        self.stats.messages[result] += 1
        delivery.settled = True
        while self._unsettled and self._unsettled[0].settled:
            connection.acknowledge(self._unsettled.popleft().message)

    async def _settle(self, connection: Connection, message: Message) -> str:
        """Store or refuse a message; return the result. Raises BrokerError."""
        config = self.topics.find(message.topic)
        if config is None:  # the session has subscriptions of an earlier configuration
            return "ignored"
        own_topic = self.topics.own_answer_topic(config, message.topic)
        address = address_of(message, config, own_topic)
        try:
            topic = self.topics.answer_topic(config, message.topic, message.response_topic)
            address = msgspec.structs.replace(address, topic=topic)
            check_message(message, self.config.max_message_bytes)
            submission = read_message(message, config)
            hints = routing_hints(submission.headers, Caller(f"mqtt:{config.filter}", config.tags))
            deadlines_ms = [one for one in (hints.deadline_ms, submission.deadline_ms) if one is not None]
            hints = msgspec.structs.replace(hints, deadline_ms=min(deadlines_ms, default=None))
            priority = read_choice(submission.headers, PRIORITY, RANK) or config.priority
            reply, key = ReplyTo(address.encoded(), submission.is_new), submission.key
            return await self._accept(message, SubmittedJob(submission.body, hints, priority, key, key, reply=reply))
        except CausewayError as error:
            await self._refuse(connection, config, address, error)
        except Exception as error:
            log.error("An MQTT message could not be accepted: %s", redacted(error))
            failure = CausewayError("The message could not be accepted. See the device's log.")
            await self._refuse(connection, config, address, failure)
        return "refused"

    async def _accept(self, message: Message, job: SubmittedJob) -> str:
        """Store the job, as soon as there is room; return the result. Raises CausewayError."""
        is_admitted = False
        while True:
            try:
                if not is_admitted:
                    self.service.admit(job.hints.client)
                    is_admitted = True
                accepted = await self.jobs.intake.accept(job)
            except _NO_ROOM as error:
                if message.qos == 0 or (job.priority == "bulk" and isinstance(error, OutboxFull)):
                    raise
                self._waiting.begin(
                    f"Messages wait unacknowledged, and the broker holds back further ones: {error.message}"
                )
                if isinstance(error, JobStoreUnavailable) and job.reply is not None:  # it may be stored
                    job = msgspec.structs.replace(job, reply=ReplyTo(job.reply.address))
                await self.jobs.runner.feed.change(min(max(error.retry_after_s or 0.0, _MIN_WAIT_S), _MAX_WAIT_S))
            else:
                self._waiting.end("Messages are accepted again")
                return "known" if accepted.known else "accepted"

    async def _refuse(
        self, connection: Connection, config: MqttTopicConfig, address: AnswerAddress, error: CausewayError
    ) -> None:
        """Answer a message with an error, if there is a topic for it. Raises BrokerError."""
        self.metrics.request_rejected(error.code)
        if (config.filter, error.code) not in self._logged_refusals:
            self._logged_refusals.add((config.filter, error.code))
            log.warning(
                "Messages on %r are refused (%s). Only the first refusal is logged; the metrics count all of them.",
                config.filter,
                error.code,
            )
        if not address.topic:
            return
        try:
            await connection.publish(refusal(address, error))
        except (PublishRefused, AnswerTooLarge) as failure:
            self._refusing.begin(f"Errors cannot be published to {address.topic!r}: {failure}")
        else:
            self._refusing.end("Errors are published again")


class MqttBridge:
    """Keeps a connection to the broker, and reconnects, after random pauses (`rng`), so that a thousand devices do not
    reconnect together. Raises ConfigError if the address or a topic is invalid.
    """

    def __init__(
        self, config: MqttConfig, jobs: LazyJobs, service: Service, metrics: Metrics, rng: random.Random
    ) -> None:
        self._config = config
        self._broker = BrokerUrl(config.url)
        Topics(config, config.state_topic)
        self._jobs = jobs
        self._service = service
        self._metrics = metrics
        self._rng = rng
        self._away = Fault(log, logging.WARNING)
        self._refused = Fault(log, logging.ERROR)
        self._denied = Fault(log, logging.ERROR)
        self._intake: MessageIntake | None = None
        self._answers: AnswerPublisher | None = None
        self._was_connected = False
        self.stats = MqttStats()

    @property
    def problems(self) -> tuple[str, ...]:
        """Problems for operators."""
        link = (self._away.problem, self._refused.problem, self._denied.problem)
        intake = () if self._intake is None else self._intake.problems
        answers = "" if self._answers is None else self._answers.refused.problem
        return tuple(problem for problem in (*link, *intake, answers) if problem)

    async def run(self) -> None:
        """Stay connected until cancelled."""
        parts = await self._parts()
        client_id = self._config.client_id or f"causeway-{parts.store.name}"
        state_topic = self._config.state_topic.replace("{client_id}", client_id)
        topics = Topics(self._config, state_topic)
        self._intake = MessageIntake(self._config, topics, client_id, parts, self._service, self._metrics, self.stats)
        self._answers = AnswerPublisher(parts.store, parts.runner.feed, self.stats)
        pause_s, short = _MIN_PAUSE_S, 0
        while True:
            connection = Connection(self._config, client_id, state_topic, self._intake.receive)
            began = anyio.current_time()
            try:
                error = await self._converse(connection, self._intake, self._answers, topics, state_topic)
            except Exception as failure:  # an internal error: the next connection may work
                log.error("The connection to the MQTT broker failed: %s", redacted(failure))
                error = BrokerError(f"{self._broker}: an internal error occurred.")
            finally:
                await self._leave(connection, state_topic)
                was_connected, self.stats.connected = self.stats.connected, False
            is_short = anyio.current_time() - began < _SHORT_S
            short = short + 1 if was_connected and is_short else 0
            if short >= _SHORT_ONES:
                message = (
                    f"{error.message} This happens soon after each connection: another client may "
                    f"have the name {client_id!r}"
                )
                error = BrokerError(message, lasting=True)
            self._tell(error)
            await anyio.sleep(pause_s * (0.75 + 0.5 * self._rng.random()))
            pause_s = min(pause_s * 2.0, _MAX_PAUSE_S) if is_short or not was_connected else _MIN_PAUSE_S

    async def _parts(self) -> JobParts:
        while True:
            with contextlib.suppress(JobStoreUnavailable):  # the store reports it
                return await self._jobs.open()
            await anyio.sleep(_MIN_PAUSE_S)

    async def _converse(
        self, connection: Connection, intake: MessageIntake, answers: AnswerPublisher, topics: Topics, state_topic: str
    ) -> BrokerError:
        """Use one connection until it is lost. Return the reason."""
        async with anyio.create_task_group() as tasks:
            await tasks.start(intake.run, connection)
            try:
                await connection.open()
                refused = await connection.subscribe([topic.filter for topic in topics])
                if state_topic:
                    await self._publish_state(connection, state_topic, _ONLINE)
                self._greet(connection, refused)
                tasks.start_soon(answers.run, connection)
                error = await connection.lost()
            except BrokerError as failure:
                error = failure
            tasks.cancel_scope.cancel()
        return error

    def _greet(self, connection: Connection, refused: list[str]) -> None:
        """Record and log a new connection, and publish that the device is online."""
        if self._was_connected and not connection.session_present:
            log.warning(
                "%s has discarded this device's session, so messages since the last connection are lost "
                "(mqtt.session_expiry_s).",
                self._broker,
            )
        if not self._was_connected and not self._away.problem and not self._refused.problem:
            log.info("Connected to the broker %s.", self._broker)
        self._was_connected = self.stats.connected = True
        self._away.end(f"The broker {self._broker} is connected again")
        self._refused.end(f"The broker {self._broker} accepts this device again")
        if refused:
            self._denied.begin(f"The broker refuses subscriptions: {', '.join(refused)}")
        else:
            self._denied.end("The broker accepts all subscriptions again")

    def _tell(self, error: BrokerError) -> None:
        fault, other = (self._refused, self._away) if error.lasting else (self._away, self._refused)
        other.problem = ""
        fault.begin(f"The broker cannot be used: {error.message}")

    async def _publish_state(self, connection: Connection, topic: str, state: str) -> None:
        try:
            await connection.publish_state(topic, state)
        except PublishRefused as error:
            log.warning("The broker refuses the state that this device publishes on %s (%s).", topic, error)

    async def _leave(self, connection: Connection, state_topic: str) -> None:
        """Publish that this device is offline, and close the connection."""
        with anyio.CancelScope(shield=True), anyio.move_on_after(_GOODBYE_S):
            if state_topic and self.stats.connected:
                with contextlib.suppress(BrokerError):
                    await self._publish_state(connection, state_topic, _OFFLINE)
            await connection.close()

    def samples(self) -> Iterator[Sample]:
        """Yield the samples of `/metrics`."""
        yield Sample("causeway_edge_mqtt_connected", float(self.stats.connected))
        for result, count in self.stats.messages.items():
            yield Sample("causeway_edge_mqtt_messages", count, (("result", result),), kind="counter")
        yield Sample("causeway_edge_mqtt_answers", self.stats.answers, kind="counter")
        if (outbox := self._jobs.stats) is not None:
            yield Sample("causeway_edge_mqtt_unsent_answers", outbox.replies_due)


class AnswerPublisher:
    """Publishes due answers. If the connection is lost, an answer may be published twice, but never zero times."""

    def __init__(self, store: JobOutbox, feed: JobFeed, stats: MqttStats) -> None:
        self._store = store
        self._feed = feed
        self._stats = stats
        self.refused = Fault(log, logging.ERROR)
        self._lost = 0

    async def run(self, connection: Connection) -> None:
        """Publish answers until cancelled."""
        while True:
            self._tell_lost()
            due: list[DueReply] = []
            if self._store.stats.replies_due:
                with contextlib.suppress(CausewayError):  # the store reports it
                    due = await self._store.run(self._store.replies.due, _AT_ONCE)
            if not due:
                await self._feed.change(_POLL_S)
                continue
            async with anyio.create_task_group() as tasks:
                for reply in due:
                    tasks.start_soon(self._publish, connection, reply)

    async def _publish(self, connection: Connection, reply: DueReply) -> None:
        try:
            try:
                await connection.publish(answer_of(reply))
            except AnswerTooLarge as error:
                await connection.publish(error_answer(reply, ResultTooLarge(str(error))))
            await self._store.run(self._store.replies.sent, reply)
        except PublishRefused as error:
            self.refused.begin(f"The broker refuses answers. Correct its permissions for this device: {error}")
            await self._postpone(reply)
        except (BrokerError, JobStoreUnavailable):
            await anyio.sleep(_POLL_S)  # it is published again
        except Exception as error:  # an error of one answer, such as an unreadable address
            log.error("An answer could not be published: %s", redacted(error))
            await self._postpone(reply)
        else:
            self._stats.answers += 1
            self.refused.end("The broker accepts answers again")

    async def _postpone(self, reply: DueReply) -> None:
        try:
            await self._store.run(self._store.replies.sent, reply, again_s=_REFUSED_S)
        except JobStoreUnavailable:
            await anyio.sleep(_POLL_S)

    def _tell_lost(self) -> None:
        lost = self._store.stats.replies_lost
        if lost > self._lost:
            log.warning(
                "%d answers were deleted before they could be published (jobs.result_ttl_s).", lost - self._lost
            )
        self._lost = lost
