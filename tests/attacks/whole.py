"""A whole gateway in this process with signed tokens and a real Redis. There is no Triton: no request gets that far."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import anyio
import msgspec

from causeway_server.cloud_pool.accounts.identity.issuing import issue
from causeway_server.cloud_pool.app import build
from causeway_server.cloud_pool.config import Config
from causeway_server.cloud_pool.http.config import ServerConfig
from tests.cloud_pool.accounts.identity.token_issuer import Issuer
from tests.cloud_pool.unreachable import unreachable_tier
from tests.redis_server import RedisServer

PATIENCE_S = 60.0
CHAT = {"model": "large", "messages": [{"role": "user", "content": "hello"}]}


class TokenHolder:
    """A client with a token."""

    def __init__(self, session: aiohttp.ClientSession, token: str) -> None:
        self._session = session
        self._headers = {"authorization": f"Bearer {token}"} if token else {}

    async def ask(self, method: str, path: str, **more: Any) -> tuple[int, dict[str, Any]]:
        headers = self._headers | more.pop("headers", {})
        async with self._session.request(method, path, headers=headers, **more) as reply:
            return reply.status, await reply.json()


class Gateway:
    def __init__(self, session: aiohttp.ClientSession, issuer: Issuer, url: str) -> None:
        self._session = session
        self._issuer = issuer
        self.port = urlsplit(url).port

    def asker(self, tenant: str, device: str = "kiosk", **claims: Any) -> TokenHolder:
        return self.holder(token_of(self._issuer, tenant=tenant, device=device, **claims))

    def token(self, tenant: str) -> str:
        return token_of(self._issuer, tenant=tenant)

    def holder(self, token: str) -> TokenHolder:
        return TokenHolder(self._session, token)


def token_of(by: Issuer, **changes: Any) -> str:
    usual: dict[str, Any] = {
        "tenant": "acme",
        "device": "kiosk",
        "scopes": ("chat", "jobs"),
        "issuer": "causeway",
        "audience": "causeway-cloud",
        "now": time.time(),
        "lifetime_s": 600.0,
    }
    return issue(by.key, **(usual | changes))[0]


@asynccontextmanager
async def serving(
    issuer: Issuer, redis: RedisServer, sections: Mapping[str, Any] = {}, **identity: Any
) -> AsyncIterator[Gateway]:
    """Serve with other `sections` of the configuration."""
    config = Config(
        server=ServerConfig(port=0),
        tiers=(unreachable_tier(),),
        redis=redis.url,
        identity=type(issuer.config)(key_file=issuer.config.key_file, **identity),
    )
    config = msgspec.structs.replace(config, **sections)
    async with anyio.create_task_group() as tasks:
        app = build(config, tasks)
        await app.start()
        with anyio.fail_after(PATIENCE_S):
            async with aiohttp.ClientSession(app.url.removesuffix("/v1")) as session:
                yield Gateway(session, issuer, app.url)
        await app.stop()
    await app.close()
