"""API keys that a tenant's administrators make: over HTTP at two gateways with a real Redis, and by the command."""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest
import redis.asyncio
from click.testing import CliRunner

from causeway_server.cloud_pool.accounts.identity.api_keys import (
    CHANGE_SCRIPT,
    PREFIX,
    ApiKeys,
    ApiKeyStore,
    NewApiKey,
    Rotation,
)
from causeway_server.cloud_pool.accounts.identity.config import ApiKeysConfig, IdentityConfig
from causeway_server.cloud_pool.accounts.identity.issuing import issue
from causeway_server.cloud_pool.accounts.tenants.config import TenantsConfig, TierPrice
from causeway_server.cloud_pool.cli.keys import keys
from causeway_server.cloud_pool.config import Config
from causeway_server.cloud_pool.core.principal import Grants
from causeway_server.router.errors import (
    AuthenticationFailed,
    ConfigError,
    IdentityUnavailable,
    InvalidRequest,
    NotFound,
    PermissionDenied,
)
from tests.redis_server import RedisServer, unreachable_redis

from .gateway import ASK, Gateway, running
from .test_grants import TIERS, URGENT
from .token_issuer import Issuer

pytestmark = pytest.mark.redis
NOW = 1_800_000_000.0


def config(url: str, issuer: Issuer, **changes: Any) -> Config:
    identity = msgspec.structs.replace(issuer.config, api_keys=ApiKeysConfig(accept=True), revocations_refresh_s=0.02)
    return Config(**{"identity": identity, "redis": url, "tiers": TIERS, **changes})


def token(by: Issuer, tenant: str = "acme", scopes: tuple[str, ...] = ("keys",), **granted: Any) -> str:
    names = {"tenant": tenant, "device": "admin", "issuer": "causeway", "audience": "causeway-cloud"}
    return issue(by.key, scopes=scopes, grants=Grants(**granted), now=time.time(), lifetime_s=600.0, **names)[0]


async def call(gateway: Gateway, by: str, method: str, path: str = "", **body: Any) -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {by}"}
    sent = body if method == "POST" else None
    async with (
        aiohttp.ClientSession() as http,
        http.request(method, f"{gateway.url}/v1/keys{path}", json=sent, headers=headers) as answer,
    ):
        return answer.status, await answer.json()


async def made(gateway: Gateway, by: str, **body: Any) -> dict[str, Any]:
    status, key = await call(gateway, by, "POST", **{"name": "ci", **body})
    assert status == 200, key
    return key


@pytest.fixture
async def store(empty_redis: RedisServer) -> AsyncIterator[ApiKeyStore]:
    async with redis.asyncio.Redis.from_url(empty_redis.url) as client:
        yield ApiKeyStore(client, IdentityConfig(), lambda: NOW)


async def test_a_key_is_made_used_listed_and_deleted(empty_redis: RedisServer, issuer: Issuer) -> None:
    settings, admin = config(empty_redis.url, issuer), token(issuer, priority="interactive")
    async with running(settings) as one, running(settings) as other:
        key = await made(one, admin, priority="interactive", models=["small"])
        secret = key.pop("key")
        assert secret.startswith(PREFIX)
        assert (await one.post(secret, {**ASK, "model": "small"}, **URGENT))[0] == 200
        context = one.service.calls[-1]
        assert (context.tenant, context.priority, context.critical) == ("acme", "interactive", False)
        assert (await one.post(secret))[0] == 403  # another model
        for each in (one, other):
            await each.accounts.api_keys.refresh()  # type: ignore[union-attr]
        assert (await other.post(secret, {**ASK, "model": "small"}))[0] == 200
        _, listed = await call(one, admin, "GET")
        assert listed["data"][0] == {**key, "last_used_at": pytest.approx(time.time(), abs=120.0)}
        assert secret not in str(listed)
        assert (await call(one, token(issuer, "stores"), "GET"))[1]["data"] == []
        assert (await call(one, token(issuer, "stores"), "DELETE", f"/{key['id']}"))[0] == 404
        assert (await call(one, admin, "DELETE", f"/{key['id']}")) == (200, {"id": key["id"], "deleted": True})
        await other.accounts.revocations.refresh()
        for each in (one, other):
            assert (await each.post(secret, {**ASK, "model": "small"}))[0] == 401
        assert (await call(one, admin, "DELETE", f"/{key['id']}"))[0] == 404


async def test_the_digest_alone_is_stored(empty_redis: RedisServer, issuer: Issuer) -> None:
    async with running(config(empty_redis.url, issuer)) as gateway:
        secret = (await made(gateway, token(issuer)))["key"]
    async with redis.asyncio.Redis.from_url(empty_redis.url) as client:
        stored = str(await client.hgetall("causeway:{apikeys}:keys"))
    assert hashlib.sha256(secret.encode()).hexdigest() in stored
    assert secret.removeprefix(PREFIX) not in stored


