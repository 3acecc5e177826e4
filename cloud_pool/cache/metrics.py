"""Prometheus metrics of the shared cache. No label holds a value that a caller can choose."""

from __future__ import annotations

from typing import Literal

from prometheus_client import CollectorRegistry, Counter

CacheStatus = Literal["hit", "stale", "miss", "coalesced", "bypass"]
Fault = Literal[
    "redis_unavailable", "corrupt", "wakeups_unavailable", "lost_lease", "leader_takeover", "not_stored", "follow_limit"
]


class CacheMetrics:
    """Faults:

    redis_unavailable    a call that Redis did not answer, or that was skipped after a failure
    wakeups_unavailable  the subscription for other gateways' wake-ups is down
    lost_lease           another gateway took a living leader for dead
    leader_takeover      a follower continued the answer of a dead leader
    not_stored           the answer was too large or incomplete
    follow_limit         too many answers were followed at once, so one more was generated
    corrupt              an entry could not be read
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "causeway_cloud_cache_requests",
            "Requests by outcome in the shared cache: hit, stale, miss, coalesced, bypass.",
            ("outcome",),
            registry=registry,
        )
        self._faults = Counter(
            "causeway_cloud_cache_faults",
            "Faults of the shared cache by kind; requests go on without it.",
            ("fault",),
            registry=registry,
        )

    def answered(self, status: CacheStatus) -> None:
        self._requests.labels(status).inc()

    def fault(self, fault: Fault) -> None:
        self._faults.labels(fault).inc()
