"""What the conformance tests need of a broker, and each broker as that."""

from __future__ import annotations

import asyncio
import itertools
from typing import Protocol

import nats
from nats.js.api import DiscardPolicy, StreamConfig

from causeway_server.cloud_pool.brokers.open import open_sink, open_source
from causeway_server.cloud_pool.brokers.port import (
    BrokerLogin,
    IncomingMessage,
    MessageSink,
    MessageSource,
    OutgoingMessage,
    TopicAddress,
    parse_topic,
)
from tests.nats_server import NatsServer

NO_LOGIN = BrokerLogin()
ACK_WAIT_S = 5.0
SESSION_S = 2.5
numbers = itertools.count(1)


class RealBroker(Protocol):
    """A real broker."""

    drops_repeated_ids: bool

    async def create_topic(self, lanes: int = 1) -> TopicAddress:
        """Create a topic that no other test has, and its sibling `.dead`. `lanes`: if the broker has lanes."""

    async def send(self, address: TopicAddress, body: bytes, key: str = "", **headers: str) -> None:
        """Publish as any producer does: without an id of ours."""

    async def set_full(self, address: TopicAddress, full: bool) -> None:
        """Leave the topic without room for another message, or make room again."""

    async def read(self, address: TopicAddress) -> list[bytes]:
        """Return all messages of a topic, in order; without a key and with several lanes there is none."""

    def kill(self) -> None: ...

    def start(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class NatsBroker:
    """JetStream. Each topic is a stream of its own."""

    drops_repeated_ids = True

    def __init__(self, server: NatsServer) -> None:
        self._server = server
        self.kill, self.start, self.pause, self.resume = server.kill, server.start, server.pause, server.resume

    async def create_topic(self, lanes: int = 1) -> TopicAddress:
        name = f"topic{next(numbers)}"
        client = await nats.connect(self._server.host)
        await client.jetstream().add_stream(StreamConfig(name=name, subjects=[name, f"{name}.*"]))
        await client.close()
        return parse_topic(self._server.topic(name), "test")

    async def send(self, address: TopicAddress, body: bytes, key: str = "", **headers: str) -> None:
        client = await nats.connect(self._server.host)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        await client.jetstream().publish(address.topic, body, headers=named or None)
        await client.close()

    async def set_full(self, address: TopicAddress, full: bool) -> None:
        client = await nats.connect(self._server.host)
        stream = await client.jetstream().stream_info(address.topic)
        room = max(1, stream.state.bytes) if full else -1
        await client.jetstream().update_stream(stream.config.evolve(discard=DiscardPolicy.NEW, max_bytes=room))
        await client.close()

    async def read(self, address: TopicAddress) -> list[bytes]:
        client = await nats.connect(self._server.host)
        context, found = client.jetstream(), list[bytes]()
        stream = await context.find_stream_name_by_subject(address.topic)
        last = (await context.stream_info(stream)).state.last_seq
        for number in range(1, last + 1):
            message = await context.get_msg(stream, number)
            if message.subject == address.topic:
                found.append(message.data or b"")
        await client.close()
        return found


def source_of(address: TopicAddress, *, ack_wait_s: float = ACK_WAIT_S) -> MessageSource:
    """Return the source of the topic's pipeline.

    Kafka's groups know each other by their names alone. Whoever joins a group of the mock waits for its session's time.
    """
    if address.kind == "kafka":
        ack_wait_s = min(ack_wait_s, SESSION_S)
    return open_source(address, f"of-{address.topic}", NO_LOGIN, ack_wait_s=ack_wait_s)


def sink_of(address: TopicAddress) -> MessageSink:
    return open_sink(address, "pipeline", NO_LOGIN)


def outgoing(name: str, body: bytes = b"{}", key: str = "") -> OutgoingMessage:
    return OutgoingMessage(id=name, body=body, content_type="application/json", key=key)


async def receive_messages(source: MessageSource, count: int) -> list[IncomingMessage]:
    """Receive so many messages, without acknowledging them."""
    found: list[IncomingMessage] = []
    async with asyncio.timeout(60.0):
        while len(found) < count:
            found += await source.receive(count - len(found), 1.0, 0.01)
    return found


async def receive_all(source: MessageSource, count: int) -> list[bytes]:
    """Return the bodies of so many messages."""
    return [message.body for message in await receive_messages(source, count)]
