"""Prometheus metrics of endpoints. Their addresses come from the configuration and from DNS, never from a caller."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .pool import Pool

_LABELS = ("tier", "endpoint", "zone")


class EndpointMetrics(Collector):
    """Collected at each scrape, so that removed endpoints leave no series: DNS may list ever new addresses."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._pools: Mapping[str, Pool] = {}
        self._ejections = Counter(
            "causeway_cloud_endpoint_ejections",
            "Ejections of endpoints, by the error's code.",
            ("tier", "code"),
            registry=registry,
        )
        registry.register(self)

    def watch(self, pools: Mapping[str, Pool]) -> None:
        self._pools = pools

    def ejected(self, tier: str, code: str) -> None:
        self._ejections.labels(tier, code).inc()

    def collect(self) -> Iterable[Metric]:
        outstanding = GaugeMetricFamily(
            "causeway_cloud_endpoint_outstanding", "Open requests of this process at the endpoint.", labels=_LABELS
        )
        ejected = GaugeMetricFamily(
            "causeway_cloud_endpoint_ejected", "1 while the endpoint is ejected and gets probes only.", labels=_LABELS
        )
        draining = GaugeMetricFamily(
            "causeway_cloud_endpoint_draining",
            "1 while the endpoint is no longer listed and finishes its last requests.",
            labels=_LABELS,
        )
        slow = GaugeMetricFamily(
            "causeway_cloud_endpoint_slow",
            "1 while the endpoint is slower than its peers and gets probes as long as they have room.",
            labels=_LABELS,
        )
        ttft = GaugeMetricFamily(
            "causeway_cloud_endpoint_ttft_seconds", "Recent mean time to first token.", labels=_LABELS
        )
        for tier, pool in self._pools.items():
            for one in pool.endpoints:
                labels = (tier, one.address, one.zone)
                outstanding.add_metric(labels, one.outstanding)
                ejected.add_metric(labels, float(one.phase == "ejected"))
                draining.add_metric(labels, float(one.phase == "draining"))
                slow.add_metric(labels, float(one.slow))
                if one.ttft_s > 0.0:
                    ttft.add_metric(labels, one.ttft_s)
        return (outstanding, ejected, draining, slow, ttft)
