"""`causeway-cloud stream` and its replay, each as a whole: on a real NATS and Redis, before a server over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest
from click.testing import CliRunner

from causeway_server.cloud_pool.background import run_pipeline, run_replay
from causeway_server.cloud_pool.brokers.jetstream import PAGE
from causeway_server.cloud_pool.brokers.port import MessageRange, TopicAddress, parse_topic
from causeway_server.cloud_pool.cli.background import stream
from causeway_server.cloud_pool.config import Config
from causeway_server.cloud_pool.http.config import OperatorConfig
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.streams.config import StreamsConfig, StreamTopics
from causeway_server.cloud_pool.streams.replay import ReplayTopics
from causeway_server.router.errors import ConfigError
from tests.cloud_pool.jobs.conftest import until as until_true
from tests.cloud_pool.upstreams.http_gateway import http_tier
from tests.edge_node.scripted import CLOUD_WORDS, ScriptedCloud
from tests.nats_server import NatsServer
from tests.ports import free_port
from tests.waiting import until

from .brokers import NatsBroker
from .pipelines import Topics, encoded

pytestmark = [pytest.mark.redis, pytest.mark.nats, pytest.mark.slow]
ANSWER = "".join(CLOUD_WORDS)


@pytest.fixture
async def topics(nats_server: NatsServer) -> Topics:
    return await Topics.create(NatsBroker(nats_server))


@pytest.fixture
async def cloud() -> AsyncIterator[ScriptedCloud]:
    cloud = await ScriptedCloud().start()
    yield cloud
    await cloud.stop()


@pytest.fixture
def config(cloud: ScriptedCloud, jobs: JobsConfig, tmp_path: Path) -> Config:
    return Config(
        tiers=(http_tier(cloud.url),),
        redis=jobs.redis,
        jobs=msgspec.structs.replace(jobs, durability="warn"),
        streams=StreamsConfig(tenant="factory", batch_wait_s=0.001, in_flight=1),
        operator=OperatorConfig(port=free_port()),
        audit_file=str(tmp_path / "audit"),
    )


def pipeline_topics(topics: Topics, source: TopicAddress | None = None) -> StreamTopics:
    dead = topics.sink.sibling(".dead")
    return StreamTopics(name=f"of-{topics.sink.topic}", source=source or topics.source, sink=topics.sink, dead=dead)


def replayed(topics: Topics, audit: TopicAddress | None = None) -> ReplayTopics:
    return ReplayTopics(name="p", source=topics.source, wanted=MessageRange(), audit=audit)


def audited(config: Config) -> list[tuple[str, str, str]]:
    records = [json.loads(line) for line in Path(config.audit_file).read_text().splitlines()]
    return [(record["route"], record["tenant"], record["outcome"]) for record in records]


def asked(cloud: ScriptedCloud) -> int:
    """Return how often the tier was asked, without the probes of it."""
    return sum("a secret question" in str(body) for body in cloud.bodies)


async def metrics(config: Config) -> str:
    """Return what operators see; "" if the operators' listener is closed."""
    try:
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"http://127.0.0.1:{config.operator.port}/metrics") as answer,
        ):
            return await answer.text()
    except aiohttp.ClientConnectionError:
        return ""


async def test_a_pipeline_answers_on_its_tier_until_it_is_stopped(
    topics: Topics, config: Config, cloud: ScriptedCloud, capsys: pytest.CaptureFixture[str]
) -> None:
    """What runs when it is stopped is ended; what waits is left to the next process, which answers nothing twice."""
    stop, names = asyncio.Event(), pipeline_topics(topics)
    cloud.gate = asyncio.Event()
    await topics.send(encoded("a"), b"{", encoded("b"))
    work = asyncio.ensure_future(run_pipeline(config, names, stop, serves_operators=True))
    await until(lambda: asked(cloud))
    assert "causeway_gateway_stream_" in await metrics(config)
    stop.set()
    cloud.gate.set()
    await work
    assert await metrics(config) == ""
    (first,) = await topics.answers()
    assert (first["id"], first["data"]["choices"][0]["message"]["content"]) == ("a", ANSWER)
    stop = asyncio.Event()
    work = asyncio.ensure_future(run_pipeline(config, names, stop))
    await topics.until(2, dead=1)
    stop.set()
    await work
    assert await topics.names() == ["a", "b"]
    ready = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert ready == [["ready", f"stream={names.name}"]] * 2
    assert audited(config) == [("stream", "factory", "ok")] * 2
    assert asked(cloud) == 2


async def test_a_pipeline_that_waits_for_its_broker_is_seen_and_stopped(
    topics: Topics, config: Config, cloud: ScriptedCloud, capsys: pytest.CaptureFixture[str]
) -> None:
    stop, silent = asyncio.Event(), parse_topic(f"nats://127.0.0.1:{free_port()}/in", "test")
    work = asyncio.ensure_future(run_pipeline(config, pipeline_topics(topics, silent), stop, serves_operators=True))

    async def is_seen() -> bool:
        return bool(await metrics(config))

    await until_true(is_seen)
    stop.set()
    await work
    assert capsys.readouterr().out == ""
    assert asked(cloud) == 0


