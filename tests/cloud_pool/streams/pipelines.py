"""A pipeline on a real broker and a real Redis with a scripted runner; messages are known by their `user`."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any, Self

import anyio
import msgspec
from prometheus_client import CollectorRegistry

from causeway_server.cloud_pool.brokers.port import TopicAddress
from causeway_server.cloud_pool.core.principal import Principal
from causeway_server.cloud_pool.jobs.submission import SubmissionParser
from causeway_server.cloud_pool.jobs.worker.runner import JobRun
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.storage.redis_client import RedisClient
from causeway_server.cloud_pool.streams.attempts import MessageCallers, MessageRunner
from causeway_server.cloud_pool.streams.config import StreamsConfig
from causeway_server.cloud_pool.streams.effects import EffectStore
from causeway_server.cloud_pool.streams.metrics import StreamMetrics
from causeway_server.cloud_pool.streams.outcome import OutcomeWriter
from causeway_server.cloud_pool.streams.pipeline import StreamPipeline
from causeway_server.cloud_pool.streams.settlement import MessageSettler, StreamPorts
from causeway_server.cloud_pool.tiers.config import TierConfig
from causeway_server.cloud_pool.tiers.tier import ChatFormat, Tier
from causeway_server.router.errors import AuthenticationFailed
from causeway_server.router.types import Chunk, Usage
from tests.cloud_pool.jobs.conftest import until
from tests.cloud_pool.jobs.scripted_worker import ScriptedRunner

from .brokers import RealBroker, sink_of, source_of

TIER = Tier(TierConfig(name="large", region="eu"), ChatFormat("{{ messages }}"))
LANES = 3
CONFIG = StreamsConfig(tenant="factory", batch_wait_s=0.001, lease_s=10.0)


def question(name: str, **changes: Any) -> dict[str, Any]:
    """Return a CloudEvent whose request has `name` as its user; values of `data` may be changed by a dict."""
    data = {"model": "large", "messages": [{"role": "user", "content": "a secret question"}], "user": name}
    data |= changes.pop("data", {})
    event = {"specversion": "1.0", "id": name, "source": "/line/1", "type": "factory.question", "data": data}
    return event | changes


def encoded(name: str, **changes: Any) -> bytes:
    return json.dumps(question(name, **changes)).encode()


Act = Callable[[str, JobRun], Awaitable[None]]
"""What happens before the message of this name is answered. May raise CausewayError."""


async def nothing(_name: str, _run: JobRun) -> None:
    """It is answered at once."""


class ActingRunner(ScriptedRunner):
    """Answers each message with its name, after `act`."""

    def __init__(self, act: Act = nothing) -> None:
        async def script(_at: int, job_run: JobRun) -> AsyncGenerator[Chunk, None]:
            name = job_run.request.user or ""
            await act(name, job_run)
            yield Chunk(text=name, tokens=2)
            yield Chunk(finish_reason="stop")
            yield Chunk(usage=Usage(5, 2))

        super().__init__(script)

    @property
    def names(self) -> list[str]:
        return [run.request.user or "" for run in self.runs]


def _key_of(body: bytes) -> str:
    """Return the `partitionkey`, as producers for Kafka set it."""
    try:
        return str(json.loads(body).get("partitionkey", ""))
    except (ValueError, AttributeError):
        return ""


class Topics:
    """The topics of a test: what goes in and what came out."""

    def __init__(self, broker: RealBroker, source: TopicAddress, sink: TopicAddress) -> None:
        self.broker = broker
        self.source = source
        self.sink = sink

    @classmethod
    async def create(cls, broker: RealBroker) -> Self:
        return cls(broker, await broker.create_topic(LANES), await broker.create_topic(LANES))

    async def send(self, *bodies: bytes, **headers: str) -> None:
        for body in bodies:
            await self.broker.send(self.source, body, _key_of(body), **headers)

    async def answers(self) -> list[dict[str, Any]]:
        return [json.loads(body) for body in await self.broker.read(self.sink)]

    async def names(self) -> list[str]:
        """Return the ids of what was published, in order."""
        return [event["id"] for event in await self.answers()]

    async def dead(self) -> list[dict[str, Any]]:
        return [json.loads(body) for body in await self.broker.read(self.sink.sibling(".dead"))]

    async def until(self, answers: int, dead: int = 0) -> None:
        """Wait until so many outcomes are published."""
        await until(lambda: self._has(answers, dead))

    async def _has(self, answers: int, dead: int) -> bool:
        return len(await self.names()) >= answers and len(await self.dead()) >= dead


def message_runner(
    jobs: JobsConfig,
    runner: ScriptedRunner,
    config: StreamsConfig = CONFIG,
    metrics: StreamMetrics | None = None,
    clock: Callable[[], float] = time.time,
) -> MessageRunner:
    return MessageRunner(
        config,
        jobs,
        SubmissionParser(jobs, {"large": TIER}, region=jobs.region),
        runner,
        MessageCallers(identify),
        metrics or StreamMetrics(CollectorRegistry()),
        clock=clock,
        rng=lambda: 0.5,
    )


class RunningPipeline:
    """A pipeline at work for a `with` block; leaving it drains the pipeline."""

    def __init__(
        self,
        topics: Topics,
        database: RedisClient,
        jobs: JobsConfig,
        runner: ScriptedRunner,
        *,
        wall_clock: Callable[[], float] = time.time,
        **changes: Any,
    ) -> None:
        config = msgspec.structs.replace(CONFIG, **changes)
        self.registry = CollectorRegistry()
        self.source = source_of(topics.source, ack_wait_s=config.lease_s)
        self.sink, self.dead = sink_of(topics.sink), sink_of(topics.sink.sibling(".dead"))
        owner = secrets.token_hex(4) if self.source.needs_lease else ""
        self.effects = EffectStore(database, topics.source.topic, owner, ttl_s=3600.0)
        metrics = StreamMetrics(self.registry)
        messages = message_runner(jobs, runner, config, metrics, wall_clock)
        ports = StreamPorts(self.source, self.sink, self.dead, self.effects)
        self.settler = MessageSettler(ports, messages, OutcomeWriter("p"), metrics, max_attempts=config.max_attempts)
        self.pipeline = StreamPipeline(
            str(topics.source), ports, self.settler, config, metrics, drain_s=jobs.drain_s, measure_s=0.1
        )
        self.stop = anyio.Event()

    async def __aenter__(self) -> Self:
        for part in (self.source, self.sink, self.dead):
            await part.open()
        self._task = asyncio.create_task(self.pipeline.run(self.stop))
        return self

    async def __aexit__(self, *fault: object) -> None:
        self.stop.set()
        with suppress(asyncio.CancelledError):
            await self._task
        for part in (self.source, self.sink, self.dead):
            await part.close()

    async def crash(self) -> None:
        """End as kill -9 does: nothing is drained, acknowledged or given back but the lease, which would run out."""
        self._task.cancel()
        await asyncio.wait([self._task])
        await self.effects.hold(0.0)

    def count(self, outcome: str) -> float:
        name = "causeway_gateway_stream_messages_total"
        return self.registry.get_sample_value(name, {"outcome": outcome}) or 0.0

    def value(self, name: str) -> float:
        return self.registry.get_sample_value(f"causeway_gateway_stream_{name}") or 0.0


def identify(authorization: str) -> Principal:
    """Return tenant `T` for the token `T`."""
    if not authorization:
        raise AuthenticationFailed("send a token")
    return Principal(authorization.removeprefix("Bearer "), "sensor", frozenset({"jobs"}))
