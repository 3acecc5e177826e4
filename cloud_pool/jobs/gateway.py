"""Jobs' parts wired: what a gateway has of them, and the crew that a worker process is."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping

import anyio
from aiohttp import web
from aiohttp.abc import AbstractResolver
from prometheus_client import CollectorRegistry

from router.errors import ConfigError

from ..accounts.identity.principal import Principal
from ..accounts.tenants.config import TenantLimits
from ..config.tiers import Tier
from ..observability.tracing import JobTrace
from .batches.batch_store import BatchStore
from .batches.file_store import FileStore
from .batches.processor import BatchProcessor
from .config import JobsConfig
from .errors import JobStoreUnavailable
from .http.batch_api import BatchApi
from .http.job_api import Handler, IdentifyCaller, JobApi
from .lua.scripts import SCRIPTS
from .metrics import JobMetrics
from .store.durability import DurabilityCheck
from .store.job_store import JobStore
from .store.redis_client import RedisClient
from .submission import SubmissionParser
from .webhooks.address import parse_networks
from .webhooks.delivery import WebhookSender
from .webhooks.outbox import WebhookOutbox
from .worker.runner import JobRunner
from .worker.worker import StopSignal, Worker

_GAUGES_S = 5.0
_log = logging.getLogger("causeway.cloud.jobs")


class JobsGateway:
    """Takes jobs over HTTP. Owns its connections to Redis. `tiers` by name and alias."""

    def __init__(
        self,
        config: JobsConfig,
        tiers: Mapping[str, Tier],
        who: IdentifyCaller,
        registry: CollectorRegistry,
        *,
        limits: Callable[[Principal], TenantLimits] = lambda _: TenantLimits(),
        trace: JobTrace | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Raises ConfigError."""
        self._config = config
        self._database = RedisClient(config.redis, config.key_prefix, SCRIPTS)
        store = self._store = JobStore(self._database, config, clock=clock)
        self._metrics = JobMetrics(registry)
        intake = SubmissionParser(
            config, tiers, parse_networks(config.webhooks.allowed_networks, "jobs.webhooks.allowed_networks")
        )
        hooks = WebhookOutbox(self._database, config.webhooks, clock=clock)
        files = FileStore(self._database, config.batches, clock=clock)
        batches = BatchStore(self._database, config.batches, clock=clock)
        self._durability = DurabilityCheck(self._database, config.durability)
        self._api = JobApi(config, self._database, store, intake, hooks, self._durability, who, limits, trace)
        self._api.routes.extend(BatchApi(config, files, batches, self._durability, trace).routes)

    async def watch(self) -> None:
        """Until cancelled: keeps the gauges, and says once what jobs would be refused for."""
        said = ""
        while True:
            try:
                await self._durability.ensure()
                self._metrics.set_depths(await self._store.depths(), self._store.now_ms)
                said = ""
            except JobStoreUnavailable as error:
                if error.message != said:
                    _log.warning("no jobs are taken: %s", error.message)
                said = error.message
            await anyio.sleep(_GAUGES_S)

    def handler(self, http: web.BaseRequest) -> Handler | None:
        """None: the path is not one of ours. Raises MethodNotAllowed."""
        return self._api.handler(http)

    async def close(self) -> None:
        await self._database.close()


class WorkerRuntime:
    """Runs jobs, feeds batches, delivers webhooks. `places` by tier; `tiers` by name and alias."""

    def __init__(
        self,
        config: JobsConfig,
        tiers: Mapping[str, Tier],
        runner: JobRunner,
        places: Mapping[str, int],
        registry: CollectorRegistry,
        *,
        resolver: AbstractResolver | None = None,
        trace: JobTrace | None = None,
        clock: Callable[[], float] = time.time,
        rng: Callable[[], float] = random.random,
    ) -> None:
        """Raises ConfigError."""
        self._config = config
        self._database = RedisClient(config.redis, config.key_prefix, SCRIPTS)
        store = JobStore(self._database, config, clock=clock)
        metrics = JobMetrics(registry)
        allowed = parse_networks(config.webhooks.allowed_networks, "jobs.webhooks.allowed_networks")
        hooks = WebhookOutbox(self._database, config.webhooks, clock=clock)
        self._worker = Worker(store, runner, places, config, metrics, trace=trace, rng=rng)
        self._deliverer = WebhookSender(
            hooks, config.webhooks, metrics, resolver=resolver, trace=trace, clock=clock, rng=rng
        )
        self._feeder = BatchProcessor(
            BatchStore(self._database, config.batches, clock=clock),
            FileStore(self._database, config.batches, clock=clock),
            store,
            SubmissionParser(config, tiers, allowed),
            config,
        )

    @property
    def name(self) -> str:
        return self._worker.name

    async def start(self, stop: StopSignal) -> bool:
        """Waits for Redis; False where `stop` came first. Raises ConfigError for one that may forget what it
        acknowledged."""
        faults: list[ConfigError] = []
        async with anyio.create_task_group() as tasks:

            async def wait() -> None:
                try:
                    await DurabilityCheck(self._database, self._config.durability).wait()
                except ConfigError as error:
                    faults.append(error)  # Raised below: out of a task group it would come wrapped.
                tasks.cancel_scope.cancel()

            tasks.start_soon(wait)
            await stop.wait()
            tasks.cancel_scope.cancel()
            return False
        for fault in faults:
            raise fault
        return True

    async def run(self, stop: StopSignal) -> None:
        """Until `stop`, and until the worker has drained. A delivery that is cut off is made again by another."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._deliverer.run)
            tasks.start_soon(self._feeder.run)
            await self._worker.run(stop)
            tasks.cancel_scope.cancel()

    async def close(self) -> None:
        """After `run`, or in its stead."""
        await self._deliverer.close()
        await self._database.close()
