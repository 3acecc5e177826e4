"""What a token grants: priority, critical answers, models, kinds of content, regions. Headers only ask for less."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from causeway_server.cloud_pool.accounts.identity.issuing import issue
from causeway_server.cloud_pool.accounts.tenants.config import TenantConfig, TenantsConfig
from causeway_server.cloud_pool.config import Config, Flags, load_config
from causeway_server.cloud_pool.core.principal import Grants
from causeway_server.cloud_pool.degradation.config import DegradationConfig
from causeway_server.cloud_pool.http.config import ServerConfig
from causeway_server.cloud_pool.tiers.tier import allowed_tiers
from causeway_server.router.errors import ConfigError
from tests.cloud_pool.unreachable import unreachable_tier

from .gateway import ASK, Gateway, running
from .token_issuer import Issuer

URGENT = {"x-causeway-priority": "interactive", "x-causeway-critical": "true"}
LARGE = msgspec.structs.replace(unreachable_tier("assistant-large"), aliases=("large",))
TIERS = (LARGE, unreachable_tier("small"))


def token(by: Issuer, **granted: Any) -> str:
    return issue(
        by.key,
        tenant="acme",
        device="kiosk",
        scopes=("chat",),
        grants=Grants(**granted),
        issuer="causeway",
        audience="causeway-cloud",
        now=time.time(),
        lifetime_s=600.0,
    )[0]


def config(issuer: Issuer, **changes: Any) -> Config:
    return Config(**{"identity": issuer.config, "server": ServerConfig(), "tiers": TIERS, **changes})


async def models(gateway: Gateway, by: str) -> list[str]:
    headers = {"authorization": f"Bearer {by}"}
    async with aiohttp.ClientSession(headers=headers) as http, http.get(f"{gateway.url}/v1/models") as answer:
        return [row["id"] for row in (await answer.json())["data"]]


async def test_headers_get_no_more_than_the_token_grants(issuer: Issuer) -> None:
    async with running(config(issuer)) as gateway:
        for granted, sent, priority, critical in (
            ({}, URGENT, "standard", False),
            ({}, {}, "standard", False),
            ({"priority": "bulk"}, URGENT, "bulk", False),
            ({"priority": "bulk"}, {}, "bulk", False),
            ({"priority": "interactive", "critical": True}, URGENT, "interactive", True),
            ({"priority": "interactive", "critical": True}, {}, "standard", False),
            ({"priority": "interactive"}, {"x-causeway-priority": "bulk"}, "bulk", False),
        ):
            assert (await gateway.post(token(issuer, **granted), None, **sent))[0] == 200
            context = gateway.service.calls[-1]
            assert (context.priority, context.critical) == (priority, critical), (granted, sent)


async def test_a_static_token_is_granted_what_its_line_says(issuer: Issuer, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("plain one\nurgent two priority=interactive critical=true models=small\n")
    async with running(config(issuer, server=ServerConfig(token_file=str(tmp_path / "tokens")))) as gateway:
        await gateway.post("one", None, **URGENT)
        await gateway.post("two", {**ASK, "model": "small"}, **URGENT)
        found = [(context.priority, context.critical) for context in gateway.service.calls]
        assert found == [("standard", False), ("interactive", True)]
        assert await models(gateway, "two") == ["small"]


async def test_a_gateway_without_tokens_gives_what_headers_ask_for() -> None:
    """It listens on loopback only."""
    async with running(Config(tiers=TIERS)) as gateway:
        await gateway.post("", None, **URGENT)
        context = gateway.service.calls[-1]
        assert (context.priority, context.critical) == ("interactive", True)


async def test_a_critical_tenant_needs_no_grant(issuer: Issuer) -> None:
    critical = DegradationConfig(tiers=("assistant-large",), critical_tenants=("acme",))
    async with running(config(issuer, degradation=critical)) as gateway:
        await gateway.post(token(issuer))
        assert gateway.service.calls[-1].critical


async def test_a_token_uses_its_models_only(issuer: Issuer) -> None:
    """An unknown model is 404 and one that is not allowed 403, both with OpenAI's code; neither lists the others."""
    async with running(config(issuer)) as gateway:
        limited = token(issuer, models=("small",))
        for model, status in (("small", 200), ("assistant-large", 403), ("large", 403), ("nowhere", 404)):
            found, body = await gateway.post(limited, {**ASK, "model": model})
            assert found == status, model
            if status != 200:
                error = body["error"]
                assert (error["code"], error["type"], error["param"]) == (
                    "model_not_found", "invalid_request_error", "model")  # fmt: skip
                assert "assistant-large" not in error["message"].replace(repr(model), "")
                assert "small" in error["message"]
        assert gateway.service.calls[-1].allowed_tiers == {"small"}
        assert await models(gateway, limited) == ["small"]
        assert await models(gateway, token(issuer)) == ["assistant-large", "large", "small"]
        headers = {"authorization": f"Bearer {limited}"}
        async with aiohttp.ClientSession(headers=headers) as http:
            for model, status in (("small", 200), ("large", 403), ("nowhere", 404)):
                async with http.get(f"{gateway.url}/v1/models/{model}") as answer:
                    assert answer.status == status


