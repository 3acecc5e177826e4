"""What jobs count, for Prometheus. No label holds anything that a caller can invent."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from .store.job_store import QueueDepths

_QUEUE = ("tier", "priority")


class JobMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._attempts = Counter(
            "causeway_jobs_attempts",
            "Runs by what became of them: succeeded, failed, expired, later, again, dead, lost, released.",
            ("tier", "outcome"),
            registry=registry,
        )
        self._webhooks = Counter(
            "causeway_jobs_webhooks", "Deliveries: delivered, again, failed, disabled.", ("outcome",), registry=registry
        )
        self._queued = Gauge("causeway_jobs_queued", "Jobs that no worker has.", _QUEUE, registry=registry)
        self._running = Gauge("causeway_jobs_running", "Jobs that a worker has.", _QUEUE, registry=registry)
        self._oldest = Gauge("causeway_jobs_oldest_seconds", "Age of the oldest queued job.", _QUEUE, registry=registry)
        self._waiting = Gauge("causeway_jobs_waiting", "Jobs between two attempts.", registry=registry)
        self._dead = Gauge("causeway_jobs_dead_letters", "Dead letters kept.", registry=registry)
        self._hooks = Gauge("causeway_jobs_webhooks_due", "Deliveries that are still to be made.", registry=registry)

    def attempt(self, tier: str, outcome: str) -> None:
        self._attempts.labels(tier, outcome).inc()

    def webhook(self, outcome: str) -> None:
        self._webhooks.labels(outcome).inc()

    def depths(self, depths: QueueDepths, now_ms: int) -> None:
        for queue in depths.queues:
            self._queued.labels(queue.tier, queue.priority).set(queue.queued)
            self._running.labels(queue.tier, queue.priority).set(queue.running)
            age_s = max(0.0, (now_ms - queue.oldest_ms) / 1000.0) if queue.oldest_ms else 0.0
            self._oldest.labels(queue.tier, queue.priority).set(age_s)
        self._waiting.set(depths.waiting)
        self._dead.set(depths.dead)
        self._hooks.set(depths.hooks)
