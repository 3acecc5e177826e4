"""The tenants' metrics: bounded in number, and without jobs where they are about callers that wait."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from causeway_server.cloud_pool.accounts.ledger import MAX_TENANTS, LedgerEntry, TenantMetrics
from causeway_server.router.types import Usage


def counted(*requests: tuple[str, str, str, float | None]) -> str:
    """Return the metrics after requests of (tenant, route, outcome, seconds to the first token)."""
    registry = CollectorRegistry()
    metrics = TenantMetrics(registry)
    for tenant, route, outcome, first_token_s in requests:
        entry = LedgerEntry(route)
        entry.tier, entry.outcome, entry.first_token_s = "large", outcome, first_token_s
        metrics.count(tenant, entry, Usage(3, 5), 10**12)
    return generate_latest(registry).decode()


def test_service_is_counted_by_tenant_and_outcome() -> None:
    text = counted(("acme", "chat", "ok", 0.3), ("acme", "chat", "overloaded", None), ("shop", "chat", "ok", 3.0))
    assert 'causeway_gateway_tenant_requests_total{outcome="ok",tenant="acme"} 1.0' in text
    assert 'causeway_gateway_tenant_requests_total{outcome="overloaded",tenant="acme"} 1.0' in text
    assert 'causeway_gateway_tenant_first_token_seconds_bucket{le="0.5",tenant="acme"} 1.0' in text
    assert 'causeway_gateway_tenant_first_token_seconds_bucket{le="2.0",tenant="shop"} 0.0' in text


def test_jobs_cost_and_are_not_a_tenants_service() -> None:
    text = counted(("acme", "job", "engine_crashed", 900.0), ("acme", "stream", "ok", None))
    assert 'causeway_gateway_tenant_cost_usd_total{route="job",tenant="acme",tier="large"} 1.0' in text
    assert "tenant_requests_total{" not in text
    assert "first_token_seconds_count{" not in text


def test_more_tenants_than_the_bound_share_one_series() -> None:
    names = [f"tenant-{number}" for number in range(MAX_TENANTS + 2)]
    text = counted(*((name, "chat", "ok", 0.1) for name in (*names, names[0])))
    assert 'causeway_gateway_tenant_requests_total{outcome="ok",tenant="tenant-0"} 2.0' in text
    assert 'causeway_gateway_tenant_requests_total{outcome="ok",tenant="other"} 2.0' in text
    assert text.count("causeway_gateway_tenant_requests_total{") == MAX_TENANTS + 1
