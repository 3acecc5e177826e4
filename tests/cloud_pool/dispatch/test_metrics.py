from __future__ import annotations

from contextlib import closing

from prometheus_client import CollectorRegistry, generate_latest

from causeway_server.cloud_pool.dispatch.endpoint_selection import load_reported
from causeway_server.cloud_pool.dispatch.metrics import DispatchMetrics
from causeway_server.cloud_pool.upstreams.server_load import ServerLoad
from causeway_server.router.errors import CloudUnreachable

from .scripted_pool import Bed


def test_metrics_of_each_endpoint_and_none_of_removed_ones() -> None:
    registry, bed = CollectorRegistry(), Bed("a:1@x", "b:1@y")
    endpoints = DispatchMetrics(registry)
    endpoints.watch({"large": bed.pool}, {})
    with closing(bed.pool.lease(excluding={"b:1"})) as lease:
        lease.first_token(0.25)
        text = generate_latest(registry).decode()
    assert 'causeway_gateway_endpoint_outstanding{endpoint="a:1",tier="large",zone="x"} 1.0' in text
    assert 'causeway_gateway_endpoint_ttft_seconds{endpoint="a:1",tier="large",zone="x"} 0.25' in text
    assert 'causeway_gateway_endpoint_ttft_seconds{endpoint="b:1"' not in text, "not measured"
    with closing(bed.pool.lease(excluding={"b:1"})) as lease:
        lease.failed(CloudUnreachable("no", phase="connect"))
        endpoints.ejected(*bed.ejections[0])
        bed.pool.set_endpoints({"b:1": "y"})
        text = generate_latest(registry).decode()
        assert 'causeway_gateway_endpoint_draining{endpoint="a:1",tier="large",zone="x"} 1.0' in text
        assert 'causeway_gateway_endpoint_ejected{endpoint="b:1",tier="large",zone="y"} 0.0' in text
    text = generate_latest(registry).decode()
    assert 'causeway_gateway_endpoint_outstanding{endpoint="a:1"' not in text
    assert 'ejections_total{code="cloud_unreachable",tier="large"} 1.0' in text


def test_what_servers_report_is_visible_while_they_do() -> None:
    registry, bed = CollectorRegistry(), Bed("a:1", "b:1")
    DispatchMetrics(registry).watch({"large": bed.pool}, {})
    bed.pool.state = load_reported(bed.pool.state, "a:1", ServerLoad(7, 0.5))
    text = generate_latest(registry).decode()
    assert 'causeway_gateway_endpoint_requests{endpoint="a:1",tier="large",zone=""} 7.0' in text
    assert 'causeway_gateway_endpoint_kv_use{endpoint="a:1",tier="large",zone=""} 0.5' in text
    assert 'causeway_gateway_endpoint_requests{endpoint="b:1"' not in text
    bed.pool.state = load_reported(bed.pool.state, "a:1", None)
    assert "causeway_gateway_endpoint_requests{" not in generate_latest(registry).decode()


def test_slow_endpoints_are_visible() -> None:
    registry, bed = CollectorRegistry(), Bed("a:1", "b:1")
    DispatchMetrics(registry).watch({"large": bed.pool}, {})
    for address, seconds in (("b:1", 0.1), *[("a:1", 1.0)] * 4):
        with closing(bed.pool.lease(excluding={"a:1", "b:1"} - {address})) as lease:
            lease.first_token(seconds)
    text = generate_latest(registry).decode()
    assert 'causeway_gateway_endpoint_slow{endpoint="a:1",tier="large",zone=""} 1.0' in text
    assert 'causeway_gateway_endpoint_slow{endpoint="b:1",tier="large",zone=""} 0.0' in text
