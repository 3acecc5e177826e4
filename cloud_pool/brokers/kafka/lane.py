"""The transactional producer of one lane of Kafka's sink.

Messages that come while a transaction is under way share the next one. While the cluster does not answer, the client
repeats its requests by itself, and a message stays under way however often it is asked for. A producer ends with the
first error that is more than that: a new one takes its place, and what this one had begun is aborted.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import Any

from aiokafka import AIOKafkaProducer

from ..address import TopicAddress
from ..port import BrokerUnavailable, MessageTooLarge, OutgoingMessage
from .client import FAULTS, started, stop, translate

MESSAGE_ID = "causeway-id"
_CONTENT_TYPE = "content-type"
_log = logging.getLogger("causeway.cloud.brokers")
_Fault = BrokerUnavailable | MessageTooLarge | None


class LaneProducer:
    """Starts at once, as soon as the cluster answers.

    Args:
        on_stored: gets partition and offset of each message that is committed
    """

    def __init__(
        self, make: Callable[[], AIOKafkaProducer], address: TopicAddress, on_stored: Callable[[int, int], None]
    ) -> None:
        self.token = secrets.token_hex(8)
        self.started = asyncio.Event()
        self.failed = False
        self._make = make
        self._address = address
        self._on_stored = on_stored
        self._waiting: list[OutgoingMessage] = []
        self._ended: dict[str, asyncio.Future[_Fault]] = {}  # of messages that are under way, by id
        self._wake = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    def has(self, name: str) -> bool:
        """Return whether the message is under way."""
        return name in self._ended

    async def publish(self, message: OutgoingMessage) -> None:
        """Return when the message is committed; a caller that gives up leaves it under way.

        Raises BrokerUnavailable or MessageTooLarge.
        """
        if self.failed:
            raise _ended_early()
        ended = self._ended.get(message.id)
        if ended is None:
            ended = self._ended[message.id] = asyncio.get_running_loop().create_future()
            self._waiting.append(message)
            self._wake.set()
        fault = await asyncio.shield(ended)
        if fault is not None:
            raise fault

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        producer = await started(self._make, self._address)
        self.started.set()
        try:
            while not self.failed:
                await self._wake.wait()
                self._wake.clear()
                batch, self._waiting = self._waiting, []
                if batch:
                    await self._commit(producer, batch)
        finally:
            self.failed = True
            for name in list(self._ended):
                self._end(name, _ended_early())
            await stop(producer)

    async def _commit(self, producer: AIOKafkaProducer, batch: list[OutgoingMessage]) -> None:
        sent: dict[str, asyncio.Future[Any]] = {}
        fault: _Fault = None
        try:
            async with producer.transaction():
                for message in batch:
                    sent[message.id] = await self._send(producer, message)
        except FAULTS as error:
            _log.warning("%s: a transaction has no known end: %s", self._address, type(error).__name__)
            fault = translate(error)
            self.failed = True
        for name, stored in sent.items():
            refusal = stored.exception() if stored.done() else None
            if fault is not None:
                self._end(name, fault)
            elif refusal is not None:
                self.failed = True  # the cluster misses a number in the sequence of messages from now on
                self._end(name, translate(refusal))
            else:
                self._on_stored(stored.result().partition, stored.result().offset)
                self._end(name, None)

    async def _send(self, producer: AIOKafkaProducer, message: OutgoingMessage) -> asyncio.Future[Any]:
        headers = [(MESSAGE_ID, message.id.encode()), (_CONTENT_TYPE, message.content_type.encode())]
        key = message.key.encode() if message.key else None
        sent: asyncio.Future[Any]
        sent = await producer.send(self._address.topic, message.body, key=key, headers=headers)
        return sent

    def _end(self, name: str, fault: _Fault) -> None:
        ended = self._ended.pop(name)
        if not ended.done():
            ended.set_result(fault)


def _ended_early() -> BrokerUnavailable:
    return BrokerUnavailable("the lane's producer has ended", retry_after_s=1.0)
