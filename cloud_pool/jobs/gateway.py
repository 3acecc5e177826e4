"""The jobs of a gateway: the HTTP API over the stores."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

import anyio
from prometheus_client import CollectorRegistry

from ..accounts.identity.principal import Principal
from ..accounts.tenants.config import TenantLimits
from ..config.tiers import Tier
from ..observability.tracing import JobTrace
from .config import JobsConfig
from .errors import JobStoreUnavailable
from .http.batch_api import BatchApi
from .http.job_api import IdentifyCaller, JobApi
from .metrics import JobMetrics
from .stores import JobStores
from .submission import SubmissionParser

_GAUGES_S = 5.0
_log = logging.getLogger("causeway.cloud.jobs")


class JobsGateway:
    """Accepts jobs over HTTP. `api.handler` routes the requests.

    Args:
        tiers: by name and alias
        identify: request -> principal
        limits: limits of a principal's tenant
        clock: unix time, s
    """

    def __init__(
        self,
        config: JobsConfig,
        tiers: Mapping[str, Tier],
        identify: IdentifyCaller,
        registry: CollectorRegistry,
        *,
        limits: Callable[[Principal], TenantLimits] = lambda _: TenantLimits(),
        trace: JobTrace | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Raises ConfigError."""
        self._metrics = JobMetrics(registry)
        self._stores = JobStores.open(config, clock)
        parser = SubmissionParser(config, tiers)
        batches = BatchApi(config, self._stores, trace)
        self.api = JobApi(config, self._stores, parser, identify, limits, trace, more_routes=batches.routes)

    async def watch(self) -> None:
        """Update the gauges every 5 s, until cancelled. Logs once why jobs are refused."""
        logged = ""
        jobs = self._stores.jobs
        while True:
            try:
                await self._stores.durability.ensure()
                self._metrics.set_depths(await jobs.depths(), jobs.now_ms)
                logged = ""
            except JobStoreUnavailable as error:
                if error.message != logged:
                    _log.warning("jobs are refused: %s", error.message)
                logged = error.message
            await anyio.sleep(_GAUGES_S)

    async def close(self) -> None:
        """Close the connections to Redis."""
        await self._stores.close()
