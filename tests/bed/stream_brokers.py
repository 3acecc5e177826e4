"""The brokers of `python -m tests.bench streams`: each is killed, and its data are there when it is back."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import nats
import nats.errors
from nats.js.api import AckPolicy, ConsumerConfig, StreamConfig
from nats.js.client import JetStreamContext

from tests.nats_server import NatsServer

SUBJECTS = ["questions", "answers", "answers.dead"]
_WITHOUT_ACKS = ConsumerConfig(ack_policy=AckPolicy.NONE)  # else a consumer gets a thousand messages at most
_NATS_FAULTS = (nats.errors.Error, OSError, asyncio.TimeoutError)


class Publisher(Protocol):
    async def publish(self, body: bytes, key: str = "") -> None:
        """Publish a question until the broker has it."""


class StreamBroker(Protocol):
    """A broker and its topics."""

    def topic(self, name: str) -> str:
        """Return the address of a topic."""

    async def create(self) -> None:
        """Create the topics."""

    def publisher(self) -> AbstractAsyncContextManager[Publisher]:
        """A client that connects again whenever it must."""

    async def outcomes(self) -> list[dict[str, Any]]:
        """Return all outcomes, each key's in the order of the topic."""

    def answers(self) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Answers from now on."""

    def kill(self) -> None: ...

    def start(self) -> None: ...

    def close(self) -> None: ...


class NatsBroker:
    """A nats-server with JetStream."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._server = NatsServer(folder)
        self.topic, self.kill, self.start, self.close = (
            self._server.topic,
            self._server.kill,
            self._server.start,
            self._server.kill,
        )

    @asynccontextmanager
    async def _stream(self) -> AsyncIterator[JetStreamContext]:
        client = await nats.connect(
            self._server.host, max_reconnect_attempts=-1, reconnect_time_wait=0.1, error_cb=_say_nothing
        )
        try:
            yield client.jetstream(timeout=2.0)
        finally:
            await client.close()

    async def create(self) -> None:
        async with self._stream() as stream:
            await stream.add_stream(StreamConfig(name="bed", subjects=SUBJECTS))

    @asynccontextmanager
    async def publisher(self) -> AsyncIterator[Publisher]:
        async with self._stream() as stream:
            yield _NatsPublisher(stream)

    async def outcomes(self) -> list[dict[str, Any]]:
        while True:
            with contextlib.suppress(*_NATS_FAULTS):  # on a busy machine a reply may be late
                async with self._stream() as stream:
                    return await _read_nats(stream)

    @asynccontextmanager
    async def answers(self) -> AsyncIterator[AsyncIterator[bytes]]:
        async with self._stream() as stream:
            subscription = await stream.subscribe(
                SUBJECTS[1],
                stream="bed",
                ordered_consumer=True,
                deliver_policy="new",  # type: ignore[arg-type]
            )
            yield (message.data async for message in subscription.messages)


async def _say_nothing(_error: Exception) -> None:
    """The server is away as often as it is killed."""


class _NatsPublisher:
    def __init__(self, stream: JetStreamContext) -> None:
        self._stream = stream

    async def publish(self, body: bytes, key: str = "") -> None:
        while True:
            try:
                await self._stream.publish(SUBJECTS[0], body)
                return
            except _NATS_FAULTS:
                await asyncio.sleep(0.1)


async def _read_nats(stream: JetStreamContext) -> list[dict[str, Any]]:
    found = []
    for subject in SUBJECTS[1:]:
        subscription = await stream.pull_subscribe(subject, stream="bed", config=_WITHOUT_ACKS)
        left = (await subscription.consumer_info()).num_pending or 0
        while left > 0:
            fetched = await subscription.fetch(min(left, 500), timeout=20)
            left -= len(fetched)
            found += [json.loads(message.data) for message in fetched]
    return found
