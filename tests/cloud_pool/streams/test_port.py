"""The conformance suite of the broker port: what `cloud_pool.brokers.port` says, on real brokers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from causeway_server.cloud_pool.brokers.port import (
    BrokerUnavailable,
    MessageSink,
    MessageSource,
    MessageTooLarge,
    OutgoingMessage,
    TopicAddress,
)
from causeway_server.router.errors import ConfigError
from tests.cloud_pool.jobs.conftest import until

from .brokers import RealBroker, outgoing, receive_all, receive_messages, sink_of, source_of

PATIENCE_S = 60.0
pytestmark = pytest.mark.slow


@asynccontextmanager
async def reading(address: TopicAddress, *, ack_wait_s: float = 30.0) -> AsyncIterator[MessageSource]:
    source = source_of(address, ack_wait_s=ack_wait_s)
    await source.open()
    try:
        yield source
    finally:
        await source.close()


@asynccontextmanager
async def writing(address: TopicAddress) -> AsyncIterator[MessageSink]:
    sink = sink_of(address)
    await sink.open()
    try:
        yield sink
    finally:
        await sink.close()


def numbers(first: int, last: int) -> list[bytes]:
    return [str(number).encode() for number in range(first, last + 1)]


async def publish(sink: MessageSink, first: int, last: int) -> None:
    for body in numbers(first, last):
        await store(sink, outgoing(body.decode(), body))


async def store(sink: MessageSink, message: OutgoingMessage) -> None:
    assert await sink.publish(message, "", await sink.position(""), repeated=False)


async def test_messages_come_in_order_with_what_they_carry(broker: RealBroker) -> None:
    topic, before = await broker.create_topic(), time.time()
    await broker.send(topic, b"first", content_type="application/json", Authorization="Bearer x")
    await broker.send(topic, b"second")
    async with reading(topic) as source:
        assert await receive_all(source, 0) == []
        first, second = await receive_messages(source, 2)
    assert (first.body, second.body) == (b"first", b"second")
    assert first.headers["content-type"] == "application/json"
    assert first.headers["authorization"] == "Bearer x"
    assert first.position != second.position
    assert abs(first.published_at - before) < PATIENCE_S


async def test_what_is_not_acknowledged_comes_again_before_new_messages(broker: RealBroker) -> None:
    """Also what was received beyond a gap; what is acknowledged without a gap never does."""
    topic = await broker.create_topic()
    async with writing(topic) as sink:
        await publish(sink, 1, 5)
        async with reading(topic) as source:
            received = await receive_messages(source, 5)
            for message in (received[0], received[1], received[3]):
                await source.acknowledge(message)
            await until_unacknowledged(source, 2)
        await publish(sink, 6, 7)
        async with reading(topic) as source:
            again = await receive_all(source, 5)
    assert [body for body in again if body != b"4"][:4] == [b"3", b"5", b"6", b"7"]


async def test_forgotten_messages_come_again_in_order(broker: RealBroker) -> None:
    topic = await broker.create_topic()
    async with writing(topic) as sink, reading(topic) as source:
        await publish(sink, 1, 4)
        assert await receive_all(source, 3) == numbers(1, 3)
        await source.reset()
        assert await receive_all(source, 4) == numbers(1, 4)


async def test_a_batch_ends_by_size_or_by_time(broker: RealBroker) -> None:
    topic = await broker.create_topic()
    async with writing(topic) as sink, reading(topic) as source:
        assert await source.receive(3, 0.05, 0.01) == []
        await source.reset()  # JetStream may still answer what was asked just now.
        await publish(sink, 1, 4)
        assert [message.body for message in await source.receive(3, 30.0, 30.0)] == numbers(1, 3)
        assert [message.body for message in await source.receive(3, 30.0, 0.01)] == [b"4"]


async def test_lag_counts_what_waits_and_what_is_in_progress(broker: RealBroker) -> None:
    topic = await broker.create_topic()
    for body in numbers(1, 5):
        await broker.send(topic, body)
    async with reading(topic) as source:
        received = await receive_messages(source, 2)
        lag = await source.lag()
        assert lag.waiting + lag.unacknowledged == 5
        await source.acknowledge(received[0])
        await until_unacknowledged(source, 1)
        lag = await source.lag()
        assert (lag.waiting, lag.unacknowledged) == (3, 1)


async def test_a_repeated_message_is_stored_once(broker: RealBroker) -> None:
    """It is looked for from its position on, whatever was published since; what is not there is published."""
    topic = await broker.create_topic()
    async with writing(topic) as sink:
        before = await sink.position("")
        await asyncio.gather(*(store(sink, outgoing(body.decode(), body)) for body in numbers(1, 300)))
        assert not await sink.publish(outgoing("300", b"again"), "", before, repeated=True)
        assert not await sink.publish(outgoing("1", b"again"), "", before, repeated=True)
        assert await sink.publish(outgoing("301", b"301"), "", before, repeated=True)
    async with writing(topic) as later:
        behind = await later.position("")
        assert not await later.publish(outgoing("2", b"again"), "", before, repeated=True)
        assert await later.publish(outgoing("302", b"302"), "", behind, repeated=True)
    assert sorted(await broker.read(topic), key=int) == numbers(1, 302)


async def test_two_processes_that_both_have_the_lane_publish_a_message_once(broker: RealBroker) -> None:
    """The first one does not know that the lane is the second one's now, and has published nothing yet."""
    if broker.drops_repeated_ids:
        pytest.skip("this broker drops the second one by its id")
    topic = await broker.create_topic()
    async with writing(topic) as first, writing(topic) as second:
        await insist_publish(first, b"0")
        position = await first.position("")
        behind = await second.position("")
        assert await second.publish(outgoing("1", b"1"), "", position, repeated=True)
        with pytest.raises(BrokerUnavailable):
            await first.publish(outgoing("1", b"1"), "", position, repeated=False)
        assert not await first.publish(outgoing("1", b"1"), "", position, repeated=True)
        with pytest.raises(BrokerUnavailable):
            await second.publish(outgoing("2", b"2"), "", behind, repeated=False)
        assert await second.publish(outgoing("2", b"2"), "", behind, repeated=True)
    assert await broker.read(topic) == numbers(0, 2)


