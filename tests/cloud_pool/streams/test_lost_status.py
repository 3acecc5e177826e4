"""Answers of JetStream that end without a word, or that list a consumer which is being deleted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from nats.aio.msg import Msg

from causeway_server.cloud_pool.brokers.jetstream import JetStreamSource
from causeway_server.cloud_pool.brokers.port import TopicLag, parse_topic
from tests.nats_server import NatsServer

from .brokers import NatsBroker, outgoing, sink_of, source_of

pytestmark = pytest.mark.slow


async def _without_408(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy what the server sends, whole messages at a time, without statuses 408."""
    while line := await reader.readline():
        frame = line
        if line.startswith((b"MSG ", b"HMSG ")):
            frame += await reader.readexactly(int(line.split()[-1]) + 2)
        if b"\r\nNATS/1.0 408" not in frame:
            writer.write(frame)
    writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
    writer.close()


@asynccontextmanager
async def swallowing_statuses(server: NatsServer) -> AsyncIterator[int]:
    """A connection to the server on which no 408 arrives. Yields its port."""
    tasks: set[asyncio.Task[None]] = set()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", server.port)
        tasks.add(asyncio.create_task(_copy(reader, to_server)))
        tasks.add(asyncio.create_task(_without_408(from_server, writer)))

    listener = await asyncio.start_server(connect, "127.0.0.1", 0)
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        listener.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_request_whose_end_is_not_told_delays_messages_by_seconds_only(nats_server: NatsServer) -> None:
    topic = await NatsBroker(nats_server).create_topic()
    async with swallowing_statuses(nats_server) as port:
        through = parse_topic(f"nats://127.0.0.1:{port}/{topic.topic}", "test")
        source = source_of(through)
        await source.open()
        assert await source.receive(3, 0.05, 0.01) == []
        sink = sink_of(topic)
        await sink.open()
        await sink.publish(outgoing("1", b"1"), "", await sink.position(""), repeated=False)
        assert [message.body for message in await source.receive(3, 60.0, 0.01)] == [b"1"]
        await source.close()
        await sink.close()


async def test_a_list_may_hold_a_consumer_that_is_being_deleted(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """findings/nats-lists-null.sh"""
    source = source_of(await NatsBroker(nats_server).create_topic())
    assert isinstance(source, JetStreamSource)
    await source.open()
    await source.receive(1, 0.05, 0.01)
    request = source.client.request

    async def with_null(subject: str, payload: bytes, timeout: float) -> Msg:
        answer = await request(subject, payload, timeout)
        if "CONSUMER.LIST" in subject:
            page = json.loads(answer.data)
            page |= {"consumers": [None, *page["consumers"]], "total": page["total"] + 1}
            answer.data = json.dumps(page).encode()
        return answer

    monkeypatch.setattr(source.client, "request", with_null)
    assert await source.lag() == TopicLag(0, 0)
    await source.close()
