"""What Prometheus hears of endpoints. Their addresses come from the configuration and from DNS, never from a caller."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .pool import Pool

_LABELS = ("tier", "endpoint", "zone")


class EndpointMetrics(Collector):
    """Read at each scrape; an endpoint that is gone leaves no series behind, for DNS may name ever new ones."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._pools: Mapping[str, Pool] = {}
        self._ejections = Counter(
            "causeway_cloud_endpoint_ejections",
            "How often an endpoint was taken out, by the error's code.",
            ("tier", "code"),
            registry=registry,
        )
        registry.register(self)

    def watch(self, pools: Mapping[str, Pool]) -> None:
        self._pools = pools

    def ejected(self, tier: str, code: str) -> None:
        self._ejections.labels(tier, code).inc()

    def collect(self) -> Iterable[Metric]:
        outstanding = GaugeMetricFamily("causeway_cloud_endpoint_outstanding", "Requests there.", labels=_LABELS)
        ejected = GaugeMetricFamily("causeway_cloud_endpoint_ejected", "1: it gets none for now.", labels=_LABELS)
        draining = GaugeMetricFamily("causeway_cloud_endpoint_draining", "1: it gets no more.", labels=_LABELS)
        slow = GaugeMetricFamily(
            "causeway_cloud_endpoint_slow", "1: it is asked by probes while its peers have room.", labels=_LABELS
        )
        ttft = GaugeMetricFamily(
            "causeway_cloud_endpoint_ttft_seconds", "Recent time to the first token.", labels=_LABELS
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
