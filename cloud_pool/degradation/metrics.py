"""What the ladder counts, for Prometheus."""

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
            "Answers by the tier asked for, the one that gave them, and what was wrong with the one above it.",
            ("requested", "tier", "reason"),
            registry=registry,
        )
        self._degraded = Counter(
            "causeway_cloud_degraded_answers",
            "Answers of second choice, and those that went on.",
            ("kind",),
            registry=registry,
        )
        self._share = Gauge(
            "causeway_cloud_tier_share",
            "Of the work that may go elsewhere, 0 to 1.",
            ("tier", "priority"),
            registry=registry,
        )
        self._breaker = Gauge("causeway_cloud_breaker_open", "1: open or half open.", ("tier",), registry=registry)

    def watch(self, ladder: TierFallback) -> None:
        """Read at each scrape."""
        for name in ladder.names:
            for priority in RANK:
                self._share.labels(name, priority).set_function(partial(_share, ladder, name, priority))
            self._breaker.labels(name).set_function(partial(_is_open, ladder, name))

    def answered(self, asked: str, tier: str, why: str) -> None:
        self._answers.labels(asked, tier, why).inc()

    def degraded(self, *kinds: Kind) -> None:
        for kind in kinds:
            self._degraded.labels(kind).inc()


def _share(ladder: TierFallback, name: str, priority: Priority) -> float:
    return ladder.tier_health(name, priority).share


def _is_open(ladder: TierFallback, name: str) -> float:
    return float(ladder.is_open(name))
