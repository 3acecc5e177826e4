"""Prometheus metrics of endpoints. Their addresses come from the configuration and from DNS, never from a caller."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter

from router.serving.gauges import Gauge, GaugeCollector

from .pool import Pool


class EndpointMetrics:
    """Collected at each scrape, so that removed endpoints leave no series: DNS may list ever new addresses."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._pools: Mapping[str, Pool] = {}
        self._ejections = Counter(
            "causeway_cloud_endpoint_ejections",
            "Ejections of endpoints, by the error's code.",
            ("tier", "code"),
            registry=registry,
        )
        registry.register(GaugeCollector(self._gauges))

    def watch(self, pools: Mapping[str, Pool]) -> None:
        self._pools = pools

    def ejected(self, tier: str, code: str) -> None:
        self._ejections.labels(tier, code).inc()

    def _gauges(self) -> Iterator[Gauge]:
        for tier, pool in self._pools.items():
            for one in pool.endpoints:
                labels = (("tier", tier), ("endpoint", one.address), ("zone", one.zone))
                yield Gauge(
                    "causeway_cloud_endpoint_outstanding",
                    "Open requests of this process at the endpoint.",
                    one.outstanding,
                    labels,
                )
                yield Gauge(
                    "causeway_cloud_endpoint_ejected",
                    "1 while the endpoint is ejected and gets probes only.",
                    one.phase == "ejected",
                    labels,
                )
                yield Gauge(
                    "causeway_cloud_endpoint_draining",
                    "1 while the endpoint is no longer listed and finishes its last requests.",
                    one.phase == "draining",
                    labels,
                )
                yield Gauge(
                    "causeway_cloud_endpoint_slow",
                    "1 while the endpoint is slower than its peers and gets probes as long as they have room.",
                    one.slow,
                    labels,
                )
                if one.ttft_s > 0.0:
                    yield Gauge(
                        "causeway_cloud_endpoint_ttft_seconds", "Recent mean time to first token.", one.ttft_s, labels
                    )
