"""Prometheus metrics of jobs. Callers cannot choose label values."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge

from causeway_server.router.serving.metrics import described

from ..storage.record import QueueDepths

_QUEUE = ("tier", "priority")


class JobMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        counter, gauge = partial(described, Counter, registry), partial(described, Gauge, registry)
        self.runs = counter("causeway_jobs_runs", ("tier", "outcome"))
        self.deliveries = counter("causeway_jobs_webhook_deliveries", ("outcome",))
        self.refused = gauge("causeway_jobs_refused")
        self._queued = gauge("causeway_jobs_queued", _QUEUE)
        self._running = gauge("causeway_jobs_running", _QUEUE)
        self._oldest = gauge("causeway_jobs_oldest_queued_seconds", _QUEUE)
        self._awaiting_retry = gauge("causeway_jobs_awaiting_retry")
        self._parked = gauge("causeway_jobs_parked")
        self._dead = gauge("causeway_jobs_dead_letters")
        self._file_bytes = gauge("causeway_jobs_file_bytes", ("store",))
        self._pending = gauge("causeway_jobs_webhook_deliveries_pending")
        self._receivers = gauge("causeway_jobs_webhook_receivers", ("state",))

    def set_file_bytes(self, by_store: Mapping[str, int]) -> None:
        for store, size in by_store.items():
            self._file_bytes.labels(store).set(size)

    def set_depths(self, depths: QueueDepths, now_ms: int) -> None:
        """Set all gauges. `now_ms`: Unix time."""
        for queue in depths.queues:
            self._queued.labels(queue.tier, queue.priority).set(queue.queued)
            self._running.labels(queue.tier, queue.priority).set(queue.running)
            age_s = max(0.0, (now_ms - queue.oldest_ms) / 1000.0) if queue.oldest_ms else 0.0
            self._oldest.labels(queue.tier, queue.priority).set(age_s)
        self._awaiting_retry.set(depths.waiting)
        self._parked.set(depths.parked)
        self._dead.set(depths.dead)
        self._pending.set(depths.pending_deliveries)
        closed = depths.receivers - depths.receivers_open - depths.receivers_half_open
        self._receivers.labels("closed").set(closed)
        self._receivers.labels("open").set(depths.receivers_open)
        self._receivers.labels("half_open").set(depths.receivers_half_open)
