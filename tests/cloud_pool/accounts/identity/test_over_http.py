"""Authentication, tenant limits and audit of a gateway on real sockets."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest
import redis.asyncio

from causeway_server.cloud_pool.accounts.identity.config import IdentityConfig
from causeway_server.cloud_pool.accounts.identity.issuing import issue
from causeway_server.cloud_pool.accounts.identity.revocation import revoke_token
from causeway_server.cloud_pool.accounts.tenants.config import TenantConfig, TenantLimits, TenantsConfig, TierPrice
from causeway_server.cloud_pool.accounts.tenants.usage import read_usage
from causeway_server.cloud_pool.config import Config, Flags, load_config
from causeway_server.cloud_pool.http.config import ServerConfig
from causeway_server.router.errors import CloudFailed, ConfigError
from tests.cloud_pool.unreachable import unreachable_tier
from tests.redis_server import RedisServer
from tests.waiting import until

from .gateway import ASK, running, static_token_config
from .token_issuer import Issuer

PRICES = (TierPrice(tier="assistant-large", input=1000, output=2000),)
COST = 40_000_000_000  # 1e-12 USD, of 20 and 10 tokens


def token(by: Issuer, **changes: Any) -> str:
    claims = {
        "tenant": "acme",
        "device": "kiosk-17",
        "scopes": ("chat",),
        "issuer": "causeway",
        "audience": "causeway-cloud",
        "now": time.time(),
        "lifetime_s": 600.0,
    }
    return issue(by.key, **{**claims, **changes})[0]


def config(issuer: Issuer, **changes: Any) -> Config:
    tiers = (unreachable_tier("assistant-large"),)
    return Config(**{"identity": issuer.config, "server": ServerConfig(), "tiers": tiers, **changes})


def audited(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_only_valid_tokens_are_accepted(issuer: Issuer) -> None:
    """Each forged, expired or malformed token gets OpenAI's error with status 401."""
    now = time.time()
    good = token(issuer)
    head, claims, signature = good.split(".")
    bad = {
        "none": "",
        "unknown": "secret",
        "forged": f"{head}.{claims}.{'A' * len(signature)}",
        "expired": token(issuer, now=now - 7200),
        "not yet": token(issuer, now=now + 600),
        "issuer": token(issuer, issuer="somebody"),
        "audience": token(issuer, audience="another"),
        "key": issuer.sign({"iat": now, "nbf": now, "exp": now + 60}, key=Issuer.stranger()),
        "unsigned": issuer.sign(head={"alg": "none"}),
        "oversized": issuer.sign({"pad": "x" * 5000}),
    }
    async with running(config(issuer)) as gateway:
        for why, each in bad.items():
            status, body = await gateway.post(each)
            assert (status, body["error"]["code"]) == (401, "invalid_api_key"), why
            assert set(body["error"]) == {"message", "type", "param", "code"}
        assert gateway.service.calls == []
        status, body = await gateway.post(good)
        assert (status, body["choices"][0]["message"]["content"]) == (200, "my secret answer")
        assert gateway.service.calls[0].request.hints.client == "kiosk-17"


async def test_models_need_a_token_and_health_does_not(issuer: Issuer) -> None:
    async with running(config(issuer)) as gateway, aiohttp.ClientSession() as http:
        for path, status in (("/v1/models", 401), ("/v1/models/assistant-large", 401), ("/healthz", 200)):
            async with http.get(gateway.url + path) as answer:
                assert answer.status == status, path
        headers = {"authorization": f"Bearer {token(issuer)}"}
        async with http.get(f"{gateway.url}/v1/models", headers=headers) as answer:
            assert answer.status == 200


async def test_a_missing_scope_is_403(issuer: Issuer) -> None:
    async with running(config(issuer)) as gateway:
        status, body = await gateway.post(token(issuer, scopes=("jobs",)))
        assert (status, body["error"]["code"]) == (403, "permission_denied")
        assert "chat" in body["error"]["message"]


async def test_static_and_signed_tokens_work_at_one_gateway(issuer: Issuer, tmp_path: Path) -> None:
    async with running(config(issuer, server=static_token_config(tmp_path))) as gateway:
        for each in ("secret", token(issuer)):
            assert (await gateway.post(each))[0] == 200
        assert (await gateway.post("wrong"))[0] == 401