async def test_a_repeated_id_is_stored_once(broker: RealBroker) -> None:
    if not broker.drops_repeated_ids:
        pytest.skip("this broker does not know ids")
    topic = await broker.create_topic()
    async with writing(topic) as sink:
        await store(sink, outgoing("same", b"1"))
        await store(sink, outgoing("same", b"1"))
    assert await broker.read(topic) == [b"1"]


async def test_a_message_beyond_the_bound_is_refused(broker: RealBroker) -> None:
    topic = await broker.create_topic()
    async with writing(topic) as sink:
        await store(sink, outgoing("fits", bytes(sink.max_bytes - 1024)))
        with pytest.raises(MessageTooLarge):
            await store(sink, outgoing("large", bytes(sink.max_bytes + 1)))


async def test_a_topic_that_does_not_exist_is_an_error_of_the_operator(broker: RealBroker) -> None:
    topic = (await broker.create_topic()).sibling("missing")
    for part in (source_of(topic), sink_of(topic)):
        with pytest.raises(ConfigError, match="missing"):
            await part.open()
        await part.close()


async def test_a_killed_broker_loses_and_reorders_nothing(broker: RealBroker) -> None:
    """Both ends go on by themselves, and while it is down they say so."""
    topic = await broker.create_topic()
    async with writing(topic) as sink, reading(topic) as source:
        await publish(sink, 1, 4)
        received = await receive_messages(source, 3)
        await source.acknowledge(received[0])
        await until_unacknowledged(source, 2)
        broker.kill()
        try:
            with pytest.raises(BrokerUnavailable):
                await store(sink, outgoing("lost", b"5"))
        finally:
            broker.start()
        await insist_publish(sink, b"5")
        await source.reset()
        # Before these may come what was on its way, and what was acknowledged: an acknowledgement may be lost.
        assert (await receive_through(source, b"5"))[-4:] == numbers(2, 5)


async def test_a_partition_ends_and_nothing_is_lost(broker: RealBroker) -> None:
    topic = await broker.create_topic()
    async with writing(topic) as sink, reading(topic) as source:
        await publish(sink, 1, 2)
        assert await receive_all(source, 1) == [b"1"]
        broker.pause()
        try:
            with pytest.raises(BrokerUnavailable):
                await store(sink, outgoing("late", b"3"))
        finally:
            broker.resume()
        await source.reset()
        await insist_publish(sink, b"3")
        assert (await receive_through(source, b"3"))[-3:] == numbers(1, 3)


async def test_a_full_broker_refuses_and_loses_nothing(broker: RealBroker) -> None:
    topic = await broker.create_topic()
    async with writing(topic) as sink, reading(topic) as source:
        await publish(sink, 1, 2)
        await broker.set_full(topic, True)
        try:
            with pytest.raises(BrokerUnavailable):
                await store(sink, outgoing("late", b"3"))
            assert await receive_all(source, 2) == numbers(1, 2)  # what it has can be read
        finally:
            await broker.set_full(topic, False)
        await insist_publish(sink, b"4")
        assert (await receive_through(source, b"4"))[-1:] == [b"4"]


async def until_unacknowledged(source: MessageSource, count: int) -> None:
    async def reached() -> bool:
        return (await source.lag()).unacknowledged == count

    await until(reached)


async def insist_publish(sink: MessageSink, body: bytes) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await store(sink, outgoing(f"insisted-{body.decode()}", body))
            except BrokerUnavailable:
                await asyncio.sleep(0.02)


async def receive_through(source: MessageSource, last: bytes) -> list[bytes]:
    """Receive until a message comes; from the beginning again after a fault of the broker."""
    found: list[bytes] = []
    async with asyncio.timeout(PATIENCE_S):
        while last not in found:
            try:
                found += await receive_all(source, 1)
            except BrokerUnavailable:
                found.clear()
                await asyncio.sleep(0.02)
                await source.reset()
    return found
