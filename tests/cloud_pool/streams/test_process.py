"""`causeway-cloud stream` as a whole: on a real NATS and Redis, before a server over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest
from click.testing import CliRunner

from causeway_server.cloud_pool.background import run_pipeline
from causeway_server.cloud_pool.brokers.port import TopicAddress, parse_topic
from causeway_server.cloud_pool.cli.background import stream
from causeway_server.cloud_pool.config import Config
from causeway_server.cloud_pool.http.config import OperatorConfig
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.streams.config import StreamsConfig, StreamTopics
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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "--out"),
        (("--out", "nats://x/out", "--name", "a b"), "--name"),
        (("--out", "http://x/out"), "--out"),
        (("--out", "nats://x/out", "--replay", "1..2"), "--replay"),
    ],
)
def test_options_that_contradict_each_other_are_refused_by_name(options: tuple[str, ...], words: str) -> None:
    command = ["--in", "nats://x/in", "--redis", "redis://127.0.0.1:1/0", "--tier", "assistant-large", *options]
    result = CliRunner().invoke(stream, command)
    assert result.exit_code == 2
    assert words in result.output
