"""Kafka's protocol as the conformance tests need it. Imported on demand: it needs the extra `kafka`."""

from __future__ import annotations

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord

from causeway_server.cloud_pool.brokers.port import TopicAddress, parse_topic
from tests.kafka_server import KafkaServer

from .brokers import numbers


class KafkaBroker:
    """Kafka's protocol. As the bindings of CloudEvents say, a record's key is the event's `partitionkey`."""

    drops_repeated_ids = False

    def __init__(self, server: KafkaServer) -> None:
        self._server = server
        self.kill, self.start, self.pause, self.resume = server.kill, server.start, server.pause, server.resume

    async def create_topic(self, lanes: int = 1) -> TopicAddress:
        address = parse_topic(self._server.topic(f"topic{next(numbers)}"), "test")
        for one in (address, address.sibling(".dead")):
            self._server.create_topic(one.topic, lanes)
        return address

    async def set_full(self, address: TopicAddress, full: bool) -> None:
        self._server.set_full(full)

    async def send(self, address: TopicAddress, body: bytes, key: str = "", **headers: str) -> None:
        named = [(name.replace("_", "-"), value.encode()) for name, value in headers.items()]
        async with AIOKafkaProducer(bootstrap_servers=self._server.host) as producer:
            await producer.send_and_wait(address.topic, body, key=key.encode() or None, headers=named)

    async def read(self, address: TopicAddress) -> list[bytes]:
        found = await read_topic(self._server.host, address.topic)
        found.sort(key=lambda record: (record.timestamp, record.offset))
        return [record.value or b"" for record in found]


async def read_topic(host: str, name: str) -> list[ConsumerRecord[bytes, bytes]]:
    """Return what a topic has now, each partition's records in order."""
    found: list[ConsumerRecord[bytes, bytes]] = []
    async with AIOKafkaConsumer(name, bootstrap_servers=host, auto_offset_reset="earliest") as consumer:
        ends = await consumer.end_offsets(consumer.assignment())
        while any([await consumer.position(partition) < end for partition, end in ends.items()]):
            for records in (await consumer.getmany(timeout_ms=50)).values():
                found += records
    return found
