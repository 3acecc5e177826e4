"""A worker's parts: it runs jobs, processes batches and sends webhooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from urllib.parse import urlsplit

import anyio
import msgspec
from prometheus_client import CollectorRegistry

from router.serving.webhooks import DeliveryOutcome, WebhookSender

from ...accounts.tenants.config import TenantLimits
from ...lifetime import StopSignal, open_all
from ...observability.supervision import keep_running
from ...observability.tracing import JobTrace
from ...tiers.tier import Tier
from ..batches.processor import BatchProcessor
from ..config import JobsConfig
from ..metrics import JobMetrics
from ..store.redis_client import redis_time
from ..store.usage_outbox import AddUsage, UsageOutbox
from ..stores import JobStores
from ..submission import SubmissionParser
from ..webhooks.outbox import WebhookDelivery
from .runner import JobRunner
from .slots import WorkerSlots
from .worker import Worker

_FLUSH_S = 3.0


class WorkerAccounts(msgspec.Struct, frozen=True):
    """What a worker has to do with its tenants' accounts."""

    limits: Callable[[str], TenantLimits] = lambda _: TenantLimits()  # of a tenant, for the lines of its batches
    add_usage: AddUsage | None = None  # gets what all workers' accepted reports billed; None: other workers move it


class WorkerRuntime:
    """Owns the connections to Redis and to webhook receivers: call `close`.

    Args:
        tiers: by name and alias
        slots: of concurrent jobs, by tier
        clock: replaces Redis's clock in tests; unix time, s
    """

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
        clock: Callable[[], float] = redis_time,
    ) -> None:
        """Raises ConfigError."""
        stores = self._stores = JobStores.open(config, clock)
        metrics = JobMetrics(registry)
        self.worker = Worker(
            stores.jobs,
            runner,
            slots,
            config,
            metrics,
            trace=trace,
        )
        stores.outbox.on_unreadable = partial(metrics.count_delivery, "failed")
        self._sender = WebhookSender(stores.outbox, config.webhooks, observe=partial(_observe_delivery, metrics, trace))
        accounts = accounts or WorkerAccounts()
        add_usage = accounts.add_usage
        self._usage = None if add_usage is None else UsageOutbox(stores.database, add_usage)
        self._batches = BatchProcessor(stores, SubmissionParser(config, tiers), config, accounts.limits)

    async def start(self, stop: StopSignal) -> bool:
        """Wait for Redis. Returns False if `stop` came first. Raises ConfigError if Redis is not durable."""
        return await open_all(stop, self._stores.durability.wait)

    async def run(self, stop: StopSignal) -> None:
        """Work until `stop` and until the worker has drained. Another worker repeats a webhook that is cut off."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(keep_running, "the sender of webhooks", self._sender.run)
            tasks.start_soon(keep_running, "the processor of batches", self._batches.run)
            if self._usage is not None:
                tasks.start_soon(keep_running, "the writer of usage", self._usage.run)
            await self.worker.run(stop)
            tasks.cancel_scope.cancel()

    async def close(self) -> None:
        """Move the last bills and close all connections, after `run` or without it."""
        if self._usage is not None:
            with anyio.move_on_after(_FLUSH_S):
                await self._usage.flush()
        await self._sender.close()
        await self._stores.close()


def _observe_delivery(
    metrics: JobMetrics, trace: JobTrace | None, delivery: WebhookDelivery
) -> Callable[[DeliveryOutcome, int], None]:
    """Count an attempt at a delivery, and trace it; returns what is called with its outcome and status at its end."""
    host = urlsplit(delivery.url).hostname or ""
    span = None if trace is None else trace.deliver(delivery.job, host, delivery.traceparent, delivery.attempts)

    def end(outcome: DeliveryOutcome, status: int) -> None:
        metrics.count_delivery(outcome)
        if span is not None:
            error = "" if outcome == "delivered" else str(status or "undeliverable")
            span.end(error, {"http.response.status_code": status} if status else None)

    return end