@pytest.mark.redis
async def test_a_revoked_token_is_refused_also_by_a_new_gateway(issuer: Issuer, empty_redis: RedisServer) -> None:
    text, claims = issue(
        issuer.key, tenant="acme", device="k", scopes=("chat",), issuer="causeway", audience="causeway-cloud",
        now=time.time(), lifetime_s=600.0,
    )  # fmt: skip
    async with (
        redis.asyncio.Redis.from_url(empty_redis.url) as client,
        running(config(issuer, redis=empty_redis.url)) as gateway,
    ):
        assert (await gateway.post(text))[0] == 200
        await revoke_token(client, claims.jti, claims.exp, time.time())
        await gateway.accounts.revocations.refresh()
        async with running(config(issuer, redis=empty_redis.url)) as started_later:
            for each in (gateway, started_later):
                status, body = await each.post(text)
                assert (status, body["error"]["code"]) == (401, "invalid_api_key")
                assert "revoked" in body["error"]["message"]


@pytest.mark.redis
@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_ends_when_its_token_is_revoked(
    issuer: Issuer, empty_redis: RedisServer, tmp_path: Path, stream: bool
) -> None:
    """Another token's answer goes on."""
    good, claims = issue(
        issuer.key, tenant="acme", device="k", scopes=("chat",), issuer="causeway", audience="causeway-cloud",
        now=time.time(), lifetime_s=600.0,
    )  # fmt: skip
    audit = tmp_path / "audit.jsonl"
    audit.touch()
    async with (
        redis.asyncio.Redis.from_url(empty_redis.url) as client,
        running(config(issuer, redis=empty_redis.url, audit_file=str(audit))) as gateway,
        aiohttp.ClientSession() as session,
    ):
        gateway.service.held = anyio.Event()

        async def ask(bearer: str) -> tuple[int, str]:
            headers = {"authorization": f"Bearer {bearer}"}
            body = {**ASK, "stream": stream}
            async with session.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers) as answer:
                return answer.status, await answer.text()

        asking = [asyncio.ensure_future(ask(bearer)) for bearer in (good, token(issuer))]
        await until(lambda: len(gateway.service.calls) == 2)
        await revoke_token(client, claims.jti, claims.exp, time.time())
        await gateway.accounts.revocations.refresh()
        gateway.service.held.set()
        (status, cut), (_, whole) = await asyncio.gather(*asking)
        assert status == (200 if stream else 401)
        assert "The token has been revoked." in cut
        assert "stop" not in cut
        assert "stop" in whole
        await until(lambda: len(audited(audit)) == 2)
    assert sorted(record["outcome"] for record in audited(audit)) == ["invalid_api_key", "ok"]


async def test_deny_refuses_signed_tokens_without_redis(issuer: Issuer) -> None:
    """503 with Retry-After; static tokens still work."""
    identity = IdentityConfig(key_file=str(issuer.key_file), when_revocations_stale="deny")
    async with running(config(issuer, identity=identity, redis="redis://127.0.0.1:1/0")) as gateway:
        status, body = await gateway.post(token(issuer))
        assert (status, body["error"]["code"]) == (503, "identity_unavailable")


async def test_a_tenants_limits_apply(issuer: Issuer) -> None:
    acme = TenantConfig(name="acme", max_tokens=64, max_body_bytes=300, max_sequences=4)
    tenants = TenantsConfig(overrides=(acme, TenantConfig(name="slow", requests_per_s=1.0, burst=2)))
    async with running(config(issuer, tenants=tenants)) as gateway:
        good = token(issuer)
        status, body = await gateway.post(good, {**ASK, "max_tokens": 65})
        assert (status, body["error"]["param"]) == (400, "max_tokens")
        status, body = await gateway.post(good, {**ASK, "n": 5})
        assert (status, body["error"]["param"]) == (400, "n")
        assert "our limit is 4 sequences in one request (max_sequences)" in body["error"]["message"]
        status, body = await gateway.post(token(issuer, tenant="slow"), {**ASK, "n": 3})
        assert status == 400
        assert "your limit is 2 sequences at the same time (burst)" in body["error"]["message"]
        status, body = await gateway.post(good, {**ASK, "messages": [{"role": "user", "content": "x" * 300}]})
        assert (status, body["error"]["code"]) == (413, "body_too_large")
        assert (await gateway.post(good))[0] == 200
        assert gateway.service.calls[-1].request.max_tokens == 64
        assert (await gateway.post(token(issuer, tenant="other"), {**ASK, "max_tokens": 65}))[0] == 200


