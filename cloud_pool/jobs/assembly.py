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

from ..identity.principal import Principal
from ..tenants.limits import Limits
from ..tiers import Tier
from ..traced import JobTrace
from .address import parse_networks
from .api import Handler, JobsApi, Who
from .batch_api import BatchApi
from .batches import Batches
from .config import JobsConfig
from .database import Database
from .delivery import Deliverer
from .durability import Durability
from .errors import StoreUnavailable
from .feeder import Feeder
from .files import Files
from .intake import Intake
from .library import SCRIPTS
from .metrics import JobMetrics
from .runner import Runner
from .store import Store
from .webhooks import Hooks
from .worker import Stop, Worker

_GAUGES_S = 5.0
_log = logging.getLogger("causeway.cloud.jobs")


class JobsGateway:
    """Takes jobs over HTTP. Owns its connections to Redis. `tiers` by name and alias."""

    def __init__(
        self,
        config: JobsConfig,
        tiers: Mapping[str, Tier],
        who: Who,
        registry: CollectorRegistry,
        *,
        limits: Callable[[Principal], Limits] = lambda _: Limits(),
        trace: JobTrace | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Raises ConfigError."""
        self._config = config
        self._database = Database(config.redis, config.prefix, SCRIPTS)
        store = self._store = Store(self._database, config, clock=clock)
        self._metrics = JobMetrics(registry)
        intake = Intake(config, tiers, parse_networks(config.webhooks.allow, "jobs.webhooks.allow"))
        hooks = Hooks(self._database, config.webhooks, clock=clock)
        files = Files(self._database, config.batches, clock=clock)
        batches = Batches(self._database, config.batches, clock=clock)
        self._durability = Durability(self._database, config.durability)
        self._api = JobsApi(config, self._database, store, intake, hooks, self._durability, who, limits, trace)
        self._api.routes.extend(BatchApi(config, files, batches, self._durability, trace).routes)

    async def watch(self) -> None:
        """Until cancelled: keeps the gauges, and says once what jobs would be refused for."""
        said = ""
        while True:
            try:
                await self._durability.ensure()
                self._metrics.depths(await self._store.depths(), self._store.now_ms)
                said = ""
            except StoreUnavailable as error:
                if error.message != said:
                    _log.warning("no jobs are taken: %s", error.message)
                said = error.message
            await anyio.sleep(_GAUGES_S)

    def handler(self, http: web.BaseRequest) -> Handler | None:
        """None: the path is not one of ours. Raises MethodNotAllowed."""
        return self._api.handler(http)

    async def close(self) -> None:
        await self._database.close()


class Crew:
    """Runs jobs, feeds batches, delivers webhooks. `places` by tier; `tiers` by name and alias."""

    def __init__(
        self,
        config: JobsConfig,
        tiers: Mapping[str, Tier],
        runner: Runner,
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
        self._database = Database(config.redis, config.prefix, SCRIPTS)
        store = Store(self._database, config, clock=clock)
        metrics = JobMetrics(registry)
        allowed = parse_networks(config.webhooks.allow, "jobs.webhooks.allow")
        hooks = Hooks(self._database, config.webhooks, clock=clock)
        self._worker = Worker(store, runner, places, config, metrics, trace=trace, rng=rng)
        self._deliverer = Deliverer(
            hooks, config.webhooks, metrics, resolver=resolver, trace=trace, clock=clock, rng=rng
        )
        self._feeder = Feeder(
            Batches(self._database, config.batches, clock=clock),
            Files(self._database, config.batches, clock=clock),
            store,
            Intake(config, tiers, allowed),
            config,
        )

    @property
    def name(self) -> str:
        return self._worker.name

    async def start(self, stop: Stop) -> bool:
        """Waits for Redis; False where `stop` came first. Raises ConfigError for one that may forget what it
        acknowledged."""
        faults: list[ConfigError] = []
        async with anyio.create_task_group() as tasks:

            async def wait() -> None:
                try:
                    await Durability(self._database, self._config.durability).wait()
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

    async def run(self, stop: Stop) -> None:
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
