"""A tier's keys reach its dispatcher, and its counters reach Prometheus."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from causeway_server.cloud_pool.config import Config, Flags, load_config
from causeway_server.cloud_pool.dispatch.config import RetryBudgetConfig
from causeway_server.cloud_pool.dispatch.dispatcher import Dispatcher
from causeway_server.cloud_pool.dispatch.metrics import DispatchMetrics
from causeway_server.cloud_pool.upstreams.inference import InferenceRequest
from causeway_server.cloud_pool.upstreams.triton.messages import SamplingParameters
from causeway_server.router.errors import CloudUnreachable, ConfigError

from .scripted import LEFT_S, Clock, Endpoint, Pool

REFUSED = CloudUnreachable("refused", phase="connect")


def pool() -> Pool:
    """The first endpoint refuses, the second answers."""
    clock = Clock()
    return Pool(Endpoint("a", clock, [REFUSED]), Endpoint("b", clock, ["good"]))


def request() -> InferenceRequest:
    return InferenceRequest(model="m", prompt="p", parameters=SamplingParameters(), deadline=time.monotonic() + LEFT_S)


def config_of(folder: Path, keys: str) -> Config:
    path = folder / "gateway.yaml"
    path.write_text(f"tiers: [{{name: t, artifact: assistant-large, {keys}}}]\n")
    return load_config(path, Flags())


async def test_retries_are_counted_by_tier_and_code() -> None:
    registry = CollectorRegistry()
    metrics = DispatchMetrics(registry)
    dispatch = Dispatcher(pool(), retried=partial(metrics.retried, "large"))
    metrics.watch({}, {"large": dispatch})
    budget = 'causeway_gateway_retry_budget_remaining{tier="large"}'
    assert metrics_line(registry, budget) == 5.0
    assert [delta.text async for delta in dispatch.generate(request())] == ["good"]
    assert metrics_line(registry, 'causeway_gateway_retries_total{code="cloud_unreachable",tier="large"}') == 1.0
    assert metrics_line(registry, budget) == 4.0


async def test_max_attempts_of_one_means_no_retry() -> None:
    dispatch = Dispatcher(pool(), max_attempts=1)
    with pytest.raises(CloudUnreachable):
        await anext(dispatch.generate(request()))


def metrics_line(registry: CollectorRegistry, name: str) -> float:
    """Return the value of one series."""
    lines = generate_latest(registry).decode().splitlines()
    (found,) = (line for line in lines if line.startswith(f"{name} "))
    return float(found.rsplit(" ", 1)[1])


def test_every_key_is_read(tmp_path: Path) -> None:
    keys = "max_attempts: 2, retry_budget: {share: 0.1, min_retries_per_s: 0}"
    tier = config_of(tmp_path, keys).tiers[0]
    assert (tier.max_attempts, tier.retry_budget) == (2, RetryBudgetConfig(share=0.1, min_retries_per_s=0.0))


@pytest.mark.parametrize(
    ("keys", "where"),
    [
        ("max_attempts: 0", "max_attempts"),
        ("retry_budget: {share: 1.5}", "share"),
        ("retry_budget: {min_retries_per_s: -1}", "min_retries_per_s"),
        ("hedge: {enabled: true}", "`hedge` was removed"),
    ],
)
def test_an_invalid_key_is_named_with_its_place(tmp_path: Path, keys: str, where: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config_of(tmp_path, keys)
    assert where in str(raised.value)
    assert "gateway.yaml:1" in str(raised.value)
