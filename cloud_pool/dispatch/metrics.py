"""What dispatch counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

from .protocols import HedgeOutcome


class DispatchMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._retries = Counter(
            "causeway_cloud_retries",
            "Asks tried again on another endpoint, by the error that the first one gave.",
            ("tier", "code"),
            registry=registry,
        )
        self._hedges = Counter(
            "causeway_cloud_hedges",
            "Second endpoints asked because the first was slow: won, lost, failed, cancelled; refused by the share.",
            ("tier", "outcome"),
            registry=registry,
        )
        self._budget = Gauge(
            "causeway_cloud_retry_budget_remaining", "Extra tries that may be made now.", ("tier",), registry=registry
        )

    def of(self, tier: str) -> TierCounts:
        return TierCounts(tier, self._retries, self._hedges)

    def watch(self, tier: str, left: Callable[[], float]) -> None:
        """Read at each scrape."""
        self._budget.labels(tier).set_function(left)


class TierCounts:
    """`seam.Counts` of one tier."""

    def __init__(self, tier: str, retries: Counter, hedges: Counter) -> None:
        self._tier = tier
        self._retries = retries
        self._hedges = hedges

    def retried(self, code: str) -> None:
        self._retries.labels(self._tier, code).inc()

    def hedged(self, outcome: HedgeOutcome) -> None:
        self._hedges.labels(self._tier, outcome).inc()
