"""A real broker, as the tests of pipelines use it."""

from __future__ import annotations

import asyncio
import itertools

import nats
from nats.js.api import DiscardPolicy, StreamConfig

from causeway_server.cloud_pool.brokers.jetstream import JetStreamSink, JetStreamSource
from causeway_server.cloud_pool.brokers.topics import (
    BrokerLogin,
    IncomingMessage,
    OutgoingMessage,
    TopicAddress,
    parse_topic,
)
from tests.nats_server import NatsServer

NO_LOGIN = BrokerLogin()
ACK_WAIT_S = 5.0
numbers = itertools.count(1)


class NatsBroker:
    """JetStream. Each topic is a stream of its own."""

    def __init__(self, server: NatsServer) -> None:
        self._server = server
        self.kill, self.start, self.pause, self.resume = server.kill, server.start, server.pause, server.resume

    async def create_topic(self) -> TopicAddress:
        """Create a topic that no other test has, and its sibling `.dead`."""
        name = f"topic{next(numbers)}"
        client = await nats.connect(self._server.host)
        await client.jetstream().add_stream(StreamConfig(name=name, subjects=[name, f"{name}.*"]))
        await client.close()
        return parse_topic(self._server.topic(name), "test")

    async def send(self, address: TopicAddress, body: bytes, **headers: str) -> None:
        """Publish as any producer does: without an id of ours."""
        client = await nats.connect(self._server.host)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        await client.jetstream().publish(address.topic, body, headers=named or None)
        await client.close()

    async def set_full(self, address: TopicAddress, full: bool) -> None:
        """Leave the topic without room for another message, or make room again."""
        client = await nats.connect(self._server.host)
        stream = await client.jetstream().stream_info(address.topic)
        room = max(1, stream.state.bytes) if full else -1
        await client.jetstream().update_stream(stream.config.evolve(discard=DiscardPolicy.NEW, max_bytes=room))
        await client.close()

    async def read(self, address: TopicAddress) -> list[bytes]:
        """Return all messages of a topic, in order."""
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


def source_of(address: TopicAddress, *, ack_wait_s: float = ACK_WAIT_S) -> JetStreamSource:
    """Return the source of the topic's pipeline."""
    return JetStreamSource(address, f"of-{address.topic}", NO_LOGIN, ack_wait_s=ack_wait_s)


def sink_of(address: TopicAddress) -> JetStreamSink:
    return JetStreamSink(address, NO_LOGIN)


def outgoing(name: str, body: bytes = b"{}") -> OutgoingMessage:
    return OutgoingMessage(id=name, body=body, content_type="application/json")


async def receive_messages(source: JetStreamSource, count: int) -> list[IncomingMessage]:
    """Receive so many messages, without acknowledging them."""
    found: list[IncomingMessage] = []
    async with asyncio.timeout(60.0):
        while len(found) < count:
            found += await source.receive(count - len(found), 1.0, 0.01)
    return found


async def receive_all(source: JetStreamSource, count: int) -> list[bytes]:
    """Return the bodies of so many messages."""
    return [message.body for message in await receive_messages(source, count)]
