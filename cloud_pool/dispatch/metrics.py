"""Prometheus metrics of retries and endpoints. Addresses come from the configuration and DNS, never from a caller."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter

from causeway_server.router.serving.metrics import Sample, SampleCollector, described

from .dispatcher import Dispatcher
from .endpoint_selection import Endpoint
from .pool import Pool


class DispatchMetrics:
    """The metrics of dispatchers and endpoints, collected at each scrape: removed endpoints leave no series."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._pools: Mapping[str, Pool] = {}
        self._dispatchers: Mapping[str, Dispatcher] = {}
        self._retries = described(Counter, registry, "causeway_gateway_retries", ("tier", "code"))
        self._ejections = described(Counter, registry, "causeway_gateway_endpoint_ejections", ("tier", "code"))
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
            yield Sample("causeway_gateway_retry_budget_remaining", dispatcher.retries_left, (("tier", tier),))
        for tier, pool in self._pools.items():
            for endpoint in pool.endpoints:
                labels = (("tier", tier), ("endpoint", endpoint.address), ("zone", endpoint.zone))
                for name, value in _readings(endpoint):
                    yield Sample(name, value, labels)


def _readings(endpoint: Endpoint) -> Iterator[tuple[str, float]]:
    """Yield the names and values of an endpoint's gauges."""
    yield "causeway_gateway_endpoint_outstanding", endpoint.outstanding
    is_ejected, is_draining = endpoint.phase == "ejected", endpoint.phase == "draining"
    yield "causeway_gateway_endpoint_ejected", is_ejected
    yield "causeway_gateway_endpoint_draining", is_draining
    yield "causeway_gateway_endpoint_slow", endpoint.slow
    if (reported := endpoint.reported) is not None:
        yield "causeway_gateway_endpoint_requests", reported.requests
        yield "causeway_gateway_endpoint_kv_use", reported.kv_use
    if endpoint.ttft_s > 0.0:
        yield "causeway_gateway_endpoint_ttft_seconds", endpoint.ttft_s
