"""Prometheus metrics of admission."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from .controller import AdmissionController, AdmissionCounters
from .scheduler import Reason
from .ticket import RANK, Priority

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TIER = ("tier",)
_LABELS = ("tier", "priority")


class AdmissionMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._queue = Histogram(
            "causeway_cloud_queue_seconds",
            "Time from a request's arrival to its first permit.",
            _LABELS,
            buckets=_SECONDS,
            registry=registry,
        )
        self._shed = Counter(
            "causeway_cloud_requests_shed",
            "Requests that a tier's admission rejected: overload, deadline, queue_full or displaced from the queue.",
            (*_LABELS, "reason"),
            registry=registry,
        )
        self._preemptions = Counter(
            "causeway_cloud_preemptions",
            "Sequences that gave their permit back before their first token.",
            _LABELS,
            registry=registry,
        )
        self._limit = Gauge(
            "causeway_cloud_concurrency_limit",
            "Sequences of this gateway that may be in Triton at once.",
            _TIER,
            registry=registry,
        )
        self._running = Gauge(
            "causeway_cloud_requests_running", "Sequences that hold a permit.", _TIER, registry=registry
        )
        self._queued = Gauge(
            "causeway_cloud_requests_queued", "Sequences that wait for a permit.", _LABELS, registry=registry
        )

    def of(self, tier: str) -> AdmissionCounters:
        """Return the counters of one tier."""
        return _TierCounters(tier, self._queue, self._shed, self._preemptions)

    def watch(self, tier: str, admission: AdmissionController) -> None:
        """Read the controller at each scrape."""
        self._limit.labels(tier).set_function(lambda: admission.limit)
        self._running.labels(tier).set_function(lambda: admission.running)
        for priority in RANK:
            self._watch_priority(tier, priority, admission)

    def _watch_priority(self, tier: str, priority: Priority, admission: AdmissionController) -> None:
        self._queued.labels(tier, priority).set_function(lambda: admission.waiting_of(priority))


class _TierCounters(AdmissionCounters):
    def __init__(self, tier: str, queue: Histogram, shed: Counter, preemptions: Counter) -> None:
        self._tier = tier
        self._queue = queue
        self._shed = shed
        self._preemptions = preemptions

    def admitted(self, priority: Priority, seconds: float) -> None:
        self._queue.labels(self._tier, priority).observe(seconds)

    def shed(self, priority: Priority, reason: Reason) -> None:
        self._shed.labels(self._tier, priority, reason).inc()

    def preempted(self, priority: Priority) -> None:
        self._preemptions.labels(self._tier, priority).inc()
