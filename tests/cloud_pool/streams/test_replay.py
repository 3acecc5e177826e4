"""A range of a topic answered again: nothing of the pipeline that answered it changes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from causeway_server.cloud_pool.brokers.open import open_history
from causeway_server.cloud_pool.brokers.port import (
    BrokerLogin,
    BrokerUnavailable,
    MessageRange,
    TopicAddress,
    parse_range,
)
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.storage.redis_client import RedisClient
from causeway_server.cloud_pool.streams.outcome import OutcomeWriter
from causeway_server.cloud_pool.streams.replay import MessageReplay
from causeway_server.router.errors import ConfigError

from .brokers import RealBroker, sink_of
from .pipelines import ActingRunner, RunningPipeline, Topics, encoded, message_runner

pytestmark = pytest.mark.slow
LONG_AGO = datetime.fromtimestamp(1_700_000_000, UTC).isoformat()


@pytest.fixture
async def topics(broker: RealBroker) -> Topics:
    return await Topics.create(broker)


async def replay(
    topics: Topics, jobs: JobsConfig, wanted: MessageRange, audit: TopicAddress | None = None
) -> list[Any]:
    """Return the lines about a range."""
    history, lines = open_history(topics.source, BrokerLogin()), list[str]()
    sink = None if audit is None else sink_of(audit)
    await history.open()
    if sink is not None:
        await sink.open()
    answering = MessageReplay(
        "replay-1",
        str(topics.source),
        history,
        message_runner(jobs, ActingRunner()),
        OutcomeWriter("p"),
        sink,
        lines.append,
        in_flight=4,
    )
    await answering.run(wanted)
    await history.close()
    if sink is not None:
        await sink.close()
    return [json.loads(line) for line in lines]


async def test_a_range_is_answered_again_and_nothing_else_changes(
    topics: Topics, database: RedisClient, jobs: JobsConfig
) -> None:
    """Also what has expired since, and what nobody can read; the pipeline goes on where it was."""
    await topics.send(encoded("a", partitionkey="k", expirytime=LONG_AGO), b"{", encoded("b", partitionkey="k"))
    async with RunningPipeline(topics, database, jobs, ActingRunner()):
        await topics.until(2, dead=1)
    before = await topics.answers(), await topics.dead()
    await topics.send(encoded("c", partitionkey="k"))
    lines = await replay(topics, jobs, MessageRange())
    kinds = {line["outcome"]["id"]: line["outcome"]["type"] for line in lines}
    assert (kinds["a"], kinds["b"], kinds["c"]) == ("causeway.answered",) * 3
    assert sorted(kinds.values()) == ["causeway.answered"] * 3 + ["causeway.dead"]
    assert (await topics.answers(), await topics.dead()) == before
    runner = ActingRunner()
    async with RunningPipeline(topics, database, jobs, runner):
        await topics.until(3, dead=1)
    assert runner.names == ["c"]


async def test_outcomes_go_to_the_topic_of_audits(topics: Topics, jobs: JobsConfig) -> None:
    audit = await topics.broker.create_topic()
    await topics.send(encoded("a"), encoded("b"))
    assert await replay(topics, jobs, MessageRange(), audit) == []
    audited = [json.loads(body) for body in await topics.broker.read(audit)]
    assert sorted(event["id"] for event in audited) == ["a", "b"]
    assert await topics.answers() == []


async def test_both_ends_of_a_range_belong_to_it(broker: RealBroker, jobs: JobsConfig) -> None:
    topics = Topics(broker, await broker.create_topic(), await broker.create_topic())
    await topics.send(*(encoded(name) for name in "abcde"))
    every = await replay(topics, jobs, MessageRange())
    assert _names(every) == list("abcde")
    kind, places = topics.source.kind, [line["position"] for line in every]
    assert _names(await replay(topics, jobs, parse_range(f"{places[1]}..{places[3]}", kind))) == list("bcd")
    assert _names(await replay(topics, jobs, parse_range(f"{places[3]}..", kind))) == list("de")
    since, until = every[1]["published_at"], every[3]["published_at"]
    in_time = [line for line in every if since <= line["published_at"] <= until]
    assert _names(await replay(topics, jobs, MessageRange(since=since, until=until))) == _names(in_time)
    assert await replay(topics, jobs, MessageRange(since=every[-1]["published_at"] + 3600.0)) == []


async def test_a_range_that_cannot_be_read_is_an_error(broker: RealBroker, jobs: JobsConfig) -> None:
    topics = Topics(broker, await broker.create_topic(), await broker.create_topic())
    await topics.send(encoded("a"))
    if topics.source.kind == "kafka":
        with pytest.raises(ConfigError, match="no partition 9"):
            await replay(topics, jobs, parse_range("9-0..", "kafka"))
    history = open_history(topics.source, BrokerLogin())
    await history.open()
    broker.kill()
    try:
        with pytest.raises(BrokerUnavailable):
            await anext(history.read(MessageRange()))
    finally:
        broker.start()
    await history.close()


@pytest.mark.parametrize("text", ["", "..", "5", "5...", "a..b", "2026-11-23T06:00:00..", "1..2026-11-23T06:00:00Z"])
def test_a_range_that_nobody_can_read_is_refused_with_an_example(text: str) -> None:
    for kind in ("nats", "kafka"):
        with pytest.raises(ConfigError, match=r"--replay|2026-11-23T06:00:00Z"):
            parse_range(text, kind)


def _names(lines: Sequence[Any]) -> list[str]:
    return sorted(line["outcome"]["id"] for line in lines)
