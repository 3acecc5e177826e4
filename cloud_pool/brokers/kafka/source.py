"""Kafka as a source. Lanes are the partitions of the topic; the group divides them between a pipeline's processes.

1. Offsets are committed up to the first message that is not acknowledged.
2. The group takes all partitions back before it divides them again. Work in progress continues meanwhile. Afterwards
`lost_lanes` reports the lanes given to other processes; in the remaining lanes, uncommitted messages are redelivered.

Ranges are read outside any group, so that no pipeline's offsets are affected.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

import anyio
from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, ConsumerRecord, TopicPartition
from aiokafka.errors import CommitFailedError, IllegalStateError

from ..port import BrokerLogin, BrokerUnavailable, IncomingMessage, TopicAddress, TopicLag
from .client import FAULTS, READ_COMMITTED, TIMEOUT_S, client_options, require_topic, started, stop, translated

_HEARTBEATS = 6  # in the time after which a silent process loses its lanes
_REBALANCE_S = 30  # for all processes to give their lanes back
_NEVER_MS = 2**31 - 1


class KafkaSource(ConsumerRebalanceListener):  # type: ignore[misc]
    """A MessageSource: messages of the partitions that the group `name` assigns to this process.

    `lost_after_s`: silence after which a process loses its lanes.
    """

    needs_lease = False

    def __init__(self, address: TopicAddress, name: str, login: BrokerLogin, *, lost_after_s: float) -> None:
        """Create the source. Raises ConfigError."""
        self._address = address
        self._name = name
        self._options = client_options(address, login)
        self._session_ms = int(lost_after_s * 1000)
        self._opened: AIOKafkaConsumer | None = None
        self._offsets: dict[TopicPartition, ContiguousOffsets] = {}
        self._committing = asyncio.Lock()
        self._lanes: set[str] = set()
        self._lost: set[str] = set()
        self._lanes_lost = anyio.Event()

    async def open(self) -> None:
        """Connect and join the group. Raises ConfigError if there is no such topic."""
        consumer = await started(self._make_consumer, self._address)
        self._opened = consumer
        await require_topic(consumer, self._address)
        consumer.subscribe([self._address.topic], listener=self)

    def _make_consumer(self) -> AIOKafkaConsumer:
        return AIOKafkaConsumer(
            group_id=self._name,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            isolation_level=READ_COMMITTED,
            session_timeout_ms=self._session_ms,
            heartbeat_interval_ms=self._session_ms // _HEARTBEATS,
            max_poll_interval_ms=_NEVER_MS,  # a full pipeline asks for no messages, and is alive
            rebalance_timeout_ms=_REBALANCE_S * 1000,
            **self._options,
        )

    @property
    def _consumer(self) -> AIOKafkaConsumer:
        assert self._opened is not None, "open() comes first"
        return self._opened

    async def receive(self, most: int, wait_s: float, gather_s: float) -> list[IncomingMessage]:
        async with translated(wait_s + TIMEOUT_S):
            messages = await self._poll(most, wait_s)
        ends = time.monotonic() + gather_s
        with suppress(*FAULTS):  # What was found is delivered.
            while messages and len(messages) < most and (left_s := ends - time.monotonic()) > 0.0:
                messages += await self._poll(most - len(messages), left_s)
        return messages

    async def _poll(self, most: int, wait_s: float) -> list[IncomingMessage]:
        records = await self._consumer.getmany(timeout_ms=max(1, int(wait_s * 1000)), max_records=most)
        messages = []
        for partition, batch in records.items():
            offsets = self._offsets.setdefault(partition, ContiguousOffsets())
            for record in batch:
                offsets.deliver(record.offset)
                messages.append(incoming(record))
        return messages

    async def acknowledge(self, message: IncomingMessage) -> None:
        partition, offset = _place(message)
        if partition in self._offsets:
            self._offsets[partition].acknowledge(offset)
            await self._commit()

    async def extend_ack(self, messages: Sequence[IncomingMessage]) -> None:
        """No-op, because the client itself tells the group that this process is alive."""

    async def reset(self) -> None:
        """Seek back to the first message that is not acknowledged."""
        for partition, offsets in self._offsets.items():
            floor = offsets.floor
            offsets.reset()
            if floor is not None and partition in self._consumer.assignment():
                self._consumer.seek(partition, floor)

    async def lost_lanes(self) -> set[str]:
        """Wait until the group has given lanes of this process to others, and return those lanes."""
        await self._lanes_lost.wait()
        self._lanes_lost = anyio.Event()
        lost, self._lost = self._lost, set()
        return lost

    async def lag(self) -> TopicLag:
        """Return this process's consumer lag, with transaction markers. Raises BrokerUnavailable."""
        async with translated():
            partitions = self._consumer.assignment()
            ends = await self._consumer.end_offsets(partitions) if partitions else {}
            waiting = 0
            for partition, end in ends.items():
                waiting += max(0, end - await self._consumer.position(partition))
        return TopicLag(waiting, sum(offsets.unacknowledged for offsets in self._offsets.values()))

    async def close(self) -> None:
        """Commit, and leave the group."""
        if self._opened is not None:
            with suppress(BrokerUnavailable):
                await self._commit()
            await stop(self._opened)

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        """Commit the acknowledged messages (2)."""
        with suppress(BrokerUnavailable):
            await self._commit()
        for partition in revoked:
            self._offsets.pop(partition, None)

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        """Record which lanes other processes now have."""
        lanes = {str(partition.partition) for partition in assigned}
        self._lost = (self._lost | self._lanes) - lanes
        self._lanes = lanes
        if self._lost:
            self._lanes_lost.set()

    async def _commit(self) -> None:
        """Commit up to the first unacknowledged message. Later acknowledgements are part of the next commit."""
        async with self._committing, translated():
            due = {partition: offsets.to_commit() for partition, offsets in self._offsets.items()}
            new = {partition: offset for partition, offset in due.items() if offset is not None}
            try:
                if new:
                    await self._consumer.commit(new)
            except (CommitFailedError, IllegalStateError):
                return  # (2) The group divides the lanes: this comes again.
            for partition, offset in new.items():
                if partition in self._offsets:
                    self._offsets[partition].committed(offset)