@pytest.mark.parametrize(
    ("where", "words"),
    [("redis", "needs the gateways' Redis"), ("jobs.redis", "Redis Cluster"), ("identity.region", "stored in eu")],
)
async def test_a_pipeline_is_refused_a_store_that_it_cannot_use(
    topics: Topics, config: Config, where: str, words: str
) -> None:
    if where == "identity.region":
        wrong = msgspec.structs.replace(config, jobs=msgspec.structs.replace(config.jobs, region="eu"))
    else:
        redis = "" if where == "redis" else "redis+cluster://127.0.0.1:1,127.0.0.1:2"
        wrong = msgspec.structs.replace(config, redis=redis, jobs=JobsConfig())
    with pytest.raises(ConfigError, match=words) as caught:
        await run_pipeline(wrong, pipeline_topics(topics), asyncio.Event())
    assert where in str(caught.value)


async def test_a_pipeline_whose_topic_does_not_exist_ends_and_listens_no_longer(
    topics: Topics, config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    names = pipeline_topics(topics, topics.source.sibling("missing"))
    with pytest.raises(ConfigError, match="missing"):
        await run_pipeline(config, names, asyncio.Event(), serves_operators=True)
    assert await metrics(config) == ""
    assert capsys.readouterr().out == ""


async def test_a_replay_shows_each_message_and_bills_nobody(
    topics: Topics, config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a topic of audits it shows how many it answered, and the topic has the answers."""
    await topics.send(encoded("a"), b"{", encoded("b"))
    await run_replay(config, replayed(topics), asyncio.Event())
    lines = [json.loads(line)["outcome"] for line in capsys.readouterr().out.splitlines()]
    assert sorted(line["type"] for line in lines) == ["causeway.answered"] * 2 + ["causeway.dead"]
    audit = await topics.broker.create_topic()
    await run_replay(config, replayed(topics, audit), asyncio.Event())
    (total,) = capsys.readouterr().out.splitlines()
    assert "'answered': 2" in total
    assert total.endswith(f"-> {audit}")
    kept = [json.loads(body) for body in await topics.broker.read(audit)]
    assert {event["id"] for event in kept if event["type"] == "causeway.answered"} == {"a", "b"}
    assert (await topics.answers(), await topics.dead()) == ([], [])
    assert {outcome for _, _, outcome in audited(config)} == {"superseded"}


async def test_a_stopped_replay_shows_no_totals(
    topics: Topics, config: Config, cloud: ScriptedCloud, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud.gate, stop = asyncio.Event(), asyncio.Event()
    audit = await topics.broker.create_topic()
    await topics.send(encoded("a"))
    work = asyncio.ensure_future(run_replay(config, replayed(topics, audit), stop))
    await until(lambda: asked(cloud))
    stop.set()
    await work
    await until(lambda: not cloud.running)
    assert capsys.readouterr().out == ""
    assert await topics.broker.read(audit) == []


async def test_a_replay_whose_topic_does_not_exist_ends(topics: Topics, config: Config, cloud: ScriptedCloud) -> None:
    with pytest.raises(ConfigError, match="missing"):
        await run_replay(config, replayed(topics, topics.source.sibling("missing")), asyncio.Event())
    assert asked(cloud) == 0


async def test_a_replay_whose_broker_dies_says_that_it_is_not_complete(
    topics: Topics, config: Config, cloud: ScriptedCloud, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it had read is answered and shown."""
    cloud.gate = asyncio.Event()
    await topics.send(*(encoded("a") if at == 0 else b"{" for at in range(PAGE + 1)))
    work = asyncio.ensure_future(run_replay(config, replayed(topics), asyncio.Event()))
    await until(lambda: asked(cloud))
    topics.broker.kill()
    cloud.gate.set()
    try:
        with pytest.raises(ConfigError, match=r"The replay is not complete"):
            await work
    finally:
        topics.broker.start()
    assert len(capsys.readouterr().out.splitlines()) == PAGE


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "--out"),
        (("--out", "nats://x/out", "--audit", "nats://x/audit"), "--replay"),
        (("--out", "nats://x/out", "--name", "a b"), "--name"),
        (("--out", "http://x/out"), "--out"),
        (("--replay", "1..2", "--out", "nats://x/out"), "--audit"),
        (("--replay", "1..2", "--dead", "nats://x/dead"), "--audit"),
        (("--replay", "2..x"), "--replay"),
    ],
)
def test_options_that_contradict_each_other_are_refused_by_name(options: tuple[str, ...], words: str) -> None:
    command = ["--in", "nats://x/in", "--redis", "redis://127.0.0.1:1/0", "--tier", "assistant-large", *options]
    result = CliRunner().invoke(stream, command)
    assert result.exit_code == 2
    assert words in result.output
