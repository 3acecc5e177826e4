"""Ranges of a Kafka topic, read outside of any group: no pipeline's offsets are touched."""

from __future__ import annotations

from collections.abc import AsyncIterator

from aiokafka import AIOKafkaConsumer, TopicPartition

from router.errors import ConfigError

from ..address import BrokerLogin, MessageRange, TopicAddress
from ..port import IncomingMessage
from .client import READ_COMMITTED, client_options, require_topic, started, stop, translated
from .source import incoming

_POLL_MS = 200
_STUCK_S = 30.0


class KafkaHistory:
    """What is in the partitions of a topic."""

    def __init__(self, address: TopicAddress, login: BrokerLogin) -> None:
        """Raises ConfigError."""
        self._address = address
        self._options = client_options(address, login)
        self._consumer: AIOKafkaConsumer | None = None

    async def open(self) -> None:
        """Connect. Raises ConfigError if there is no such topic."""
        asking = await started(lambda: AIOKafkaConsumer(**self._options), self._address)
        try:
            await require_topic(asking, self._address)
        finally:
            await stop(asking)
        self._consumer = await started(
            lambda: AIOKafkaConsumer(
                self._address.topic, isolation_level=READ_COMMITTED, auto_offset_reset="earliest", **self._options
            ),
            self._address,
        )

    async def read(self, wanted: MessageRange) -> AsyncIterator[IncomingMessage]:
        """Yield the messages that are there now, each partition's in order.

        Raises BrokerUnavailable, or ConfigError for a partition that does not exist.
        """
        consumer = self._consumer
        assert consumer is not None, "open() comes first"
        async with translated():
            ends = await self._seek(consumer, wanted)
        while ends:
            async with translated(_STUCK_S):
                batches = await consumer.getmany(*ends, timeout_ms=_POLL_MS)
                positions = {partition: await consumer.position(partition) for partition in ends}
            for records in batches.values():
                for record in records:
                    message = incoming(record)
                    if wanted.holds(message.lane, record.offset, message.published_at):
                        yield message
            for partition, position in positions.items():
                if position >= ends[partition]:
                    consumer.pause(partition)
                    del ends[partition]

    async def _seek(self, consumer: AIOKafkaConsumer, wanted: MessageRange) -> dict[TopicPartition, int]:
        """Go to the beginning of the range. Returns the end of each partition that has messages of it."""
        assigned = consumer.assignment()
        partitions = [each for each in assigned if wanted.lane in (None, str(each.partition))]
        if not partitions:
            raise ConfigError(f"the topic has no partition {wanted.lane}", where="--replay")
        consumer.pause(*(assigned - set(partitions)))
        starts = await consumer.beginning_offsets(partitions)
        ends = await consumer.end_offsets(partitions)
        if wanted.since:
            found = await consumer.offsets_for_times(dict.fromkeys(partitions, int(wanted.since * 1000)))
            starts = {each: found[each].offset if found[each] is not None else ends[each] for each in partitions}
        for partition in partitions:
            starts[partition] = max(starts[partition], wanted.first)
            if wanted.last is not None:
                ends[partition] = min(ends[partition], wanted.last + 1)
            consumer.seek(partition, starts[partition])
        return {partition: end for partition, end in ends.items() if starts[partition] < end}

    async def close(self) -> None:
        """Disconnect."""
        if self._consumer is not None:
            await stop(self._consumer)