@pytest.mark.redis
async def test_two_gateways_share_a_tenants_rate(issuer: Issuer, empty_redis: RedisServer) -> None:
    tenants = TenantsConfig(default=TenantLimits(requests_per_s=0.001, burst=6), redis_timeout_s=20.0)
    both = config(issuer, redis=empty_redis.url, tenants=tenants)
    async with running(both) as one, running(both) as two:
        good = token(issuer)
        found = await asyncio.gather(*((one, two)[at % 2].post(good) for at in range(12)))
        assert sorted(status for status, _ in found) == [200] * 6 + [429] * 6
        assert {body["error"]["code"] for status, body in found if status == 429} == {"rate_limit_exceeded"}
        assert (await one.post(token(issuer, tenant="other")))[0] == 200


@pytest.mark.redis
async def test_usage_and_audit_are_recorded_without_content(
    issuer: Issuer, empty_redis: RedisServer, tmp_path: Path
) -> None:
    """Refused requests have an audit record, too."""
    path = tmp_path / "audit.jsonl"
    kept = config(issuer, redis=empty_redis.url, tenants=TenantsConfig(prices=PRICES), audit_file=str(path))
    async with running(kept) as gateway:
        good = token(issuer)
        await gateway.post(good, None, **{"x-request-id": "r1", "x-causeway-policy": "retail@9f2c"})
        await gateway.post(good, {"model": "assistant-large", "prompt": "my secret question"}, "/v1/completions")
        await gateway.post("", None, **{"x-causeway-policy": "my secret question"})
        await gateway.post(good, {**ASK, "model": "nowhere"})
        text = gateway.metrics()
    labels = 'route="chat",tenant="acme",tier="assistant-large"'
    assert f"causeway_gateway_tenant_cost_usd_total{{{labels}}} 0.04" in text
    assert 'causeway_gateway_tenant_tokens_total{tenant="acme",tier="assistant-large",type="input"} 40.0' in text
    assert 'causeway_gateway_tenant_requests_total{outcome="ok",tenant="acme"} 2.0' in text
    assert 'causeway_gateway_tenant_first_token_seconds_count{tenant="acme"} 2.0' in text
    assert "# TYPE causeway_gateway_audit_records_lost_total counter" in text
    assert "causeway_gateway_audit_records_lost_total 0.0" in text
    chat, completion, refused, nowhere = audited(path)
    assert (chat["id"], chat["tenant"], chat["device"], chat["policy"]) == ("r1", "acme", "kiosk-17", "retail@9f2c")
    assert (chat["tier"], chat["outcome"], chat["prompt_tokens"], chat["completion_tokens"], chat["pico_usd"]) == (
        "assistant-large", "ok", 20, 10, COST)  # fmt: skip
    assert completion["route"] == "completion"
    assert (refused["outcome"], refused["tenant"], refused["policy"]) == ("invalid_api_key", "", "")
    assert (nowhere["outcome"], nowhere["tier"], nowhere["tenant"]) == ("model_not_found", "", "acme")
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    async with redis.asyncio.Redis.from_url(empty_redis.url) as client:
        rows = await read_usage(client, "acme", day)
        stored = [key async for key in client.scan_iter("*")]
    assert [(row.route, row.requests, row.usd) for row in rows] == [("chat", 1, 0.04), ("completion", 1, 0.04)]
    assert stored
    assert "secret" not in path.read_text() + text


