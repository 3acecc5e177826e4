"""Prometheus metrics of degradation."""

from __future__ import annotations

from functools import partial
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge

from ..admission import RANK, Priority
from .fallback import TierFallback

Kind = Literal["tier", "partial", "continued", "stale"]


class DegradationMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._answers = Counter(
            "causeway_cloud_tier_answers",
            "Answers by requested tier, answering tier, and the stress of the tier right above the answering one.",
            ("requested", "tier", "reason"),
            registry=registry,
        )
        self._degraded = Counter(
            "causeway_cloud_degraded_answers",
            "Answers from a lower tier, truncated, continued or stale.",
            ("kind",),
            registry=registry,
        )
        self._share = Gauge(
            "causeway_cloud_tier_share",
            "Share of the movable requests that the tier is offered, 0 to 1.",
            ("tier", "priority"),
            registry=registry,
        )
        self._breaker = Gauge(
            "causeway_cloud_breaker_open",
            "1 while the tier's breaker is open or half open.",
            ("tier",),
            registry=registry,
        )

    def watch(self, fallback: TierFallback) -> None:
        """Read the tiers' state at each scrape."""
        for name in fallback.names:
            for priority in RANK:
                self._share.labels(name, priority).set_function(partial(_share, fallback, name, priority))
            self._breaker.labels(name).set_function(partial(_is_open, fallback, name))

    def answered(self, requested: str, tier: str, reason: str) -> None:
        self._answers.labels(requested, tier, reason).inc()

    def degraded(self, *kinds: Kind) -> None:
        for kind in kinds:
            self._degraded.labels(kind).inc()


def _share(fallback: TierFallback, name: str, priority: Priority) -> float:
    return fallback.tier_health(name, priority).share


def _is_open(fallback: TierFallback, name: str) -> float:
    return float(fallback.is_open(name))