async def test_both_secrets_are_accepted_until_the_overlap_ends(empty_redis: RedisServer, issuer: Issuer) -> None:
    async with running(config(empty_redis.url, issuer)) as gateway:
        admin = token(issuer)
        key = await made(gateway, admin)
        status, rotated = await call(gateway, admin, "POST", f"/{key['id']}/rotate")
        assert (status, rotated["id"]) == (200, key["id"])
        assert rotated["previous_until"] == pytest.approx(time.time() + 86_400, abs=60.0)
        devices = set()
        for secret in (key["key"], rotated["key"]):
            assert (await gateway.post(secret))[0] == 200
            devices.add(gateway.accounts.authenticator.principal(f"Bearer {secret}").owner)
        assert len(devices) == 1
        await call(gateway, admin, "POST", f"/{key['id']}/rotate", overlap_s=0)
        assert [(await gateway.post(each["key"]))[0] for each in (key, rotated)] == [401, 401]


@pytest.mark.parametrize(
    ("scopes", "method", "path", "body", "status"),
    [
        (("chat", "jobs", "admin"), "POST", "", {"name": "ci"}, 403),
        (("keys",), "POST", "", {}, 400),
        (("keys",), "POST", "", {"name": "a b"}, 400),
        (("keys",), "POST", "", {"name": "ci", "scopes": ["admin"]}, 400),
        (("keys",), "POST", "", {"name": "ci", "scopes": ["keys"]}, 400),
        (("keys",), "POST", "", {"name": "ci", "secret": "mine"}, 400),
        (("keys",), "POST", "", {"name": "ci", "expires_in_s": 1e9}, 400),
        (("keys",), "POST", "", {"name": "ci", "scopes": ["chat", "jobs"], "usd_per_day": 1}, 400),
        (("keys",), "POST", "", {"name": "ci", "models": ["large"]}, 403),
        (("keys",), "POST", "/none/rotate", {}, 404),
        (("keys",), "PUT", "", {}, 405),
        (("keys",), "GET", "/none", {}, 405),
        (("keys",), "GET", "/none/rotate/more", {}, 404),
    ],
)
async def test_what_is_refused(
    empty_redis: RedisServer, issuer: Issuer, scopes: tuple[str, ...], method: str, path: str, body: Any, status: int
) -> None:
    async with running(config(empty_redis.url, issuer)) as gateway:
        by = token(issuer, scopes=scopes, models=("small",))
        assert (await call(gateway, by, method, path, **body))[0] == status


async def test_a_key_has_no_more_than_its_maker(store: ApiKeyStore) -> None:
    own = Grants(priority="standard", models=("small",), regions=("eu",))
    key, _ = await store.create("acme", NewApiKey(name="ci", priority="interactive", critical=True), own)
    assert key.grants == own
    with pytest.raises(PermissionDenied, match="us"):
        await store.create("acme", NewApiKey(name="ci", regions=("us",)), own)


async def test_a_key_ends_and_a_clock_in_2015_accepts_none(store: ApiKeyStore) -> None:
    now = [NOW]
    key, secret = await store.create("acme", NewApiKey(name="ci", expires_in_s=60.0), Grants())
    copy = ApiKeys(store.client, IdentityConfig(), lambda: now[0])
    with pytest.raises(IdentityUnavailable):
        copy.principal(secret)
    await copy.refresh()
    assert copy.principal(secret).token_id == key.id
    for now[0] in (NOW + 60.0, 1_420_070_400.0):
        with pytest.raises(AuthenticationFailed, match="expired, or the clock"):
            copy.principal(secret)


async def test_the_copy_is_used_while_redis_is_away(empty_redis: RedisServer, issuer: Issuer) -> None:
    async with running(config(empty_redis.url, issuer)) as gateway:
        secret = (await made(gateway, token(issuer)))["key"]
        copy = gateway.accounts.api_keys
        assert copy is not None
        client, copy.store.client = copy.store.client, unreachable_redis()
        await copy.refresh()
        assert copy.last_error
        assert (await gateway.post(secret))[0] == 200
        assert (await call(gateway, token(issuer), "POST", name="more"))[0] == 503
        await copy.store.client.aclose()
        copy.store.client = client


async def test_a_redis_without_its_data_accepts_no_key(store: ApiKeyStore, empty_redis: RedisServer) -> None:
    """Also a damaged row."""
    _, secret = await store.create("acme", NewApiKey(name="ci"), Grants())
    copy = ApiKeys(store.client, IdentityConfig(), lambda: NOW)
    await copy.refresh()
    empty_redis.flush()
    await store.client.hset("causeway:{apikeys}:keys", "x", b"{")
    await copy.refresh()
    with pytest.raises(AuthenticationFailed, match="unknown"):
        copy.principal(secret)


