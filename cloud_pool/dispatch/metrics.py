"""Prometheus metrics of retries and endpoints. Addresses come from the configuration and DNS, never from a caller."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter

from causeway_server.router.serving.metrics import Sample, SampleCollector

from .dispatcher import Dispatcher
from .endpoint_selection import Endpoint
from .pool import Pool


class DispatchMetrics:
    """The metrics of all tiers' dispatchers and endpoints.

    Endpoints are collected at each scrape, so that removed ones leave no series: DNS may list ever new addresses.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._pools: Mapping[str, Pool] = {}
        self._dispatchers: Mapping[str, Dispatcher] = {}
        self._retries = Counter(
            "causeway_gateway_retries",
            "Requests retried on another endpoint, by the error code of the attempt before.",
            ("tier", "code"),
            registry=registry,
        )
        self._ejections = Counter(
            "causeway_gateway_endpoint_ejections",
            "Ejections of endpoints, by the error's code.",
            ("tier", "code"),
            registry=registry,
        )
        registry.register(SampleCollector(self._samples))

    def watch(self, pools: Mapping[str, Pool], dispatchers: Mapping[str, Dispatcher]) -> None:
        """Read the tiers' pools and dispatchers at each scrape."""
        self._pools, self._dispatchers = pools, dispatchers

    def retried(self, tier: str, code: str) -> None:
        self._retries.labels(tier, code).inc()

    def ejected(self, tier: str, code: str) -> None:
        self._ejections.labels(tier, code).inc()

    def _samples(self) -> Iterator[Sample]:
        for tier, dispatcher in self._dispatchers.items():
            yield Sample(
                "causeway_gateway_retry_budget_remaining",
                "Extra attempts that the retry budget allows now.",
                dispatcher.retries_left,
                (("tier", tier),),
            )
        for tier, pool in self._pools.items():
            for endpoint in pool.endpoints:
                labels = (("tier", tier), ("endpoint", endpoint.address), ("zone", endpoint.zone))
                for name, description, value in _readings(endpoint):
                    yield Sample(name, description, value, labels)


def _readings(endpoint: Endpoint) -> Iterator[tuple[str, str, float]]:
    """Yield the names, descriptions and values of an endpoint's gauges."""
    yield (
        "causeway_gateway_endpoint_outstanding",
        "Open requests of this process at the endpoint.",
        endpoint.outstanding,
    )
    is_ejected, is_draining = endpoint.phase == "ejected", endpoint.phase == "draining"
    yield "causeway_gateway_endpoint_ejected", "1 while the endpoint is ejected and gets probes only.", is_ejected
    yield (
        "causeway_gateway_endpoint_draining",
        "1 while the endpoint is no longer listed and finishes its last requests.",
        is_draining,
    )
    yield (
        "causeway_gateway_endpoint_slow",
        "1 while the endpoint is slower than its peers and gets probes as long as they have room.",
        endpoint.slow,
    )
    if (reported := endpoint.reported) is not None:
        yield "causeway_gateway_endpoint_requests", "Requests that the server itself reports.", reported.requests
        yield "causeway_gateway_endpoint_kv_use", "Share of the server's KV cache that they need.", reported.kv_use
    if endpoint.ttft_s > 0.0:
        yield "causeway_gateway_endpoint_ttft_seconds", "Recent mean time to first token.", endpoint.ttft_s