def incoming(record: ConsumerRecord[bytes, bytes]) -> IncomingMessage:
    return IncomingMessage(
        body=record.value or b"",
        headers={name.lower(): value.decode("utf-8", "replace") for name, value in record.headers},
        key=(record.key or b"").decode("utf-8", "replace"),
        lane=str(record.partition),
        position=f"{record.partition}-{record.offset}",
        published_at=record.timestamp / 1000.0,
        receipt=(TopicPartition(record.topic, record.partition), record.offset),
    )


def _place(message: IncomingMessage) -> tuple[TopicPartition, int]:
    assert isinstance(message.receipt, tuple)
    return message.receipt


class ContiguousOffsets:
    """The offsets of one partition. Only those before the first unacknowledged message may be committed.

    A commit covers all lower offsets, but messages end in any order.
    """

    def __init__(self) -> None:
        self._open: set[int] = set()
        self._next: int | None = None  # behind the last delivery
        self._committed: int | None = None

    @property
    def unacknowledged(self) -> int:
        return len(self._open)

    def deliver(self, offset: int) -> None:
        """Record that a message was received."""
        self._open.add(offset)
        self._next = max(offset + 1, self._next or 0)

    def acknowledge(self, offset: int) -> None:
        """Record that a message has been handled."""
        self._open.discard(offset)

    @property
    def floor(self) -> int | None:
        """First offset that is not acknowledged; None before the first delivery."""
        return min(self._open, default=self._next)

    def to_commit(self) -> int | None:
        """Return the offset to commit; None if it is already committed."""
        return None if self.floor == self._committed else self.floor

    def committed(self, offset: int) -> None:
        self._committed = offset

    def reset(self) -> None:
        """Forget the unacknowledged deliveries, which come again from `floor` on."""
        self._next = self.floor
        self._open.clear()
