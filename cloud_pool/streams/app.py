"""Composition root of a pipeline: a worker's service, and a StreamPipeline in place of jobs.

1. Serve metrics to operators, also while waiting for Redis and the broker.
2. Wait for both, as long as it takes, unless the pipeline is stopped.
3. Watch the tiers and work, until the pipeline is stopped.
4. Close what the background tasks used, after they have ended.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

import anyio
import msgspec
from anyio.abc import TaskGroup

from ..assembly import tune_garbage_collector
from ..brokers.address import TopicAddress
from ..brokers.open import open_sink, open_source
from ..brokers.port import MessageSink, MessageSource
from ..config.schema import Config
from ..jobs.config import JobsConfig
from ..jobs.store.durability import DurabilityCheck
from ..jobs.store.redis_client import RedisClient
from ..jobs.store.usage_outbox import UsageOutbox
from ..jobs.submission import SubmissionParser
from ..jobs.worker.app import jobs_settings
from ..jobs.worker.background import BackgroundService, build_background_service
from ..lifetime import Closing, open_all, run_with_tasks
from .attempts import MessageRunner
from .effects import REPLICATED, STREAM_SCRIPTS, EffectStore
from .insistence import Insistence
from .metrics import StreamMetrics
from .outcome import OutcomeWriter
from .pipeline import StreamPipeline
from .settlement import MessageSettler

_FLUSH_S = 3.0


class StreamTopics(msgspec.Struct, frozen=True, kw_only=True):
    """What a pipeline reads and writes."""

    name: str  # of the pipeline
    source: TopicAddress
    sink: TopicAddress
    dead: TopicAddress


async def run(
    config: Config,
    topics: StreamTopics,
    stop: asyncio.Event,
    reread: Callable[[], Config] | None = None,
    *,
    serves_operators: bool = False,
) -> None:
    """Work until `stop`, then drain. Prints one line when it begins to receive, or to stand by. Raises ConfigError.

    Args:
        reread: reads the configuration again; on SIGHUP the pipeline takes its endpoints from it
        serves_operators: listen at the operators' address
    """

    async def work(tasks: TaskGroup, closing: list[Closing]) -> None:
        await _work(config, topics, stop, serves_operators, tasks, closing, reread)

    await run_with_tasks(work)  # (4)


async def _work(
    config: Config,
    topics: StreamTopics,
    stop: asyncio.Event,
    serves_operators: bool,
    tasks: TaskGroup,
    closing: list[Closing],
    reread: Callable[[], Config] | None,
) -> None:
    """Run in `tasks`; `closing` gets what must be closed after they have ended."""
    jobs, streams = jobs_settings(config, "a pipeline"), config.streams
    background = build_background_service(
        config,
        tasks,
        route="stream",
        service_name="causeway-stream",
        is_gateway=jobs.redis != config.redis,
        reread=reread,
    )
    database = RedisClient(
        jobs.redis,
        jobs.key_prefix,
        STREAM_SCRIPTS,
        replicas=jobs.replicas_to_wait_for,
        replica_timeout_s=jobs.replica_timeout_s,
        replicated=REPLICATED,
    )
    usage = UsageOutbox(database, background.accounts.accounting.usage.add)
    source = open_source(topics.source, topics.name, streams.login, ack_wait_s=streams.lease_s)
    sink, dead = (open_sink(topic, topics.name, streams.login) for topic in (topics.sink, topics.dead))

    async def close_store() -> None:
        with anyio.move_on_after(_FLUSH_S):
            await usage.flush()
        await database.close()

    closing += [source.close, sink.close, dead.close, close_store, *background.closing]
    if serves_operators:
        await background.operator.start()  # (1)
        closing.insert(0, background.operator.close)
    pipeline = _build_pipeline(config, jobs, topics, background, database, source, sink, dead)
    wait_until_durable = DurabilityCheck(database, jobs.durability).wait
    if not await open_all(stop, wait_until_durable, source.open, sink.open, dead.open):  # (2)
        return
    background.watch_sighup(config, reread)
    await background.start(tasks)
    tasks.start_soon(usage.run)
    operator_url = f" operator={background.operator.url}" if serves_operators else ""
    tune_garbage_collector()
    print(f"ready stream={topics.name}{operator_url}", flush=True)
    await pipeline.run(stop)  # (3)


def _build_pipeline(
    config: Config,
    jobs: JobsConfig,
    topics: StreamTopics,
    background: BackgroundService,
    database: RedisClient,
    source: MessageSource,
    sink: MessageSink,
    dead: MessageSink,
) -> StreamPipeline:
    metrics = StreamMetrics(background.metrics.registry)
    owner = secrets.token_hex(8) if source.needs_lease else ""
    runner = build_message_runner(config, jobs, background, metrics)
    effects = EffectStore(database, topics.name, owner, ttl_s=config.streams.effect_ttl_s)
    writer, insistence = OutcomeWriter(topics.name), Insistence()
    settler = MessageSettler(
        source,
        sink,
        dead,
        effects,
        runner,
        writer,
        metrics,
        insistence,
        max_attempts=config.streams.max_attempts,
    )
    return StreamPipeline(
        str(topics.source),
        source,
        settler,
        effects,
        config.streams,
        metrics,
        insistence,
        drain_s=jobs.drain_s,
    )


def build_message_runner(
    config: Config, jobs: JobsConfig, background: BackgroundService, metrics: StreamMetrics
) -> MessageRunner:
    accounts = background.accounts
    return MessageRunner(
        config.streams,
        jobs,
        SubmissionParser(jobs, background.tiers, accounts.accounting.check_cost),
        background.runner,
        accounts.authenticator.principal,
        accounts.ledger.limits,
        metrics,
    )
