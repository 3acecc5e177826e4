"""A gateway that accepts tokens of an owner's issuer, over HTTP and in live sessions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from causeway_server.cloud_pool.accounts.identity.config import IdentityConfig
from causeway_server.cloud_pool.accounts.identity.fleet import RevocationSnapshot
from causeway_server.cloud_pool.accounts.tenants.config import TenantConfig, TenantsConfig
from causeway_server.cloud_pool.config import Config
from causeway_server.router.errors import AuthenticationFailed
from causeway_server.router.serving.issuers.config import IssuerConfig
from tests.router.issuers.oidc_issuer import AUDIENCE, OidcIssuer, SigningKey, serving_issuer

from .gateway import ASK, Gateway, running
from .test_grants import TIERS, URGENT
from .test_sessions import sessions
from .token_issuer import Issuer


@pytest.fixture
async def oidc() -> AsyncIterator[OidcIssuer]:
    async with serving_issuer(OidcIssuer()) as one:
        yield one


def config(oidc: OidcIssuer, issuer: Issuer | None = None, **changes: Any) -> Config:
    """Return the configuration of a gateway in `eu`; with `issuer` it has a key file, too."""
    trusted = IssuerConfig(oidc.url, AUDIENCE, ("acme", "stores"), interval_s=0.001)
    identity = IdentityConfig(key_file=issuer.config.key_file if issuer else "", issuers=(trusted,), region="eu")
    return Config(identity=identity, tiers=TIERS, **changes)


async def sent(
    gateway: Gateway, token: str, path: str = "/v1/chat/completions", **headers: str
) -> tuple[int, dict[str, Any], str]:
    """Send a request. Returns status, body and `WWW-Authenticate`."""
    body = {**ASK, "max_tokens": 9}
    headers["authorization"] = f"Bearer {token}"
    async with aiohttp.ClientSession() as http, http.post(gateway.url + path, json=body, headers=headers) as answer:
        return answer.status, await answer.json(), answer.headers.get("WWW-Authenticate", "")


async def test_a_token_is_its_tenants_device_with_what_it_grants(oidc: OidcIssuer, tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    async with running(config(oidc, audit_file=str(audit))) as gateway:
        for claims, priority in (({}, "standard"), ({"priority": "interactive"}, "interactive")):
            status, answer, _ = await sent(gateway, oidc.token(**claims, jti="one"), **URGENT)
            assert status == 200, answer
            context = gateway.service.calls[-1]
            assert (context.tenant, context.priority, context.critical) == ("acme", priority, False)
        assert (await sent(gateway, oidc.token(tenant="stores")))[0] == 200
        assert gateway.service.calls[-1].tenant == "stores"
        assert 'causeway_gateway_issuer_unreachable{issuer="' + oidc.url in gateway.metrics()
    records = [msgspec.json.decode(line) for line in audit.read_bytes().splitlines()]
    assert {(record["tenant"], record["token_id"]) for record in records[:2]} == {("acme", "one")}
    assert records[0]["device"].startswith("olga.")


async def test_a_tenants_limits_bound_its_issuers_tokens(oidc: OidcIssuer) -> None:
    tenants = TenantsConfig(overrides=(TenantConfig(name="acme", requests_per_s=0.001, burst=1),))
    async with running(config(oidc, tenants=tenants)) as gateway:
        statuses = [(await sent(gateway, oidc.token(sub=sub, tenant=to)))[0] for sub, to in _THREE]
    assert statuses == [200, 429, 200]


_THREE = (("olga", "acme"), ("pia", "acme"), ("olga", "stores"))


@pytest.mark.parametrize(
    ("claims", "status", "words"),
    [
        ({"tenant": "mallory"}, 403, "accepted for acme, stores only"),
        ({"scope": "openid admin"}, 403, "lacks the scope `chat`"),
        ({"regions": ["us"]}, 403, "regions us"),
        ({"aud": "other"}, 401, "another service"),
        ({"exp": 1_700_000_000, "iat": 1_600_000_000}, 401, "expired"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_a_refusal_has_the_form_of_each_dialect(
    oidc: OidcIssuer, path: str, claims: dict[str, Any], status: int, words: str
) -> None:
    async with running(config(oidc)) as gateway:
        version = {"anthropic-version": "2023-06-01"} if path == "/v1/messages" else {}
        got, body, challenge = await sent(gateway, oidc.token(**claims), path, **version)
    assert got == status
    assert words in body["error"]["message"]
    kinds = {401: "authentication_error", 403: "permission_error"}
    assert body["error"]["type"] == kinds[status]
    assert body.get("type") == ("error" if path == "/v1/messages" else None)
    assert challenge == ("Bearer" if status == 401 else "")


async def test_tokens_of_the_key_file_and_of_the_issuer_live_side_by_side(oidc: OidcIssuer, issuer: Issuer) -> None:
    """Neither signs for the other, and no issuer makes an operator."""
    now = oidc.claims()
    own = {"iat": now["iat"], "nbf": now["iat"], "exp": now["exp"]}
    async with running(config(oidc, issuer)) as gateway:
        assert (await sent(gateway, issuer.sign(own)))[0] == 200
        assert (await sent(gateway, oidc.token()))[0] == 200
        assert (await sent(gateway, issuer.sign({**own, "iss": oidc.url, "aud": AUDIENCE})))[0] == 401
        assert (await sent(gateway, oidc.key.sign(oidc.claims(iss="causeway", aud="causeway-cloud"))))[0] == 401
        assert (await sent(gateway, ""))[0] == 401
        admin = f"Bearer {oidc.token(scope='admin chat')}"
        assert gateway.accounts.authenticator.principal(admin).scopes == {"chat"}
        with pytest.raises(AuthenticationFailed, match="must be signed with EdDSA"):
            gateway.accounts.operators.principal(admin)


async def test_a_revoked_subject_is_refused(oidc: OidcIssuer) -> None:
    async with running(config(oidc)) as gateway:
        token = oidc.token(jti="stolen")
        assert (await sent(gateway, token))[0] == 200
        principal = gateway.accounts.authenticator.principal(f"Bearer {token}")
        revocations = gateway.accounts.revocations
        revocations.current = RevocationSnapshot(tokens={"stolen": 4e9})
        assert (await sent(gateway, token))[0] == 401
        assert (await sent(gateway, oidc.token(jti="other")))[0] == 200
        revocations.current = RevocationSnapshot(devices={principal.owner: 4e9})
        assert (await sent(gateway, oidc.token(jti="other")))[0] == 401


async def test_rotation_under_load_fails_no_request(oidc: OidcIssuer) -> None:
    """Five rotations, one of them under the same name, each with a burst of requests and forged ones."""
    async with running(config(oidc)) as gateway:
        for turn in range(5):
            oidc.rotate("same" if turn > 2 else f"key-{turn}", ("ES256", "RS256", "EdDSA")[turn % 3], keep=turn < 3)
            forged = sent(gateway, SigningKey.make("same").sign(oidc.claims()))
            found = await asyncio.gather(*(sent(gateway, oidc.token(n=n)) for n in range(10)), forged)
            assert [status for status, *_ in found] == [200] * 10 + [401], (turn, found)


async def test_a_live_session_waits_for_a_newer_key(oidc: OidcIssuer) -> None:
    """The token is that of the subprotocol, as browsers send it."""
    async with sessions(config(oidc)) as gateway, aiohttp.ClientSession() as http:
        await sent(gateway, oidc.token())
        oidc.rotate("two")
        protocols = ("realtime", f"openai-insecure-api-key.{oidc.token()}")
        async with http.ws_connect(f"{gateway.url}/v1/realtime?model=small", protocols=protocols) as socket:
            assert (await socket.receive_json())["type"] == "session.created"
