"""Prometheus metrics of jobs. Callers cannot choose label values."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge

from ..storage.record import QueueDepths

_QUEUE = ("tier", "priority")


class JobMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self.runs = counter(
            "causeway_jobs_runs",
            "Finished job runs, by outcome: succeeded, failed, expired, cancelled (its token is revoked), postponed "
            "(not started, retried later without losing an attempt), retried (failed, one attempt used), superseded "
            "(another worker now owns the job, or it was cancelled), released (returned to the queue by a draining "
            "worker), quarantined (the record cannot be read, so the job is a dead letter).",
            ("tier", "outcome"),
        )
        self._revisions = counter(
            "causeway_jobs_revisions",
            "Revisions of answers, by outcome: made, too_late (the part was not read in time, or the "
            "deadline passed), failed (the part could not be read, the run failed, or its workers were "
            "lost), no_room (too many answers were waiting for late parts), superseded (the job was "
            "cancelled or erased, or another worker now owns it).",
            ("outcome",),
        )
        self.deliveries = counter(
            "causeway_jobs_webhook_deliveries",
            "Attempts to deliver a webhook, by outcome: delivered, retried, failed (given up), disabled (410 Gone).",
            ("outcome",),
        )
        self.refused = gauge(
            "causeway_jobs_refused",
            "Whether this gateway refuses jobs (1 or 0). Its log and the operators' /readyz tell the reason.",
        )
        self._queued = gauge("causeway_jobs_queued", "Queued jobs, except parked ones.", _QUEUE)
        self._running = gauge("causeway_jobs_running", "Jobs claimed by a worker.", _QUEUE)
        self._oldest = gauge(
            "causeway_jobs_oldest_queued_seconds", "Age of the oldest queued job, except parked ones.", _QUEUE
        )
        self._awaiting_retry = gauge("causeway_jobs_awaiting_retry", "Jobs that wait for their next attempt.")
        self._parked = gauge(
            "causeway_jobs_parked", "Queued jobs of tenants over a rate or budget, which wait until it is reset."
        )
        self._dead = gauge("causeway_jobs_dead_letters", "Dead letters.")
        self._file_bytes = gauge("causeway_jobs_file_bytes", "Bytes of batches' files, by content store.", ("store",))
        self._pending = gauge(
            "causeway_jobs_webhook_deliveries_pending",
            "Webhook deliveries that have neither succeeded nor finally failed yet.",
        )
        self._receivers = gauge(
            "causeway_jobs_webhook_receivers",
            "Webhook receivers with pending deliveries, by the state of their breaker: closed, open (a pause after"
            " failures in a row), half_open (one delivery at a time until one succeeds).",
            ("state",),
        )

    def count_revisions(self, outcome: str, count: int = 1) -> None:
        if count:
            self._revisions.labels(outcome).inc(count)

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
