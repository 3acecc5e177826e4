"""The bridge to a broker: connects again and again, takes messages, publishes answers and this box's state."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Iterator

import anyio

from router.errors import CausewayError, JobStoreUnavailable, ResultTooLarge
from router.serving.gauges import Gauge
from router.serving.logs import redacted

from ..config.schema import MqttConfig
from ..jobs.entry import JobEntry, JobParts
from ..jobs.record import DueReply
from ..jobs.running.run import JobFeed
from ..jobs.store import JobOutbox
from ..observability.logs import Fault
from ..observability.metrics import Metrics
from ..serving.service import Service
from .connection import Connection
from .intake import MessageIntake, MqttStats
from .messages import AnswerTooLarge, BrokerError, PublishRefused, answer_of, error_answer
from .topics import BrokerUrl, Topics

log = logging.getLogger(__name__)

_SHORTEST_S, _LONGEST_S = 1.0, 60.0  # between two attempts to connect
_GOODBYE_S = 2.0
_SHORT_S = 10.0  # a connection that lasts no longer is a sign of trouble,
_SHORT_ONES = 3  # and so many of them in a row are told
_ONLINE, _OFFLINE = "online", "offline"
_AT_ONCE = 8
_POLL_S = 1.0  # for jobs that end without a run
_REFUSED_S = 60.0  # until an answer is tried again that the broker refused
_MESSAGES = "Messages, by what was done (accepted, known, refused, ignored, dropped: QoS 0 without room)."


class MqttBridge:
    """Keeps one connection to the broker after the other.

    Args:
        config: with an address.
        jobs: keeps the jobs that messages become.
        service: charges rates.
        metrics: counts refusals.
        chance: draws the pauses between attempts, so that a thousand boxes do not come back together.

    Raises:
        ConfigError: the address or a topic is invalid.
    """

    def __init__(
        self, config: MqttConfig, jobs: JobEntry, service: Service, metrics: Metrics, chance: random.Random
    ) -> None:
        self._config = config
        self._broker = BrokerUrl(config.url)
        Topics(config, config.state_topic)
        self._jobs = jobs
        self._service = service
        self._metrics = metrics
        self._chance = chance
        self._away = Fault(log, logging.WARNING)
        self._refused = Fault(log, logging.ERROR)
        self._denied = Fault(log, logging.ERROR)
        self._intake: MessageIntake | None = None
        self._answers: AnswerPublisher | None = None
        self._was_connected = False
        self.stats = MqttStats(messages={})

    @property
    def problems(self) -> tuple[str, ...]:
        """What operators should look at."""
        link = tuple(fault.problem for fault in (self._away, self._refused, self._denied) if fault.problem)
        intake = () if self._intake is None else self._intake.problems
        answers = () if self._answers is None else self._answers.problems
        return (*link, *intake, *answers)

    async def run(self) -> None:
        """Stay connected until cancelled."""
        parts = await self._parts()
        client_id = self._config.client_id or f"causeway-{parts.store.name}"
        state_topic = self._config.state_topic.replace("{client_id}", client_id)
        topics = Topics(self._config, state_topic)
        self._intake = MessageIntake(
            self._config,
            topics,
            client_id,
            parts,
            self._service.admit,
            self._metrics.request_rejected,
            self.stats,
        )
        self._answers = AnswerPublisher(parts.store, parts.runner.feed, self.stats)
        pause_s, short = _SHORTEST_S, 0
        while True:
            connection = Connection(self._config, client_id, state_topic, self._intake.receive)
            began = anyio.current_time()
            try:
                error = await self._converse(connection, self._intake, self._answers, topics, state_topic)
            except Exception as failure:  # a fault of ours: the next connection may do without it
                log.error("the connection to the broker failed: %s", redacted(failure))
                error = BrokerError(f"{self._broker}: an internal error")
            finally:
                await self._leave(connection, state_topic)
                was_connected, self.stats.connected = self.stats.connected, False
            is_short = anyio.current_time() - began < _SHORT_S
            short = short + 1 if was_connected and is_short else 0
            if short >= _SHORT_ONES:
                message = f"{error.message} soon each time: another client may have the name {client_id!r}"
                error = BrokerError(message, lasting=True)
            self._tell(error)
            await anyio.sleep(pause_s * (0.75 + 0.5 * self._chance.random()))
            pause_s = min(pause_s * 2.0, _LONGEST_S) if is_short or not was_connected else _SHORTEST_S

    async def _parts(self) -> JobParts:
        while True:
            with contextlib.suppress(JobStoreUnavailable):  # the store says so
                return await self._jobs.open()
            await anyio.sleep(_SHORTEST_S)

    async def _converse(
        self,
        connection: Connection,
        intake: MessageIntake,
        answers: AnswerPublisher,
        topics: Topics,
        state_topic: str,
    ) -> BrokerError:
        """Use one connection until it is lost. Returns why."""
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
        """The connection is made."""
        if self._was_connected and not connection.session_present:
            log.warning(
                "%s has forgotten this box: messages since it was connected last are lost (mqtt.session_expiry_s)",
                self._broker,
            )
        if not self._was_connected and not self._away.problem and not self._refused.problem:
            log.info("connected to the broker %s", self._broker)
        self._was_connected = self.stats.connected = True
        self._away.end(f"the broker {self._broker} is connected again")
        self._refused.end(f"the broker {self._broker} accepts this box again")
        if refused:
            self._denied.begin(f"the broker refuses subscriptions: {', '.join(refused)}")
        else:
            self._denied.end("the broker accepts all subscriptions again")

    def _tell(self, error: BrokerError) -> None:
        fault, other = (self._refused, self._away) if error.lasting else (self._away, self._refused)
        other.problem = ""
        fault.begin(f"the broker cannot be used: {error.message}")

    async def _publish_state(self, connection: Connection, topic: str, state: str) -> None:
        try:
            await connection.publish_state(topic, state)
        except PublishRefused as error:
            log.warning("the broker refuses this box's state on %s (%s)", topic, error)

    async def _leave(self, connection: Connection, state_topic: str) -> None:
        """Say that this box is offline, and close the connection."""
        with anyio.CancelScope(shield=True), anyio.move_on_after(_GOODBYE_S):
            if state_topic and self.stats.connected:
                with contextlib.suppress(BrokerError):
                    await self._publish_state(connection, state_topic, _OFFLINE)
            await connection.close()

    def gauges(self) -> Iterator[Gauge]:
        """Yield the gauges of `/metrics`."""
        yield Gauge("causeway_edge_mqtt_connected", "1: the broker is connected.", float(self.stats.connected))
        for result, count in self.stats.messages.items():
            yield Gauge("causeway_edge_mqtt_messages", _MESSAGES, count, (("result", result),), is_counter=True)
        yield Gauge("causeway_edge_mqtt_answers", "Answers that the broker took.", self.stats.answers, is_counter=True)
        if (outbox := self._jobs.stats) is not None:
            yield Gauge("causeway_edge_mqtt_unsent_answers", "Answers that wait for the broker.", outbox.replies_due)


class AnswerPublisher:
    """Publishes what is due. An answer may be published twice if the connection is lost, and is never lost itself."""

    def __init__(self, store: JobOutbox, feed: JobFeed, stats: MqttStats) -> None:
        self._store = store
        self._feed = feed
        self._stats = stats
        self._refused = Fault(log, logging.ERROR)
        self._lost = 0

    @property
    def problems(self) -> tuple[str, ...]:
        return (self._refused.problem,) if self._refused.problem else ()

    async def run(self, connection: Connection) -> None:
        """Publish until cancelled."""
        while True:
            self._tell_lost()
            due: list[DueReply] = []
            if self._store.stats.replies_due:
                with contextlib.suppress(CausewayError):  # the store says so
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
            self._refused.begin(f"the broker refuses answers ({error}): correct what it allows this box to publish")
            await self._postpone(reply)
        except (BrokerError, JobStoreUnavailable):
            await anyio.sleep(_POLL_S)  # it is published again
        except Exception as error:  # of one answer, such as an address that cannot be read
            log.error("an answer could not be published: %s", redacted(error))
            await self._postpone(reply)
        else:
            self._stats.answers += 1
            self._refused.end("the broker takes answers again")

    async def _postpone(self, reply: DueReply) -> None:
        try:
            await self._store.run(self._store.replies.sent, reply, again_s=_REFUSED_S)
        except JobStoreUnavailable:
            await anyio.sleep(_POLL_S)

    def _tell_lost(self) -> None:
        lost = self._store.stats.replies_lost
        if lost > self._lost:
            log.warning("%d answers were deleted before they could be published: jobs.result_ttl_s", lost - self._lost)
        self._lost = lost
