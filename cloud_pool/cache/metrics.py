"""What the cache counts. `fault` is one of `Fault`: nothing here is a caller's word."""

from __future__ import annotations

from typing import Literal

from prometheus_client import CollectorRegistry, Counter

from .cached_answer import CacheStatus

Fault = Literal["away", "corrupt", "deaf", "lost_lease", "took_over", "not_kept", "crowded"]


class CacheMetrics:
    """`away`: a call that Redis did not answer, or was not asked; `deaf`: no word from other gateways comes through.

    `lost_lease`: a leader was taken for dead; `took_over`: a follower went on for a dead one; `not_kept`: an answer too
    large or not whole; `crowded`: too many answers are followed at once, so one more was made.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "causeway_cloud_cache", "Requests by what the shared cache did.", ("outcome",), registry=registry
        )
        self._faults = Counter(
            "causeway_cloud_cache_faults", "What went wrong in the shared cache.", ("fault",), registry=registry
        )

    def answered(self, status: CacheStatus) -> None:
        self._requests.labels(status).inc()

    def fault(self, fault: Fault) -> None:
        self._faults.labels(fault).inc()
