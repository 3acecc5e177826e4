"""The jobs of a gateway: the HTTP API over the stores."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import anyio
from prometheus_client import CollectorRegistry

from router.errors import JobStoreUnavailable

from ..accounts.audit import AuditLog
from ..accounts.model_access import allowed_tiers
from ..core.body_memory import BodyMemory
from ..observability.supervision import keep_running
from ..observability.tracing import JobTrace
from ..tiers.tier import Tier
from .acceptance import AcceptanceLog
from .config import JobsConfig
from .http.batch_api import BatchApi
from .http.dead_letter_api import DeadLetterApi
from .http.job_api import JobApi, JobCallers
from .metrics import JobMetrics
from .named_files import NamedFileReader
from .store.redis_client import redis_time
from .stores import JobStores
from .submission import SubmissionParser

_GAUGES_S = 5.0
_log = logging.getLogger("causeway.cloud.jobs")


class JobsGateway:
    """Accepts jobs over HTTP. `api.handler` routes the requests, `dead_letters.handler` those of operators.

    `files` reads the uploaded files that requests name.

    Args:
        tiers: by name and alias
        bodies: bounds the bodies in memory; the server releases them
        audit: gets a record of each job and batch that is acknowledged; None: no records
        clock: replaces Redis's clock in tests; unix time, s
    """

    def __init__(
        self,
        config: JobsConfig,
        tiers: Mapping[str, Tier],
        callers: JobCallers,
        registry: CollectorRegistry,
        *,
        trace: JobTrace | None = None,
        audit: AuditLog | None = None,
        bodies: BodyMemory | None = None,
        clock: Callable[[], float] = redis_time,
    ) -> None:
        """Raises ConfigError."""
        self.refused = ""  # why no job is accepted now, as the last check found
        self._metrics = JobMetrics(registry)
        self._stores = JobStores.open(config, clock)
        self.files = NamedFileReader(self._stores.files)
        parser = SubmissionParser(config, tiers, callers.check_cost)
        self.dead_letters = DeadLetterApi(self._stores.jobs)
        accepted = AcceptanceLog(audit)
        bodies = bodies or BodyMemory()
        batches = BatchApi(
            config,
            self._stores,
            trace,
            bodies=bodies,
            allowed=lambda principal: allowed_tiers(tiers, principal, callers.limits(principal)),
            accepted=accepted,
        )
        self.api = JobApi(
            config,
            self._stores,
            parser,
            callers,
            trace,
            bodies=bodies,
            more_routes=batches.routes,
            accepted=accepted,
        )

    async def watch(self) -> None:
        """Check the store and update the gauges every 5 s, until cancelled. Logs once why jobs are refused."""
        await keep_running("the check of the job store", self._watch)

    async def _watch(self) -> None:
        while True:
            try:
                await self._stores.durability.ensure(again=True)
                depths = await self._stores.jobs.depths()
                self._metrics.set_depths(depths, depths.now_ms)
                self._metrics.set_file_bytes(await self._stores.files.stored_bytes())
                if self.refused:
                    _log.info("jobs are accepted again")
                self.refused = ""
            except JobStoreUnavailable as error:
                reason = self._stores.database.explain(error)
                if reason != self.refused:
                    _log.warning("jobs are refused: %s", reason)
                self.refused = reason
            self._metrics.set_refused(bool(self.refused))
            await anyio.sleep(_GAUGES_S)

    async def close(self) -> None:
        """Close the connections to Redis."""
        await self._stores.close()