async def test_every_error_has_the_clients_request_id(issuer: Issuer, tmp_path: Path) -> None:
    """Also one for which nothing but the headers was read, and its audit record."""
    path = tmp_path / "audit.jsonl"
    async with running(config(issuer, audit_file=str(path))) as gateway, aiohttp.ClientSession(gateway.url) as http:
        for number, (bearer, status) in enumerate(
            (("", 401), (token(issuer, scopes=("jobs",)), 403), (token(issuer), 400))
        ):
            headers = {"x-request-id": f"r{number}", "authorization": f"Bearer {bearer}"}
            async with http.post("/v1/chat/completions", json={}, headers=headers) as reply:
                assert (reply.status, reply.headers["x-request-id"]) == (status, f"r{number}")
    assert [record["id"] for record in audited(path)] == ["r0", "r1", "r2"]


async def test_a_broken_answer_leaves_one_audit_record(issuer: Issuer, tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    async with running(config(issuer, audit_file=str(path))) as gateway:
        gateway.service.fault = CloudFailed("the model failed")
        assert (await gateway.post(token(issuer)))[0] == 502
    (record,) = audited(path)
    assert (record["outcome"], record["completion_tokens"]) == ("cloud_failed", 1)
    assert record["prompt_tokens"] == len(json.dumps(ASK)) // 4


async def test_a_client_that_leaves_pays_and_leaves_one_audit_record(issuer: Issuer, tmp_path: Path) -> None:
    """It pays for the generated tokens and, by estimate, for its prompt."""
    path = tmp_path / "audit.jsonl"
    tenants = TenantsConfig(default=TenantLimits(tokens_per_minute=600), prices=PRICES)
    async with running(config(issuer, audit_file=str(path), tenants=tenants)) as gateway:
        gateway.service.held = anyio.Event()
        good = token(issuer)
        asking = asyncio.ensure_future(gateway.post(good, {**ASK, "stream": True, "max_tokens": 500}))
        await gateway.service.reached.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: "client_gone" in gateway.metrics())
        gateway.service.held = None
        await gateway.accounts.ledger.flush()
        # Nearly all of the 500 reserved tokens are back.
        assert (await gateway.post(good, {**ASK, "max_tokens": 500}))[0] == 200
    gone, ok = audited(path)
    assert (gone["outcome"], gone["completion_tokens"], ok["outcome"]) == ("client_gone", 1, "ok")
    assert gone["prompt_tokens"] > 0
    assert gone["pico_usd"] > 0


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("server: {host: 0.0.0.0}", "token_file"),
        ("redis: http://x", "redis"),
        ("identity: {key_file: nowhere.json}", "nowhere.json"),
        ("identity: {clock_skew_s: 3600}", "clock_skew_s"),
        ("identity: {when_revocations_stale: maybe}", "when_revocations_stale"),
        ("tenants: {overrides: [{name: a}, {name: a}]}", "overrides[1]"),
        ("tenants: {prices: [{tier: nowhere}]}", "prices[0]"),
        ("tenants: {default: {requests_per_s: -1}}", "requests_per_s"),
    ],
)
async def test_invalid_configuration_is_refused_with_its_key(tmp_path: Path, text: str, where: str) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=where.replace("[", r"\[")):
        async with running(load_config(path, Flags())):
            pass


def test_a_key_file_is_enough_off_loopback(issuer: Issuer, tmp_path: Path) -> None:
    """Paths are relative to the configuration file."""
    path = tmp_path / "gateway.yaml"
    path.write_text("server: {host: 0.0.0.0}\nidentity: {key_file: keys.json}\naudit_file: '-'")
    found = load_config(path, Flags(redis="redis://r:1/0"))
    assert (found.identity.key_file, found.audit_file, found.redis) == (str(issuer.key_file), "-", "redis://r:1/0")


def test_the_example_lists_every_key_with_its_default() -> None:
    import causeway_server.cloud_pool

    path = Path(causeway_server.cloud_pool.__file__).parent / "deploy" / "gateway.example.yaml"
    found = load_config(path, Flags())
    assert (found.identity, found.tenants, found.audit_file, found.redis) == (IdentityConfig(), TenantsConfig(), "", "")
    text = path.read_text()
    names = (*IdentityConfig.__struct_fields__, *TenantsConfig.__struct_fields__, *TenantLimits.__struct_fields__)
    assert [name for name in names if f"{name}:" not in text] == []
