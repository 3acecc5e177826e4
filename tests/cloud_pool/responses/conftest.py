"""A gateway with a scripted server behind it, a real Redis, and a worker that makes its responses in the background."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import openai
import pytest_asyncio

from causeway_server.cloud_pool.accounts.identity.config import IdentityConfig
from causeway_server.cloud_pool.accounts.tenants.config import TenantsConfig
from causeway_server.cloud_pool.app import App, build
from causeway_server.cloud_pool.background import run_worker
from causeway_server.cloud_pool.config import Config
from causeway_server.cloud_pool.degradation.config import DegradationConfig
from causeway_server.cloud_pool.http.config import ServerConfig
from causeway_server.cloud_pool.storage.config import JobsConfig, StoredResponsesConfig
from tests.cloud_pool.upstreams.http_gateway import http_tier
from tests.edge_node.scripted import ScriptedCloud
from tests.own_task import in_own_task
from tests.redis_server import RedisServer, redis_server

__all__ = ["redis_server"]
_prefixes = itertools.count()
TOKENS = {"kiosk": "kiosk-secret", "till": "till-secret"}


class StoringGateway:
    """The gateway, the server behind it and clients of both keys. `config`: of further processes with this store."""

    def __init__(self, app: App, cloud: ScriptedCloud, config: Config) -> None:
        self.app = app
        self.cloud = cloud
        self.config = config
        self.client = self.client_of("kiosk")
        self.other = self.client_of("till")

    def client_of(self, name: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.app.url, api_key=TOKENS[name], max_retries=0, timeout=30)

    @property
    def asked(self) -> list[tuple[str, str]]:
        """Role and text of the messages that the server was asked last."""
        messages: Any = self.cloud.bodies[-1]["messages"]
        return [(message["role"], message["content"]) for message in messages]


@pytest_asyncio.fixture
async def gateway(tmp_path: Path, redis_server: RedisServer) -> AsyncIterator[StoringGateway]:
    async with in_own_task(serving(tmp_path, redis_server)) as made:
        yield made


@asynccontextmanager
async def serving(
    tmp_path: Path, redis_server: RedisServer, store_region: str = "", tenants: TenantsConfig | None = None
) -> AsyncIterator[StoringGateway]:
    """The gateway and its tier are in `eu`."""
    (tmp_path / "tokens").write_text("".join(f"{name} {token}\n" for name, token in TOKENS.items()))
    cloud = await ScriptedCloud().start()
    config = Config(
        server=ServerConfig(port=0, drain_s=1.0, token_file=str(tmp_path / "tokens")),
        tiers=(http_tier(cloud.url, region="eu"),),
        identity=IdentityConfig(region="eu"),
        tenants=tenants or TenantsConfig(),
        degradation=DegradationConfig(warm_up_after_idle_s=0.0),  # `asked` is what a client asked
        jobs=JobsConfig(
            region=store_region,
            redis=redis_server.url,
            durability="warn",
            key_prefix=f"causeway:jobs{next(_prefixes)}",
            reclaim_interval_s=0.05,
            lease_check_s=0.02,
            backoff_s=0.01,
            max_attempts=1,
            drain_s=0.0,
            responses=StoredResponsesConfig(max_responses=8, max_bytes=20_000),
        ),
    )
    async with anyio.create_task_group() as tasks:
        app = build(config, tasks)
        await app.start()
        made = StoringGateway(app, cloud, config)
        yield made
        await made.client.close()
        await made.other.close()
        await app.stop()
    await app.close()
    await cloud.stop()


@pytest_asyncio.fixture
async def working(gateway: StoringGateway) -> AsyncIterator[None]:
    """A worker at work."""
    stop = asyncio.Event()
    worker = asyncio.ensure_future(run_worker(gateway.config, stop))
    yield
    stop.set()
    await worker
