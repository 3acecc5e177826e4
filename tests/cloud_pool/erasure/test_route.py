"""`DELETE /v1/me/data` at a gateway with a real Redis, a worker, and something of each client in every store."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import anyio
import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from causeway_server.cloud_pool.accounts.identity.config import ApiKeysConfig, IdentityConfig
from causeway_server.cloud_pool.accounts.identity.issuing import issue, new_key, read_private
from causeway_server.cloud_pool.accounts.identity.key_set import read_jwks
from causeway_server.cloud_pool.app import build
from causeway_server.cloud_pool.cache.config import CacheConfig
from causeway_server.cloud_pool.config import Config
from causeway_server.cloud_pool.core.principal import ANYONE
from causeway_server.cloud_pool.degradation.config import DegradationConfig, TierSessionsConfig
from causeway_server.cloud_pool.erasure import verify
from causeway_server.cloud_pool.http.config import ServerConfig
from causeway_server.cloud_pool.http.erasure_route import ErasureRoute
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.storage.encryption import ContentCipher, rotate_keys
from causeway_server.cloud_pool.storage.redis_client import RedisClient
from causeway_server.router.decision.sessions import client_of
from causeway_server.router.errors import InvalidRequest
from tests.cloud_pool.storage.redis_contents import contents
from tests.cloud_pool.upstreams.http_gateway import http_tier
from tests.edge_node.scripted import ScriptedCloud
from tests.redis_server import RedisServer, redis_server

__all__ = ["redis_server"]
pytestmark = pytest.mark.redis
KIOSK, TILL, ADMIN, ANN = "planted-kiosk", "planted-till", "planted-admin", "planted-ann"
KIND = re.compile(r"causeway:(?:jobs:|cache:{\w+}:)?(\w+)")


class Acme:
    """A gateway, the server behind it, and its callers by the names of their devices."""

    def __init__(
        self, url: str, folder: Path, stores: RedisClient, cloud: ScriptedCloud, http: aiohttp.ClientSession
    ) -> None:
        self.url = url
        self.folder = folder
        self.cloud = cloud
        self.stores = stores
        self._http = http

    async def call(self, client: str, method: str, path: str, tenant: str = "acme", **content: Any) -> tuple[int, Any]:
        scopes = ("chat", "jobs", "keys") if client == ADMIN else ("chat", "jobs")
        token, _ = issue(
            read_private(self.folder / "tokens.pem"),
            tenant=tenant,
            device=client,
            scopes=scopes,
            issuer="causeway",
            audience="causeway-cloud",
            now=time.time(),
            lifetime_s=60,
        )
        headers = {"Authorization": f"Bearer {token}"}
        async with self._http.request(method, self.url + path, headers=headers, **content) as response:
            return response.status, await response.json()

    async def plant(self, client: str, tenant: str = "acme", user: str = "") -> list[str]:
        """Leave something of a client in every store; return the paths at which it is found."""
        self.cloud.words = (client, " answers", ".")
        chat: dict[str, Any] = {"model": "large", "messages": [{"role": "user", "content": f"{client} asks {user}"}]}
        chat |= {"temperature": 0} | ({"user": user} if user else {})
        assert (await self.call(client, "POST", "/chat/completions", tenant, json=chat))[0] == 200
        _, job = await self.call(client, "POST", "/jobs", tenant, json=chat)
        await self.call(client, "POST", "/webhooks/secret", tenant, json={})
        stored = {"model": "large", "input": f"{client} asks", "store": True} | ({"user": user} if user else {})
        _, response = await self.call(client, "POST", "/responses", tenant, json=stored)
        paths = [f"/jobs/{job['id']}", f"/responses/{response['id']}"]
        if user:
            return paths
        form = aiohttp.FormData({"purpose": "user_data"})
        form.add_field("file", f"{client} wrote".encode(), filename=f"{client}.txt")
        _, file = await self.call(client, "POST", "/files", tenant, data=form)
        return [*paths, f"/files/{file['id']}"]

    async def found(self, client: str, tenant: str = "acme") -> set[str]:
        """The kinds of key with a client's name, or its digest, in any byte of key or value."""
        words = (client.encode(), client_of(f"{tenant}/{client}").hex().encode())
        keys = await contents(self.stores, "*")
        named = (name for name, value in keys.items() if any(word in name.encode() or word in value for word in words))
        return {match[1] for match in map(KIND.match, named) if match is not None}

    async def statuses(self, client: str, paths: list[str], tenant: str = "acme") -> set[int]:
        return {(await self.call(client, "GET", path, tenant))[0] for path in paths}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("tokens", "receipts"):
        new_key(tmp_path / f"{name}.pem", tmp_path / f"{name}.json")
    return tmp_path


