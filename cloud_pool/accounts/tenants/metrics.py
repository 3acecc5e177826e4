"""What tenants use and what their accounts could not keep, for Prometheus.

Tenants' names come from signed tokens and the configuration, never from what a caller writes.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

from router.types import Usage

from .config import MICRO_USD_PER_USD

ReadGauge = Callable[[], float]


class TenantMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._tokens = Counter(
            "causeway_cloud_tenant_tokens", "Tokens by tenant.", ("tenant", "tier", "type"), registry=registry
        )
        self._usd = Counter(
            "causeway_cloud_tenant_usd", "Cost by tenant, USD.", ("tenant", "tier", "route"), registry=registry
        )

    def used(self, tenant: str, tier: str, route: str, usage: Usage, micro_usd: int) -> None:
        self._tokens.labels(tenant, tier, "prompt").inc(usage.prompt_tokens)
        self._tokens.labels(tenant, tier, "completion").inc(usage.completion_tokens)
        self._usd.labels(tenant, tier, route).inc(micro_usd / MICRO_USD_PER_USD)

    def watch(
        self,
        *,
        local_checks: ReadGauge,
        stale_accepts: ReadGauge,
        usage_lost: ReadGauge,
        audit_lost: ReadGauge,
        keys_stale: ReadGauge,
    ) -> None:
        """Read at each scrape."""
        for name, text, read in (
            (
                "causeway_cloud_local_rate_checks",
                "Rate checks made without Redis, on this gateway's share.",
                local_checks,
            ),
            ("causeway_cloud_stale_revocation_accepts", "Tokens let in on an old list of revocations.", stale_accepts),
            ("causeway_cloud_usage_records_lost", "Requests missing in the tenants' usage.", usage_lost),
            ("causeway_cloud_audit_records_lost", "Audit records that were not written.", audit_lost),
            ("causeway_cloud_key_file_stale", "1: the key file's last change is not in use.", keys_stale),
        ):
            Gauge(name, text, registry=self._registry).set_function(read)
