"""The edge, and a gateway with stored responses and a worker, before one scripted model."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import pytest

from causeway_server.cloud_pool.app import App, build
from causeway_server.cloud_pool.background import run_worker
from causeway_server.cloud_pool.config import Config
from causeway_server.cloud_pool.http.config import ServerConfig as GatewayServer
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.edge_node.config.schema import ServerConfig
from tests.cloud_pool.upstreams.http_gateway import http_tier
from tests.edge_node.device import Device, running
from tests.edge_node.jobs.support import PROMPT
from tests.own_task import in_own_task
from tests.prepare.programs import NODE
from tests.redis_server import RedisServer, redis_server

from .model import ToolUser

__all__ = ["redis_server"]
HERE = Path(__file__).parent
KEY = "kiosk-secret"
_prefixes = itertools.count()


class Place(msgspec.Struct, frozen=True):
    """A server. `model`: the name of the scripted model there; `url` has no path."""

    name: str
    url: str
    model: str
    device: Device
    played: ToolUser


@pytest.fixture
def node() -> str:
    """The program; without it, or without the clients, the test is skipped."""
    program = NODE.find()
    if program is None or not (HERE / "node_modules" / "openai").exists():
        pytest.skip("no Node.js, or no clients of npm, here")
    return program


@pytest.fixture(params=["edge", pytest.param("gateway", marks=pytest.mark.redis)])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    played = ToolUser()
    async with AsyncExitStack() as stack:
        server = ServerConfig(port=0, drain_s=1.0, default_deadline_s=60.0)
        device = await stack.enter_async_context(running(tmp_path, engine=played, server=server, jobs=PROMPT))
        url, model = f"http://127.0.0.1:{device.app.port}", "small"
        if request.param == "gateway":
            redis: RedisServer = request.getfixturevalue("redis_server")
            app = await stack.enter_async_context(in_own_task(gateway(tmp_path, redis, f"{url}/v1", model)))
            url, model = app.url.removesuffix("/v1"), "large"
        yield Place(request.param, url, model, device, played)


@asynccontextmanager
async def gateway(folder: Path, redis: RedisServer, upstream: str, model: str) -> AsyncIterator[App]:
    """A gateway with one key and a worker."""
    (folder / "tokens").write_text(f"kiosk {KEY}\n")
    config = Config(
        server=GatewayServer(port=0, drain_s=1.0, token_file=str(folder / "tokens")),
        tiers=(http_tier(upstream, model=model),),
        jobs=JobsConfig(
            redis=redis.url,
            durability="warn",
            key_prefix=f"causeway:clients{next(_prefixes)}",
            reclaim_interval_s=0.05,
            lease_check_s=0.02,
            backoff_s=0.01,
            max_attempts=1,
            drain_s=0.0,
        ),
    )
    async with anyio.create_task_group() as tasks:
        app = build(config, tasks)
        await app.start()
        stop = asyncio.Event()
        worker = asyncio.ensure_future(run_worker(config, stop))
        yield app
        stop.set()
        await worker
        await app.stop()
    await app.close()
