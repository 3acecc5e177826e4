"""What a tier's door counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from .controller import AdmissionController
from .scheduler import Reason
from .ticket import RANK, Priority

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TIER = ("tier",)
_OF = ("tier", "priority")


class AdmissionMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        to = registry
        self._queue = Histogram(
            "causeway_cloud_queue_seconds", "Arrival to a place in the tier.", _OF, buckets=_SECONDS, registry=to
        )
        self._sheds = Counter(
            "causeway_cloud_requests_shed", "Requests turned away from a tier.", (*_OF, "reason"), registry=to
        )
        self._preemptions = Counter(
            "causeway_cloud_preemptions", "Requests that gave their place back before a first token.", _OF, registry=to
        )
        self._limit = Gauge(
            "causeway_cloud_concurrency_limit", "Requests that may be in Triton now.", _TIER, registry=to
        )
        self._running = Gauge("causeway_cloud_requests_running", "Requests in Triton.", _TIER, registry=to)
        self._waiting = Gauge("causeway_cloud_requests_queued", "Requests that wait for a place.", _OF, registry=to)

    def waited(self, tier: str) -> Callable[[Priority, float], None]:
        return lambda priority, seconds: self._queue.labels(tier, priority).observe(seconds)

    def shed(self, tier: str) -> Callable[[Priority, Reason], None]:
        return lambda priority, reason: self._sheds.labels(tier, priority, reason).inc()

    def preempted(self, tier: str) -> Callable[[Priority], None]:
        return lambda priority: self._preemptions.labels(tier, priority).inc()

    def watch(self, tier: str, admission: AdmissionController) -> None:
        """Read at each scrape."""
        self._limit.labels(tier).set_function(lambda: admission.limit)
        self._running.labels(tier).set_function(lambda: admission.running)
        for priority in RANK:
            self._watch_priority(tier, priority, admission)

    def _watch_priority(self, tier: str, priority: Priority, admission: AdmissionController) -> None:
        self._waiting.labels(tier, priority).set_function(lambda: admission.waiting_of(priority))
