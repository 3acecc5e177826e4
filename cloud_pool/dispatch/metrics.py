"""Prometheus metrics of dispatch."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge


class DispatchMetrics:
    """The metrics of all tiers' dispatchers; `of` gives one tier's counters."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._retries = Counter(
            "causeway_cloud_retries",
            "Requests retried on another endpoint, by the error code of the attempt before.",
            ("tier", "code"),
            registry=registry,
        )
        self._budget = Gauge(
            "causeway_cloud_retry_budget_remaining",
            "Extra attempts that the retry budget allows now.",
            ("tier",),
            registry=registry,
        )

    def of(self, tier: str) -> TierDispatchCounters:
        return TierDispatchCounters(tier, self._retries)

    def watch(self, tier: str, remaining: Callable[[], float]) -> None:
        """Read `remaining` at each scrape."""
        self._budget.labels(tier).set_function(remaining)


class TierDispatchCounters:
    """The `DispatchCounters` of one tier."""

    def __init__(self, tier: str, retries: Counter) -> None:
        self._tier = tier
        self._retries = retries

    def retried(self, code: str) -> None:
        self._retries.labels(self._tier, code).inc()


class NoCounters:
    """Count nothing."""

    def retried(self, code: str) -> None: ...
