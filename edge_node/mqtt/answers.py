"""Publishes the answers of jobs that came by MQTT, each until the broker has acknowledged it."""

from __future__ import annotations

import contextlib
import logging

import anyio

from router.errors import CausewayError, JobStoreUnavailable, ResultTooLarge
from router.serving.logs import redacted

from ..jobs.record import DueReply
from ..jobs.running.run import JobFeed
from ..jobs.store import JobOutbox
from ..observability.logs import Fault
from .connection import Connection
from .envelope import AnswerTooLarge, BrokerError, PublishRefused
from .intake import MqttStats
from .messages import answer_of, error_answer

log = logging.getLogger(__name__)

_AT_ONCE = 8
_POLL_S = 1.0  # for jobs that end without a run
_REFUSED_S = 60.0  # until an answer is tried again that the broker refused


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
                    due = await self._store.due_replies(_AT_ONCE)
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
            await self._store.replied(reply)
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
            await self._store.replied(reply, again_s=_REFUSED_S)
        except JobStoreUnavailable:
            await anyio.sleep(_POLL_S)

    def _tell_lost(self) -> None:
        lost = self._store.stats.replies_lost
        if lost > self._lost:
            log.warning("%d answers were deleted before they could be published: jobs.result_ttl_s", lost - self._lost)
        self._lost = lost
