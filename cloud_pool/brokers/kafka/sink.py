"""Kafka as a sink: each outcome is visible once for readers with `isolation.level=read_committed`.

1. A lane has one transactional producer with its own id. A process that takes over the lane starts the producer again:
from then on the cluster refuses the previous producer, whose open transactions it has aborted.
2. A position is given by the lane's producer, before the outcome is recorded. If a message's position was given by
another producer, or the message is published again, it may be in the topic already, so the topic is searched for it.
3. The search goes up to the end of the topic, including open transactions: these end, or time out.

So a message is published once, even if several processes believe that they have the lane: the next producer finds a
published message, or the cluster refuses the earlier producer.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord, TopicPartition

from ..port import BrokerLogin, BrokerUnavailable, MessageTooLarge, OutgoingMessage, TopicAddress
from .client import (
    FAULTS,
    MAX_BYTES,
    READ_COMMITTED,
    client_options,
    require_topic,
    started,
    stop,
    translate,
    translated,
)

MESSAGE_ID = "causeway-id"
_CONTENT_TYPE = "content-type"
log = logging.getLogger(__name__)
_Fault = BrokerUnavailable | MessageTooLarge | None
_POLL_MS = 20
_SEARCH_S = 30.0
_TRANSACTION_S = 10.0


class LaneProducer:
    """The transactional producer of one lane. It starts as soon as the cluster answers.

    Messages that arrive during a transaction share the next one. While the cluster does not answer, the client repeats
    its requests, and a message stays in progress however often it is submitted. A producer ends with the first other
    error: a new one replaces it, and the open transaction is aborted.

    Args:
        on_stored: Callback that gets partition and offset of each committed message.
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
        """Return whether the message is being published."""
        return name in self._ended

    async def publish(self, message: OutgoingMessage) -> None:
        """Publish a message and wait for its commit, even if cancelled. Raises BrokerUnavailable, MessageTooLarge."""
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
            fault = translate(error)
            log.warning("%s: it is unknown whether a Kafka transaction was committed: %s", self._address, fault)
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
    return BrokerUnavailable("The lane's producer has ended.", retry_after_s=1.0)


class _Position(msgspec.Struct, frozen=True):
    producer: str
    ends: dict[int, int]  # known end offset by partition


class KafkaSink:
    """A MessageSink that publishes to a topic. `name`: name of the pipeline, for transactional ids."""

    def __init__(self, address: TopicAddress, name: str, login: BrokerLogin) -> None:
        """Create the sink. Raises ConfigError."""
        self._address = address
        self._name = name
        self._options = client_options(address, login)
        self._lanes: dict[str, LaneProducer] = {}
        self._ends: dict[int, int] = {}  # offset behind what is known, by partition

    @property
    def max_bytes(self) -> int:
        return MAX_BYTES

    async def open(self) -> None:
        consumer = await started(lambda: AIOKafkaConsumer(**self._options), self._address)
        try:
            await require_topic(consumer, self._address)
        finally:
            await stop(consumer)
        while not self._ends:
            with suppress(BrokerUnavailable):
                async with translated():
                    self._ends = {at.partition: end for at, end in (await self._read_ends()).items()}

    async def position(self, lane: str) -> str:
        """Return the known ends of the partitions. Raises BrokerUnavailable."""
        producer = await self._producer(lane)
        return msgspec.json.encode(_Position(producer.token, self._ends)).decode()

    async def publish(self, message: OutgoingMessage, lane: str, position: str, *, repeated: bool) -> bool:
        """Publish a message; return once its transaction is committed. Raises BrokerUnavailable or MessageTooLarge."""
        if len(message.body) > MAX_BYTES:
            raise MessageTooLarge(f"Kafka does not accept messages of more than {MAX_BYTES} bytes.")
        producer, since = await self._producer(lane), msgspec.json.decode(position, type=_Position)
        may_be_there = (repeated or since.producer != producer.token) and not producer.has(message.id)  # (2)
        if may_be_there and await self._is_published(message.id, since.ends):
            return False
        async with translated():
            await producer.publish(message)
        return True

    async def _producer(self, lane: str) -> LaneProducer:
        """Return the lane's producer, once it has started. Raises BrokerUnavailable."""
        producer = self._lanes.get(lane)
        if producer is None or producer.failed:
            producer = self._lanes[lane] = LaneProducer(
                lambda: self._make_producer(lane), self._address, self._on_stored
            )
        async with translated():
            await producer.started.wait()
        return producer

    def _make_producer(self, lane: str) -> AIOKafkaProducer:
        return AIOKafkaProducer(
            transactional_id=f"{self._name}.{self._address.topic}.{lane}",
            transaction_timeout_ms=int(_TRANSACTION_S * 1000),
            **self._options,
        )

    def _on_stored(self, partition: int, offset: int) -> None:
        self._ends[partition] = max(offset + 1, self._ends.get(partition, 0))

    async def _is_published(self, name: str, since: Mapping[int, int]) -> bool:
        """Return whether the message is in the topic (3). Raises BrokerUnavailable."""
        async with translated():
            ends = await self._read_ends()
            reader = await started(self._make_reader, self._address)
        try:
            for partition in ends:
                reader.seek(partition, since.get(partition.partition, 0))
            async with translated(_SEARCH_S):
                while any([await reader.position(partition) < end for partition, end in ends.items()]):
                    for batch in (await reader.getmany(timeout_ms=_POLL_MS)).values():
                        if any(_id_of(record) == name for record in batch):
                            return True
        finally:
            await stop(reader)
        return False

    def _make_reader(self) -> AIOKafkaConsumer:
        return AIOKafkaConsumer(
            self._address.topic, isolation_level=READ_COMMITTED, auto_offset_reset="earliest", **self._options
        )

    async def _read_ends(self) -> Mapping[TopicPartition, int]:
        """Return the ends of the partitions, including the messages of open transactions."""
        reader = await started(lambda: AIOKafkaConsumer(self._address.topic, **self._options), self._address)
        try:
            return await reader.end_offsets(reader.assignment())  # type: ignore[no-any-return]
        finally:
            await stop(reader)

    async def close(self) -> None:
        await asyncio.gather(*(lane.close() for lane in self._lanes.values()))


def _id_of(record: ConsumerRecord[Any, Any]) -> str:
    return next((value.decode("utf-8", "replace") for name, value in record.headers if name == MESSAGE_ID), "")
