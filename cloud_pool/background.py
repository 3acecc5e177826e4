"""The background processes: a job worker and a message pipeline.

Their rooms are imported on demand. They share the tiers and the service over them with the gateway (`app.Runtime`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import anyio
import msgspec
from anyio.abc import TaskGroup
from prometheus_client import CollectorRegistry

from causeway_server.router.errors import ConfigError
from causeway_server.router.serving.process import tune_garbage_collector
from causeway_server.router.serving.stored.responses import StoredResponses
from causeway_server.router.serving.webhooks import DeliveryOutcome, WebhookSender

from .accounts.tenants.config import TenantLimits
from .app import build_runtime, operator_listener, reload_on_sighup, reload_tiers
from .batches.processor import BatchProcessor
from .config import Config
from .degradation.tier_sessions import TierSessions
from .http.operator import OperatorRoutes
from .jobs.http.response_jobs import GatewayResponseJobs
from .jobs.metrics import JobMetrics
from .jobs.submission import SubmissionParser
from .jobs.worker.execution import WorkerSlots
from .jobs.worker.runner import JobRunner, MeteredRunner, ServiceBackend
from .jobs.worker.worker import Worker
from .lifetime import Closing, StopSignal, keep_running, open_all, run_with_tasks
from .storage.config import NO_CLUSTER, JobsConfig, with_shared_redis
from .storage.durability import DurabilityCheck
from .storage.encryption import ContentCipher
from .storage.outboxes import AddUsage, UsageOutbox, WebhookDelivery
from .storage.redis_client import RedisClient
from .storage.stores import JobStores
from .tiers.tier import Tier

if TYPE_CHECKING:
    from .observability.tracing import JobTrace
    from .streams.config import StreamTopics
    from .streams.pipeline import StreamPipeline
    from .streams.settlement import StreamPorts

_UNBOUNDED = 1_000_000  # jobs: the shared limit bounds them
_FLUSH_S = 3.0


class WorkerAccounts(msgspec.Struct, frozen=True):
    """A worker's access to its tenants' limits and usage."""

    limits: Callable[[str], TenantLimits] = lambda _: TenantLimits()  # limits of a tenant, for the lines of its batches
    # stores the usage that all workers' accepted reports billed; None if other workers do this
    add_usage: AddUsage | None = None
    sessions: TierSessions | None = None  # None: sessions are off


class WorkerRuntime:
    """The worker and its connections to Redis and webhook receivers. `clock`: Unix seconds, in place of Redis's."""

    def __init__(
        self,
        config: JobsConfig,
        tiers: Mapping[str, Tier],
        runner: JobRunner,
        slots: Mapping[str, WorkerSlots],
        registry: CollectorRegistry,
        *,
        accounts: WorkerAccounts | None = None,
        trace: JobTrace | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Build the worker. Raises ConfigError if the configuration is invalid."""
        stores = self._stores = JobStores.open(config, clock)
        metrics = JobMetrics(registry)
        responses = StoredResponses(store=stores.responses, jobs=GatewayResponseJobs(stores), by_default=False)
        settle = responses.settle
        self.worker = Worker(stores.jobs, runner, slots, config, metrics, trace=trace, settle=settle)
        stores.outbox.on_unreadable = lambda: metrics.deliveries.labels("failed").inc()
        self._sender = WebhookSender(stores.outbox, config.webhooks, observe=partial(_observe_delivery, metrics, trace))
        accounts = accounts or WorkerAccounts()
        add_usage = accounts.add_usage
        self._usage = None if add_usage is None else UsageOutbox(stores.database, add_usage)
        parser = SubmissionParser(config, tiers, region=config.region, sessions=accounts.sessions)
        self._batches = BatchProcessor(stores, parser, config, accounts.limits)

    async def start(self, stop: StopSignal) -> bool:
        """Wait for Redis. Return False if `stop` was set first. Raises ConfigError if Redis is not durable."""
        return await open_all(stop, self._stores.durability.wait)

    async def run(self, stop: StopSignal) -> None:
        """Work until `stop` is set and the worker has drained. Another worker repeats an interrupted webhook."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(keep_running, "the sender of webhooks", self._sender.run)
            tasks.start_soon(keep_running, "the processor of batches", self._batches.run)
            if self._usage is not None:
                tasks.start_soon(keep_running, "the writer of usage", self._usage.run)
            await self.worker.run(stop)
            tasks.cancel_scope.cancel()

    async def close(self) -> None:
        """Write the last bills and close all connections, after `run` or without it."""
        if self._usage is not None:
            with anyio.move_on_after(_FLUSH_S):
                await self._usage.flush()
        await self._sender.close()
        await self._stores.close()


def _observe_delivery(
    metrics: JobMetrics, trace: JobTrace | None, delivery: WebhookDelivery
) -> Callable[[DeliveryOutcome, int], None]:
    """Start counting and tracing a delivery attempt; return the function to call with its outcome and HTTP status."""
    host = urlsplit(delivery.url).hostname or ""
    span = None if trace is None else trace.deliver(delivery.job, host, delivery.traceparent, delivery.attempts)

    def end(outcome: DeliveryOutcome, status: int) -> None:
        metrics.deliveries.labels(outcome).inc()
        if span is not None:
            error = "" if outcome == "delivered" else str(status or "undeliverable")
            span.end(error, {"http.response.status_code": status} if status else None)

    return end


class Background:
    """A process that runs jobs or messages: the service without its HTTP listener, and the accounts around it.

    Args:
        process: Name of the process in messages, such as `a worker`.
        route: Route of the runs in usage and audit records.
        service_name: Name of the process in traces.
        reread: Function that reads the configuration again, on SIGHUP and for operators, for its endpoints.
    """

    def __init__(
        self,
        config: Config,
        tasks: TaskGroup,
        process: str,
        *,
        route: str,
        service_name: str,
        reread: Callable[[], Config] | None = None,
    ) -> None:
        """Build everything without starting it. Raises ConfigError, also if no usable Redis is configured."""
        self.config = config
        self.jobs = with_shared_redis(config.jobs, config.redis)
        if not self.jobs.redis and config.redis:
            raise ConfigError(NO_CLUSTER, where="jobs.redis")
        if not self.jobs.redis:
            raise ConfigError(
                f"{process} needs the gateways' Redis. Set `redis` to the URL of that Redis.", where="redis"
            )
        if self.jobs.region and self.jobs.region != config.identity.region:
            reason = f"{process} reads what is stored in {self.jobs.region}: run it there, and set this key to it."
            raise ConfigError(reason, where="identity.region")
        # A process without the gateways' Redis can do nothing alone, unless jobs have one of their own.
        is_gateway = self.jobs.redis != config.redis
        runtime = self.runtime = build_runtime(config, tasks, service_name, kind="worker", is_gateway=is_gateway)
        accounts = runtime.accounts
        backend = ServiceBackend(runtime.caching_service, runtime.service.embed, runtime.tiers, runtime.pools.by_tier)
        ledger, trace, sessions = accounts.ledger, runtime.job_trace, runtime.sessions
        self.runner = MeteredRunner(backend, ledger, trace, accounts.revocations, sessions=sessions, route=route)
        self._reread = reread
        reload = (
            None if reread is None else partial(reload_tiers, runtime.pools, runtime.service.variants, config, reread)
        )
        free_probes = not config.has_operator_tokens
        routes = OperatorRoutes(accounts.operators, runtime.metrics, free_probes=free_probes, reload=reload)
        self._operator = operator_listener(config, routes)

    async def listen(self, closing: list[Closing]) -> str:
        """Listen at the operators' address. Return the address for the ready line. Raises ConfigError."""
        await self._operator.start()
        closing.insert(0, self._operator.close)
        return f" operator={self._operator.url}"

    async def start(self) -> None:
        """Start watching the tiers."""
        if self._reread is not None:
            reload_on_sighup(self.runtime.pools, self.runtime.service.variants, self.config, self._reread)
        await self.runtime.start()
        tune_garbage_collector()


async def run_worker(
    config: Config, stop: asyncio.Event, reread: Callable[[], Config] | None = None, *, serves_operators: bool = False
) -> None:
    """Run jobs until `stop`, then drain. Print one line when it begins to claim jobs. Raises ConfigError.

    1. Serve metrics to operators, also while waiting for Redis.
    2. Wait for Redis, as long as it takes, unless the worker is stopped.
    3. Watch the tiers and claim jobs, until the worker is stopped.
    4. Close what the background tasks used, after they have ended.

    Args:
        serves_operators: Whether to listen at the operators' address.
        reread: Function that reads the configuration again; on SIGHUP the worker takes its endpoints from it.
    """

    async def work(tasks: TaskGroup, closing: list[Closing]) -> None:
        background = Background(config, tasks, "a worker", route="job", service_name="causeway-worker", reread=reread)
        jobs, runtime = background.jobs, background.runtime
        count = jobs.concurrency or _UNBOUNDED
        worker = WorkerRuntime(
            jobs,
            runtime.tiers,
            background.runner,
            {name: WorkerSlots(name, count, admission) for name, admission in runtime.admissions.items()},
            runtime.metrics.registry,
            accounts=WorkerAccounts(config.tenants.limits, runtime.accounts.ledger.usage.add, runtime.sessions),
            trace=runtime.job_trace,
        )
        closing += [worker.close, runtime.close]
        operator = await background.listen(closing) if serves_operators else ""  # (1)
        if await worker.start(stop):  # (2)
            await background.start()
            print(f"ready worker={worker.worker.name}{operator}", flush=True)
            await worker.run(stop)  # (3)

    await run_with_tasks(work)  # (4)


async def run_pipeline(
    config: Config,
    topics: StreamTopics,
    stop: asyncio.Event,
    reread: Callable[[], Config] | None = None,
    *,
    serves_operators: bool = False,
) -> None:
    """Answer messages until `stop`, then drain, as `run_worker`; print when ready. Raises ConfigError."""
    from .brokers.open import open_sink, open_source
    from .streams.effects import REPLICATED, STREAM_SCRIPTS, EffectStore
    from .streams.settlement import StreamPorts

    async def work(tasks: TaskGroup, closing: list[Closing]) -> None:
        background = Background(
            config, tasks, "a pipeline", route="stream", service_name="causeway-stream", reread=reread
        )
        jobs, streams = background.jobs, config.streams
        database = RedisClient(jobs, STREAM_SCRIPTS, replicated=REPLICATED)
        usage = UsageOutbox(database, background.runtime.accounts.ledger.usage.add)
        source = open_source(topics.source, topics.name, streams.login, ack_wait_s=streams.lease_s)
        sink, dead = (open_sink(topic, topics.name, streams.login) for topic in (topics.sink, topics.dead))

        async def close_store() -> None:
            with anyio.move_on_after(_FLUSH_S):
                await usage.flush()
            await database.close()

        closing += [source.close, sink.close, dead.close, close_store, background.runtime.close]
        operator = await background.listen(closing) if serves_operators else ""
        owner = secrets.token_hex(8) if source.needs_lease else ""
        cipher = ContentCipher(jobs.encryption_key_file)
        effects = EffectStore(database, topics.name, owner, ttl_s=streams.effect_ttl_s, cipher=cipher)
        pipeline = _build_pipeline(background, topics, StreamPorts(source, sink, dead, effects))
        wait_until_durable = DurabilityCheck(database, jobs.durability).wait
        if await open_all(stop, wait_until_durable, source.open, sink.open, dead.open):
            await background.start()
            tasks.start_soon(usage.run)
            print(f"ready stream={topics.name}{operator}", flush=True)
            await pipeline.run(stop)

    await run_with_tasks(work)


def _build_pipeline(background: Background, topics: StreamTopics, ports: StreamPorts) -> StreamPipeline:
    from .streams.attempts import MessageCallers, MessageRunner
    from .streams.metrics import StreamMetrics
    from .streams.outcome import OutcomeWriter
    from .streams.pipeline import StreamPipeline
    from .streams.settlement import MessageSettler

    metrics, streams = StreamMetrics(background.runtime.metrics.registry), background.config.streams
    accounts, jobs = background.runtime.accounts, background.jobs
    runner = MessageRunner(
        streams,
        jobs,
        SubmissionParser(
            jobs,
            background.runtime.tiers,
            accounts.ledger.check_cost,
            region=background.config.identity.region,
            sessions=background.runtime.sessions,
        ),
        background.runner,
        MessageCallers(accounts.authenticator.principal, accounts.ledger.limits, accounts.authenticator.ready),
        metrics,
    )
    settler = MessageSettler(ports, runner, OutcomeWriter(topics.name), metrics, max_attempts=streams.max_attempts)
    return StreamPipeline(str(topics.source), ports, settler, streams, metrics, drain_s=background.jobs.drain_s)