@pytest.mark.parametrize("own", [{"models": ("small",)}, {"modalities": ("text",)}, {"priority": "bulk"}])
async def test_a_rotation_gives_nobody_more_than_its_own(
    empty_redis: RedisServer, issuer: Issuer, own: dict[str, Any]
) -> None:
    async with running(config(empty_redis.url, issuer)) as gateway:
        key = await made(gateway, token(issuer))
        less = token(issuer, **own)
        status, answer = await call(gateway, less, "POST", f"/{key['id']}/rotate")
        assert (status, answer["error"]["code"]) == (403, "permission_denied")
        assert (await gateway.post(key["key"]))[0] == 200
        lesser = await made(gateway, less)
        assert (await call(gateway, less, "POST", f"/{lesser['id']}/rotate"))[0] == 200


async def test_a_change_of_a_key_that_was_changed_meanwhile_is_refused(store: ApiKeyStore) -> None:
    key, _ = await store.create("acme", NewApiKey(name="ci"), Grants())
    names = [f"causeway:{{apikeys}}:{name}" for name in ("keys", "nonce", "used")]
    stored = await store.client.hget(names[0], key.id)
    assert stored is not None
    await store.rotate("acme", key.id, Rotation(), Grants())
    assert await store.client.eval(CHANGE_SCRIPT, 3, *names, key.id, stored, b"", "x") == 0
    with pytest.raises(NotFound):
        await store.rotate("stores", key.id, Rotation(), Grants())


async def test_a_tenant_has_so_many_keys(empty_redis: RedisServer) -> None:
    settings = IdentityConfig(api_keys=ApiKeysConfig(max_per_tenant=1))
    async with redis.asyncio.Redis.from_url(empty_redis.url) as client:
        few = ApiKeyStore(client, settings)
        await few.create("acme", NewApiKey(name="one"), Grants())
        await few.create("stores", NewApiKey(name="one"), Grants())
        with pytest.raises(InvalidRequest, match="has 1 API keys"):
            await few.create("acme", NewApiKey(name="two"), Grants())


async def test_a_key_has_a_budget_of_its_own(empty_redis: RedisServer, issuer: Issuer) -> None:
    """A request may cost 0.01 USD and costs a tenth. Another key of the tenant goes on."""
    prices = (TierPrice(tier="small", output=100.0),)
    settings = config(empty_redis.url, issuer, tenants=TenantsConfig(prices=prices))
    body = {**ASK, "model": "small", "max_tokens": 100}
    async with running(settings) as gateway:
        admin = token(issuer)
        bounded = (await made(gateway, admin, usd_per_day=0.0105))["key"]
        free = (await made(gateway, admin))["key"]
        with pytest.raises(PermissionDenied, match="with a budget"):
            gateway.accounts.authenticator.principal(f"Bearer {bounded}").require("jobs")
        assert (await gateway.post(bounded, body))[0] == 200
        await gateway.accounts.ledger.flush()
        status, answer = await gateway.post(bounded, body)
        assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "0.0105 USD a day" in answer["error"]["message"]
        assert (await gateway.post(bounded, {**body, "max_tokens": 1000}))[0] == 400  # more than a day's
        assert (await gateway.post(free, body))[0] == 200
        await gateway.accounts.ledger.flush()
        assert (await gateway.post(bounded, {**body, "max_tokens": 50}))[0] == 200, "the refused one gave back its cost"


def test_the_command_makes_rotates_lists_and_deletes(empty_redis: RedisServer) -> None:
    def run(*args: str) -> str:
        result = CliRunner().invoke(keys, ["api", *args, "--redis", empty_redis.url], env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output
        return result.stdout

    secret = run("create", "acme", "ci", "--model", "small", "--usd-per-day", "2").strip()
    assert secret.startswith(PREFIX)
    (row,) = [line.split() for line in run("list", "acme").splitlines() if " ci " in line]
    key_id = next(word for word in row if len(word) == 16)
    assert "never" in row
    assert run("rotate", "acme", key_id).strip() != secret
    run("delete", "acme", key_id)
    assert " ci " not in run("list", "acme")
    refused = CliRunner().invoke(keys, ["api", "create", "acme", "a b", "--redis", empty_redis.url])
    assert (refused.exit_code, "1 to 64 letters" in refused.output) == (2, True)


def test_keys_need_a_redis() -> None:
    from causeway_server.cloud_pool.config import _check

    with pytest.raises(ConfigError, match="stored in Redis"):
        _check(Config(identity=IdentityConfig(api_keys=ApiKeysConfig(accept=True)), tiers=TIERS))
