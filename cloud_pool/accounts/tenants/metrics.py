"""Prometheus metrics of tenants and accounts.

Tenants' names come from signed tokens and the configuration, never from a request's content.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from router.types import Usage

from .config import MICRO_USD_PER_USD

ReadValue = Callable[[], float]


class _ReadCounter(Collector):
    """A counter that another object keeps; it is read at every scrape."""

    def __init__(self, name: str, help_text: str, read: ReadValue) -> None:
        self._name, self._help_text, self._read = name, help_text, read

    def collect(self) -> Iterator[CounterMetricFamily]:
        yield CounterMetricFamily(self._name, self._help_text, value=self._read())


class TenantMetrics:
    """Usage by tenant, and what accounting had to skip."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._tokens = Counter(
            "causeway_cloud_tenant_tokens", "Tokens used, by tenant.", ("tenant", "tier", "type"), registry=registry
        )
        self._usd = Counter(
            "causeway_cloud_tenant_usd", "Cost in USD, by tenant.", ("tenant", "tier", "route"), registry=registry
        )

    def count(self, tenant: str, tier: str, route: str, usage: Usage, micro_usd: int) -> None:
        """Count one request."""
        self._tokens.labels(tenant, tier, "prompt").inc(usage.prompt_tokens)
        self._tokens.labels(tenant, tier, "completion").inc(usage.completion_tokens)
        self._usd.labels(tenant, tier, route).inc(micro_usd / MICRO_USD_PER_USD)

    def watch(
        self,
        *,
        local_checks: ReadValue,
        stale_accepts: ReadValue,
        revocations_restored: ReadValue,
        usage_lost: ReadValue,
        audit_lost: ReadValue,
        redis_evicts: ReadValue,
        key_file_stale: ReadValue,
        fleet_unreachable: ReadValue,
    ) -> None:
        """Export these values; each is read at every scrape."""
        for name, text, read in (
            (
                "causeway_cloud_local_rate_checks",
                "Rate and budget checks made without Redis, against this gateway's share.",
                local_checks,
            ),
            (
                "causeway_cloud_stale_revocation_accepts",
                "Tokens accepted while the copy of the revocations was too old.",
                stale_accepts,
            ),
            (
                "causeway_cloud_revocations_restored",
                "Revocations that Redis had lost and that this process wrote back.",
                revocations_restored,
            ),
            ("causeway_cloud_usage_records_lost", "Requests missing in the tenants' usage.", usage_lost),
            ("causeway_cloud_audit_records_lost", "Audit records that were not written.", audit_lost),
        ):
            self._registry.register(_ReadCounter(name, text, read))
        Gauge(
            "causeway_cloud_redis_evicts",
            "1 while the Redis of budgets, usage and revocations may evict keys.",
            registry=self._registry,
        ).set_function(redis_evicts)
        Gauge(
            "causeway_cloud_key_file_stale",
            "1 while the last change of the key file is invalid and therefore not in use.",
            registry=self._registry,
        ).set_function(key_file_stale)
        Gauge(
            "causeway_cloud_fleet_unreachable",
            "1 while keys and revocations of the fleet's control plane cannot be read.",
            registry=self._registry,
        ).set_function(fleet_unreachable)
