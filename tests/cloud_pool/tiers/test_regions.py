"""Tiers in regions: what a bound request reaches through fallback, faults, embeddings, cache keys and traces."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode

from causeway_server.cloud_pool.accounts.identity.config import IdentityConfig
from causeway_server.cloud_pool.accounts.tenants.config import TenantConfig, TenantLimits, TenantsConfig
from causeway_server.cloud_pool.cache.config import CacheConfig
from causeway_server.cloud_pool.cache.shared_cache import CacheKeys, bypass_reason
from causeway_server.cloud_pool.degradation.config import DegradationConfig
from causeway_server.cloud_pool.http.config import GrpcConfig
from causeway_server.cloud_pool.observability.tracing import Tracing
from causeway_server.cloud_pool.tiers.tier import ChatFormat, Tier
from causeway_server.router.config import TracingConfig
from causeway_server.router.errors import ConfigError
from causeway_server.router.types import Message, Request, RoutingHints, Sampling
from tests.e2e.sessions.peer import Peer, done
from tests.edge_node.device import Answer
from tests.edge_node.scripted import FAULTS, Fault, ScriptedCloud

from ..grpc_api.served import chat, connected, rest
from ..upstreams.http_gateway import Gateway, http_tier, serving

EU = {"x-causeway-tags": "in-region:eu"}
HERE = IdentityConfig(region="EU")
IN_ORDER = DegradationConfig(tiers=("far", "large", "nowhere"), warm_up_after_idle_s=0.0)


class Regions:
    """A gateway in `eu` with a tier in `us`, one in `eu` and one in no region, in this order of fallback."""

    def __init__(self, gateway: Gateway, servers: Mapping[str, ScriptedCloud]) -> None:
        self.gateway = gateway
        self.servers = servers

    @property
    def asked(self) -> dict[str, int]:
        return {name: len(server.bodies) for name, server in self.servers.items()}

    async def ask(self, model: str = "far", headers: Mapping[str, str] = EU, **fields: Any) -> Answer:
        return await self.gateway.ask(headers=headers, model=model, **fields)


@asynccontextmanager
async def regions(folder: Path, identity: IdentityConfig = HERE, **sections: Any) -> AsyncIterator[Regions]:
    servers = {name: await ScriptedCloud().start() for name in ("far", "large", "nowhere")}
    places = {"far": "us", "large": "eu", "nowhere": ""}
    tiers = [http_tier(one.url, name=name, region=places[name]) for name, one in servers.items()]
    try:
        async with serving(folder, *tiers, degradation=IN_ORDER, identity=identity, **sections) as gateway:
            yield Regions(gateway, servers)
    finally:
        for server in servers.values():
            await server.stop()


@pytest.mark.parametrize("stream", [False, True])
async def test_the_tier_of_the_region_answers_in_place_of_the_one_named(tmp_path: Path, stream: bool) -> None:
    """Its region stands in the headers and in the audit record."""
    async with regions(tmp_path) as bed:
        answer = await bed.ask(stream=stream)
        assert (answer.status, answer.headers["x-causeway-tier"], answer.headers["x-causeway-region"]) == (
            200,
            "large",
            "eu",
        )
        assert answer.headers["x-causeway-tier-reason"] == "far=unable"
        assert bed.asked == {"far": 0, "large": 1, "nowhere": 0}
        assert (await bed.ask(headers={})).headers["x-causeway-region"] == "us"
    assert [record["region"] for record in bed.gateway.audit] == ["eu", "us"]


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_of_the_region_leads_nowhere_else(tmp_path: Path, fault: Fault) -> None:
    """The client gets the error of the tier in the region, before or after the first byte."""
    async with regions(tmp_path) as bed:
        bed.servers["large"].fault = fault
        answer = await bed.ask("large", stream=True, headers={**EU, "x-causeway-deadline-ms": "1000"})
        assert answer.status == 200 or answer.code != "outside_region"
        assert bed.asked["large"]
        assert bed.asked["far"] == bed.asked["nowhere"] == 0


@pytest.mark.parametrize("path", ["/chat/completions", "/completions", "/embeddings", "/responses"])
@pytest.mark.parametrize("model", ["far", "nowhere"])
async def test_with_no_tier_left_it_is_503_and_names_the_regions(tmp_path: Path, path: str, model: str) -> None:
    body: dict[str, object] = {
        "prompt": "a",
        "input": "a",
        "messages": [{"role": "user", "content": "a"}],
        "model": model,
    }
    kept = {"/chat/completions": ("messages",), "/completions": ("prompt",)}.get(path, ("input",))
    async with regions(tmp_path) as bed:
        sent = {name: body[name] for name in ("model", *kept)}
        answer = await bed.gateway.post(path, sent, {"x-causeway-tags": "in-region:eu,in-region:eu+ch", **_CRITICAL})
        assert (answer.status, answer.code) == (503, "outside_region")
        assert f"bound to eu, but the tier {model} (tiers.region) is in" in answer.message
        assert sum(bed.asked.values()) == 0


_CRITICAL = {"x-causeway-critical": "true"}


@pytest.mark.parametrize("identity", [IdentityConfig(), IdentityConfig(region="us")], ids=["none", "us"])
async def test_a_gateway_outside_the_regions_reaches_no_tier(tmp_path: Path, identity: IdentityConfig) -> None:
    async with regions(tmp_path, identity) as bed:
        answer = await bed.ask("large")
        assert (answer.status, answer.code) == (503, "outside_region")
        assert "this gateway (identity.region) is in" in answer.message
        assert (await bed.ask("large", headers={})).status == 200
        assert bed.asked == {"far": 0, "large": 1, "nowhere": 0}


async def test_a_tenant_is_bound_without_a_tag_and_a_tag_only_narrows(tmp_path: Path) -> None:
    tenants = TenantsConfig(default=TenantLimits(regions=("EU", "us")))
    async with regions(tmp_path, tenants=tenants) as bed:
        for model, tags, answers in (
            ("far", "", "far"),
            ("nowhere", "", None),
            ("far", "in-region:eu", "large"),
            ("large", "in-region:us", None),
            ("nowhere", "in-region:ap+eu", None),
        ):
            answer = await bed.ask(model, headers={"x-causeway-tags": tags} if tags else {})
            assert answer.headers.get("x-causeway-tier") == answers
            assert answer.status == 200 or answer.code == "outside_region"
        assert bed.asked == {"far": 1, "large": 1, "nowhere": 0}


async def test_a_live_session_keeps_the_regions_of_its_items(tmp_path: Path) -> None:
    """A response without a tag has the items of one with a tag."""
    async with regions(tmp_path) as bed:
        port = int(bed.gateway.app.url.rpartition(":")[2].split("/")[0])
        peer = await Peer.connect(port, "model=far")
        await peer.event()
        for restriction in ({}, {"causeway": {"tags": ["in-region:eu"]}}, {}):
            assert done(await peer.ask("a secret", **restriction))["status"] == "completed"
        peer.cut()
        assert bed.asked == {"far": 1, "large": 2, "nowhere": 0}


@pytest.mark.parametrize(("model", "critical"), [("far", "false"), ("nowhere", "true")])
async def test_a_call_by_grpc_is_bound_by_its_metadata(tmp_path: Path, model: str, critical: str) -> None:
    metadata = (*EU.items(), ("x-causeway-critical", critical))
    async with regions(tmp_path, grpc=GrpcConfig(port=0)) as bed:
        assert bed.gateway.app.grpc is not None
        async with connected(bed.gateway.app.grpc.address) as client:
            call = client.call(chat("a secret", model=model), metadata=metadata)
            if critical == "false":
                assert await rest(call)
            else:
                failure = await client.failure(call)
                assert (failure.status, failure.error["code"]) == (StatusCode.UNAVAILABLE, "outside_region")
        assert bed.asked == {"far": 0, "large": int(critical == "false"), "nowhere": 0}


TIERS = {"far": "us", "large": "eu"}


@pytest.mark.parametrize(
    ("limits", "region", "fault"),
    [
        ({"regions": ("eu",)}, "", "Set `identity.region`"),
        ({"regions": ("ap",)}, "ap", "No tier that the tenant may use"),
        ({"regions": ("eu",), "models": ("far",)}, "eu", "No tier that the tenant may use"),
        ({"regions": ("EU",)}, "eu", ""),
        ({"regions": ("ap",)}, "eu", ""),
        ({}, "", ""),
    ],
)
def test_regions_that_can_never_be_served_are_refused_at_start(limits: dict[str, Any], region: str, fault: str) -> None:
    """A gateway in another region is meant to refuse the tenant."""
    tenants = TenantsConfig(overrides=(TenantConfig(name="acme", **limits),))
    if not fault:
        tenants.check(TIERS, region)
        return
    with pytest.raises(ConfigError, match=fault) as found:
        tenants.check(TIERS, region)
    assert found.value.where == "tenants.overrides[0].regions"


def bound(*tags: str) -> Request:
    return Request(
        kind="chat",
        model="large",
        messages=(Message("user", "a"),),
        sampling=Sampling(temperature=0.0),
        hints=RoutingHints(tags=tags),
    )


def test_the_shared_cache_takes_only_requests_of_its_region_and_mixes_none() -> None:
    config = CacheConfig(enabled=True, region="EU")
    tier = Tier(http_tier("http://a/v1"), ChatFormat(""))
    places = {"": "", "in-region:eu": "", "in-region:us": "region", "in-region:eu,in-region:us": "region"}
    for tags, why in places.items():
        assert bypass_reason(bound(*tags.split(",")), tier, config) == why
    assert bypass_reason(bound("in-region:eu"), tier, CacheConfig(enabled=True)) == "region"
    keys = CacheKeys(config)
    found = {keys.key(bound(tags), tier, "acme") for tags in ("", "a", "in-region:eu", "in-region:eu+us")}
    assert len(found) == 3


@pytest.mark.parametrize(("region", "traced"), [("eu", True), ("us", False), ("", False)])
def test_a_collector_elsewhere_gets_no_span_of_a_bound_request_or_job(region: str, traced: bool) -> None:
    tracing = Tracing(TracingConfig(endpoint="http://127.0.0.1:9", region=region), "test")
    request = bound("in-region:eu")
    assert (tracing.begin(request, "1", "") is not None) is traced
    assert (tracing.jobs.process(request, "1", "large", "", 1) is not None) is traced
    assert tracing.begin(bound(), "1", "") is not None
    caller = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    assert tracing.jobs.untraced(caller) == caller[:-1] + "0"
    made = tracing.jobs.untraced("")
    assert made.endswith("-00")
    assert tracing.jobs.deliver("1", "host", made, 0).traceparent.endswith("-00")
