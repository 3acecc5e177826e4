"""LoRA adapters as models of a tier, at a gateway before a real HTTP upstream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from causeway_server.cloud_pool.cache.config import CacheConfig
from causeway_server.cloud_pool.cache.shared_cache import CacheKeys
from causeway_server.cloud_pool.config import Flags, load_config
from causeway_server.cloud_pool.degradation.config import DegradationConfig
from causeway_server.cloud_pool.jobs.worker.runner import JobRun, ServiceBackend
from causeway_server.cloud_pool.tiers.config import TierConfig, TierVariantConfig
from causeway_server.cloud_pool.tiers.tier import by_name, load_tiers
from causeway_server.cloud_pool.tiers.variants import TierVariants
from causeway_server.router.errors import ConfigError
from causeway_server.router.types import Message, Request
from tests.cloud_pool.jobs.scripted_worker import running_record
from tests.cloud_pool.upstreams.http_gateway import Gateway, http_tier, serving
from tests.edge_node.scripted import ScriptedCloud

ADAPTERS = {"large-legal": "legal-lora", "large-medical": "medical-lora"}


@pytest.fixture
async def cloud() -> AsyncIterator[ScriptedCloud]:
    upstream = await ScriptedCloud().start()
    yield upstream
    await upstream.stop()


def metrics_of(gateway: Gateway) -> str:
    return gateway.app.runtime.metrics.text().decode()


def asked(cloud: ScriptedCloud) -> list[object]:
    return [body["model"] for body in cloud.bodies]


async def test_a_client_names_an_adapter_as_a_model(cloud: ScriptedCloud, tmp_path: Path) -> None:
    async with serving(tmp_path, http_tier(cloud.url, adapters=ADAPTERS)) as gateway:
        for name in ("large", "large-legal", "large-medical"):
            answer = await gateway.ask(model=name)
            assert (answer.status, answer.headers["x-causeway-tier"]) == (200, "large")
        assert asked(cloud) == ["m", "legal-lora", "medical-lora"]
        async with gateway.session.get(gateway.app.url + "/models") as response:
            listed = [model["id"] for model in (await response.json())["data"]]
        assert listed == ["large", *ADAPTERS]


async def test_adapters_share_the_permits_of_their_tier(cloud: ScriptedCloud, tmp_path: Path) -> None:
    cloud.gate = asyncio.Event()
    async with serving(tmp_path, http_tier(cloud.url, adapters=ADAPTERS, concurrency=1, max_queued=0)) as gateway:
        begun = asyncio.create_task(gateway.ask(model="large-legal"))
        await cloud.entered.wait()
        assert (await gateway.ask(model="large-medical")).status == 429
        cloud.gate.set()
        assert (await begun).status == 200


@pytest.mark.parametrize(("model", "upstream"), [("large-legal", "legal-lora"), ("large", "m"), ("gone", "m")])
async def test_a_job_is_answered_by_the_adapter_that_it_named(
    cloud: ScriptedCloud, tmp_path: Path, model: str, upstream: str
) -> None:
    """A job whose adapter has left the configuration is its tier's, as one whose alias has."""
    async with serving(tmp_path, http_tier(cloud.url, adapters=ADAPTERS)) as gateway:
        runtime = gateway.app.runtime
        backend = ServiceBackend(runtime.caching_service, runtime.service.embed, runtime.tiers, {})
        request = Request(kind="chat", model=model, messages=(Message("user", "hi"),))
        job = JobRun(
            record=running_record("j", "acme/device"), request=request, body_bytes=9, deadline=time.monotonic() + 60
        )
        async with aclosing(backend.reply(job)[1]) as pieces:
            assert [piece async for piece in pieces]
    assert asked(cloud) == [upstream]


@pytest.mark.parametrize("model", ["legal-lora", "large-tax"])
async def test_only_configured_names_are_models(cloud: ScriptedCloud, tmp_path: Path, model: str) -> None:
    """Clients cannot reach an adapter of the server that the configuration does not name."""
    async with serving(tmp_path, http_tier(cloud.url, adapters=ADAPTERS)) as gateway:
        assert (await gateway.ask(model=model)).status == 404
    assert asked(cloud) == []


async def test_embeddings_are_of_the_tier_s_own_model(cloud: ScriptedCloud, tmp_path: Path) -> None:
    async with serving(tmp_path, http_tier(cloud.url, adapters=ADAPTERS)) as gateway:
        refused = await gateway.post("/embeddings", {"model": "large-legal", "input": "x"})
        assert refused.status == 400
        assert (await gateway.post("/embeddings", {"model": "large", "input": "x"})).status == 200
    assert asked(cloud) == ["m"]


async def test_a_fallback_answers_for_an_adapter_with_its_own_model(cloud: ScriptedCloud, tmp_path: Path) -> None:
    cloud.status, cloud.error = 500, {"message": "no"}
    other = await ScriptedCloud().start()
    tiers = (http_tier(cloud.url, adapters=ADAPTERS), http_tier(other.url, name="small", model="s"))
    order = DegradationConfig(tiers=("large", "small"), warm_up_after_idle_s=0.0)
    async with serving(tmp_path, *tiers, degradation=order) as gateway:
        answer = await gateway.ask(model="large-legal")
    await other.stop()
    assert (answer.status, answer.headers["x-causeway-tier"]) == (200, "small")
    assert answer.headers["x-causeway-degraded"] == "true"
    assert set(asked(cloud)) == {"legal-lora"}
    assert asked(other) == ["s"]


async def test_a_variant_never_answers_for_an_adapter(cloud: ScriptedCloud, tmp_path: Path) -> None:
    tier = http_tier(cloud.url, adapters=ADAPTERS, variants=(TierVariantConfig("v2", 100),))
    async with serving(tmp_path, tier) as gateway:
        answer = await gateway.ask(model="large-legal")
        assert "x-causeway-variant" not in answer.headers
        await gateway.ask()
        assert 'variant_answers_total{result="ok",tier="large",variant=""}' not in metrics_of(gateway)
    assert asked(cloud) == ["legal-lora", "v2"]


def test_adapters_share_no_cached_answer(tmp_path: Path) -> None:
    tier = http_tier("http://x/v1", adapters=ADAPTERS, variants=(TierVariantConfig("v2", 100),))
    index, keys, variants = by_name(load_tiers([tier])), CacheKeys(CacheConfig()), TierVariants([tier])
    request = Request(kind="chat", model="large", messages=(Message("user", "hi"),))
    found = {keys.key(request, variants.of(index[name], request), "") for name in ("large", *ADAPTERS)}
    assert len(found) == 3


def refused(tmp_path: Path, *tiers: TierConfig) -> str:
    with pytest.raises(ConfigError) as raised:
        load_tiers(tiers)
    return raised.value.where


def test_an_adapter_of_what_generates_nothing_is_refused_at_start(tmp_path: Path) -> None:
    embeds = TierConfig(name="e", can=("embedding",), adapters={"x": "y"})
    assert refused(tmp_path, embeds) == "tiers[0].adapters"
    assert refused(tmp_path, http_tier("http://x/v1", adapters={"x": ""})) == "tiers[0].adapters"


def test_an_adapter_s_name_is_no_other_model_s(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text("tiers:\n  - {name: a, adapters: {b: x}}\n  - {name: b}\n")
    with pytest.raises(ConfigError, match="'b' is already"):
        load_config(path, Flags())