@asynccontextmanager
async def acme(folder: Path, redis: RedisServer, key_file: str = "") -> AsyncIterator[Acme]:
    cloud = await ScriptedCloud().start()
    config = Config(
        server=ServerConfig(port=0, drain_s=1.0),
        tiers=(http_tier(cloud.url),),
        redis=redis.url,
        identity=IdentityConfig(
            key_file=str(folder / "tokens.json"),
            receipt_key_file=str(folder / "receipts.pem"),
            api_keys=ApiKeysConfig(accept=True),
        ),
        degradation=DegradationConfig(warm_up_after_idle_s=0.0, sessions=TierSessionsConfig(mode="prefer")),
        cache=CacheConfig(enabled=True, redis_timeout_s=1.0, lease_s=20.0),
        jobs=JobsConfig(redis=redis.url, durability="warn", encryption_key_file=key_file),
    )
    async with aiohttp.ClientSession() as http, anyio.create_task_group() as tasks:
        app = build(config, tasks)
        stores = RedisClient(config.jobs, {})
        await stores.command("FLUSHALL")
        await app.start()
        yield Acme(app.url, folder, stores, cloud, http)
        await app.stop()
        await stores.close()
    await app.close()
    await cloud.stop()


async def test_nothing_of_a_client_is_left_and_others_lose_nothing(folder: Path, redis_server: RedisServer) -> None:
    async with acme(folder, redis_server) as gateway:
        kiosk, till = await gateway.plant(KIOSK), await gateway.plant(TILL)
        namesake = await gateway.plant(KIOSK, tenant="rival")
        before = await gateway.found(TILL)
        assert {"job", "response", "file", "entry", "webhook_secret", "sessions"} <= before
        await gateway.call(KIOSK, "DELETE", "/me/data", tenant="rival")
        assert await gateway.found(KIOSK) == before
        status, signed = await gateway.call(KIOSK, "DELETE", "/me/data")
        receipt = verify(msgspec.json.encode(signed), read_jwks(folder / "receipts.json"))
        assert (status, receipt.subject.name) == (200, f"device acme/{KIOSK}")
        counts = {kind: receipt.erased.get(kind, 0) for kind in ("jobs", "responses", "files", "webhook_secrets")}
        assert counts == {"jobs": 1, "responses": 1, "files": 1, "webhook_secrets": 1}
        assert receipt.erased["cached_answers"] > 0
        assert receipt.erased["sessions"] > 0
        assert {"usage", "audit files, logs and traces"} <= {one.what for one in receipt.left}
        assert await gateway.found(KIOSK) == set()
        assert await gateway.statuses(KIOSK, kiosk) == {404}
        assert await gateway.statuses(KIOSK, namesake, "rival") == {404}
        assert (await gateway.found(TILL), await gateway.statuses(TILL, till)) == (before, {200})


async def test_an_administrator_erases_an_end_user_and_another_client(folder: Path, redis_server: RedisServer) -> None:
    async with acme(folder, redis_server) as gateway:
        own, of_ann = await gateway.plant(KIOSK), await gateway.plant(KIOSK, user=ANN)
        for query in (f"user={ANN}", f"client={KIOSK}"):
            assert (await gateway.call(TILL, "DELETE", f"/me/data?{query}"))[1]["error"]["code"] == "permission_denied"
        for query in ("user=a&client=b", "client=", "user="):
            assert (await gateway.call(ADMIN, "DELETE", f"/me/data?{query}"))[0] == 400
        _, signed = await gateway.call(ADMIN, "DELETE", f"/me/data?user={ANN}")
        assert signed["receipt"]["erased"] == {"jobs": 1, "responses": 1, "cached_answers": 1}
        assert await gateway.found(ANN) == set()
        assert (await gateway.statuses(KIOSK, own), await gateway.statuses(KIOSK, of_ann)) == ({200}, {404})
        _, signed = await gateway.call(ADMIN, "DELETE", f"/me/data?client={KIOSK}")
        assert signed["receipt"]["subject"] == {"tenant": "acme", "device": KIOSK}
        assert await gateway.found(KIOSK) == set()


async def test_with_a_key_file_no_value_in_redis_has_a_word_of_prompt_answer_or_file(
    folder: Path, redis_server: RedisServer
) -> None:
    """A cached answer is a hit after the key was rotated; one that is sealed with a strange key is made again."""
    for name in ("content", "strange"):
        rotate_keys(folder / f"{name}.keys", 0.0, 0.0)
    async with acme(folder, redis_server, str(folder / "content.keys")) as gateway:
        await gateway.plant(KIOSK)
        stored = await contents(gateway.stores, "*")
        for word in (b"asks", b"answers", b"wrote", b".txt"):
            assert not [name for name, value in stored.items() if word in value]
        rotate_keys(folder / "content.keys", 0.0, 1.0)
        (entry,) = (name for name in stored if name.endswith(":entry"))
        made = gateway.cloud.bodies
        asked, responses = len(made), 1  # which are not cached
        await gateway.plant(KIOSK)
        assert len(made) == asked + responses
        strange = ContentCipher(str(folder / "strange.keys")).seal(b"x", "cached", "", entry.split("{")[1][:32])
        await gateway.stores.command("HSET", entry, "value", strange)
        await gateway.plant(KIOSK)
        assert len(made) == asked + 2 * responses + 1


async def test_a_caller_without_a_name_names_whose_data_it_erases() -> None:
    """A gateway without tokens has no names; "its own data" would be the whole tenant."""
    admission: Any = SimpleNamespace(principal=lambda _: ANYONE)
    route = ErasureRoute(admission, Ed25519PrivateKey.generate(), lambda: pytest.fail("nothing may be opened"))
    http: Any = SimpleNamespace(query={})
    with pytest.raises(InvalidRequest, match="Your token names no client"):
        await route.erase(http)