@pytest.mark.parametrize(
    ("tenants", "tokens", "usable"),
    [
        ((), None, None),
        (("large",), None, {"assistant-large"}),
        ((), ("large", "gone"), {"assistant-large"}),
        (("large", "small"), ("small",), {"small"}),
        (("large",), ("small",), set()),
    ],
)
async def test_the_narrower_of_the_tenants_and_the_tokens_models_wins(
    issuer: Issuer, tenants: tuple[str, ...], tokens: tuple[str, ...] | None, usable: set[str] | None
) -> None:
    overrides = TenantsConfig(overrides=(TenantConfig(name="acme", models=tenants),))
    async with running(config(issuer, tenants=overrides)) as gateway:
        limited = token(issuer, models=tokens)
        for model in ("assistant-large", "small"):
            allowed = usable is None or model in usable
            assert (await gateway.post(limited, {**ASK, "model": model}))[0] == (200 if allowed else 403)
        everything = {"assistant-large", "small"} if usable is None else usable
        assert set(await models(gateway, limited)) - {"large"} == everything


def test_no_list_costs_nothing(issuer: Issuer) -> None:
    principal = issuer.verifier().verify(issuer.sign(), now=0.0, now_unix=1_800_000_000.0).principal()
    assert allowed_tiers({}, TenantsConfig().default.models, principal.grants.models) is None


async def test_content_of_other_kinds_is_refused(issuer: Issuer) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    body = {**ASK, "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}, image]}]}
    async with running(config(issuer)) as gateway:
        assert (await gateway.post(token(issuer, modalities=("text", "image")), body))[0] == 200
        assert (await gateway.post(token(issuer, modalities=("text",))))[0] == 200
        status, refused = await gateway.post(token(issuer, modalities=("text",)), body)
        assert (status, refused["error"]["code"]) == (403, "permission_denied")
        assert "image" in refused["error"]["message"]


@pytest.mark.parametrize(("region", "status"), [("eu-west", 200), ("us-east", 403), ("", 403)])
async def test_a_token_works_in_its_regions_only(issuer: Issuer, region: str, status: int) -> None:
    """Also at a gateway that has no region: nothing says that it is one of the token's."""
    identity = msgspec.structs.replace(issuer.config, region=region)
    async with running(config(issuer, identity=identity)) as gateway:
        found, body = await gateway.post(token(issuer, regions=("eu-west", "eu-north")))
        assert found == status
        assert status == 200 or "eu-west, eu-north" in body["error"]["message"]
        assert (await gateway.post(token(issuer)))[0] == 200


@pytest.mark.parametrize(
    "claims",
    [
        {"priority": "vip"},
        {"critical": "yes"},
        {"models": []},
        {"models": "small"},
        {"modalities": ["smell"]},
        {"regions": ["a/b"]},
    ],
)
async def test_malformed_grants_are_refused(issuer: Issuer, claims: dict[str, object]) -> None:
    now = time.time()
    async with running(config(issuer)) as gateway:
        status, _ = await gateway.post(issuer.sign({"iat": now, "nbf": now, "exp": now + 60, **claims}))
        assert status == 401


def test_a_tenants_unknown_model_is_a_config_error(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text("tenants: {default: {models: [assistant-large]}, overrides: [{name: a, models: [nowhere]}]}")
    with pytest.raises(ConfigError, match=r"gateway.yaml:1.*overrides\[0\].models\[0\]"):
        load_config(path, Flags())
