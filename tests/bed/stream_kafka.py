"""Kafka's protocol for `python -m tests.bench streams --broker kafka`. Needs the extra `kafka` and confluent-kafka.

The mock cluster's process stays: killing the broker breaks its connections, also between a request and its answer, and
nothing listens for a while. What a server does with its disk is not shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.errors import KafkaError

from tests.cloud_pool.streams.kafka_broker import read_topic
from tests.kafka_server import KafkaServer

from .stream_brokers import SUBJECTS, Publisher

LANES = 6
_PATIENCE_S = 20.0
_FAULTS = (KafkaError, OSError, asyncio.TimeoutError)


class KafkaBroker:
    """The mock cluster, see tests.kafka_cluster."""

    def __init__(self) -> None:
        logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # it logs each attempt to connect
        self._server = KafkaServer()
        self.topic, self.kill, self.start, self.close = (
            self._server.topic,
            self._server.kill,
            self._server.start,
            self._server.close,
        )

    async def create(self) -> None:
        for name in SUBJECTS:
            self._server.create_topic(name, LANES)

    @asynccontextmanager
    async def publisher(self) -> AsyncIterator[Publisher]:
        # It repeats requests by itself; idempotent, so that it changes no order.
        async with AIOKafkaProducer(bootstrap_servers=self._server.host, enable_idempotence=True) as producer:
            yield _KafkaPublisher(producer)

    async def outcomes(self) -> list[dict[str, Any]]:
        while True:
            with contextlib.suppress(*_FAULTS):
                async with asyncio.timeout(_PATIENCE_S):
                    topics = [await read_topic(self._server.host, name) for name in SUBJECTS[1:]]
                return [json.loads(record.value or b"") for records in topics for record in records]
            await asyncio.sleep(0.1)

    @asynccontextmanager
    async def answers(self) -> AsyncIterator[AsyncIterator[bytes]]:
        async with AIOKafkaConsumer(SUBJECTS[1], bootstrap_servers=self._server.host) as consumer:
            for partition in consumer.assignment():
                await consumer.position(partition)  # from here on
            yield (record.value or b"" async for record in consumer)


class _KafkaPublisher:
    def __init__(self, producer: AIOKafkaProducer) -> None:
        self._producer = producer

    async def publish(self, body: bytes, key: str = "") -> None:
        await self._producer.send_and_wait(SUBJECTS[0], body, key=key.encode() or None)
