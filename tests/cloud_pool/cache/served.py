"""Gateways on real sockets, all but Triton; `python -m tests.cloud_pool.cache.served CONFIG` is one as a process.

The process says `ready url=…`; its service says a word each time that it reads a line.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import anyio
import msgspec

from causeway_server.cloud_pool.app import build_accounts, build_server
from causeway_server.cloud_pool.cache.caching_service import CachingService
from causeway_server.cloud_pool.cache.shared_cache import CacheSecrets, SharedCache, read_secret
from causeway_server.cloud_pool.config import Config, Flags, load_config
from causeway_server.cloud_pool.core.request_context import BodyMemory, answer_head
from causeway_server.cloud_pool.http.info_routes import Readiness
from causeway_server.cloud_pool.http.request_admission import RequestAdmission
from causeway_server.cloud_pool.http.request_runner import RequestRunner
from causeway_server.cloud_pool.http.server import gateway_listener
from causeway_server.cloud_pool.observability.metrics import Metrics
from causeway_server.cloud_pool.serving.service import Service
from causeway_server.cloud_pool.tiers.tier import by_name, load_tiers

from .gateways import Script

HEAD = answer_head("assistant-large", "requested")

ASK = {"model": "assistant-large", "messages": [{"role": "user", "content": "my secret question"}]}


Headers = Mapping[str, str] | Sequence[tuple[str, str]]
"""A name may come more than once, each on a line of its own."""


class Served:
    """A gateway over HTTP."""

    def __init__(self, url: str, script: Script, metrics: Metrics, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.script = script
        self.session = session
        self._metrics = metrics

    def post(self, token: str = "", *, headers: Headers = (), **changes: object) -> Any:
        """Send a chat request; `changes` are of its body."""
        lines = [*(headers.items() if isinstance(headers, Mapping) else headers)]
        bearer = [("authorization", f"Bearer {token}")] if token else []
        return self.session.post(f"{self.url}/v1/chat/completions", json={**ASK, **changes}, headers=[*bearer, *lines])

    def metric(self, name: str, **labels: str) -> float:
        return self._metrics.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def served(
    config: Config, script: Script | None = None, *, now_ms: Callable[[], int] = lambda: -1
) -> AsyncIterator[Served]:
    """Run everything that `app.build` wires except the tiers."""
    started: asyncio.Future[Served] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    # A task of its own: fixtures begin and end in different ones.
    root = asyncio.ensure_future(_serve(config, script or Script(head=HEAD), now_ms, started, stop))
    either: list[asyncio.Future[None] | asyncio.Future[Served]] = [root, started]
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    try:
        if not started.done():
            await root  # raises the error of the start
        yield started.result()
    finally:
        stop.set()
        await root


async def _serve(
    config: Config, script: Script, now_ms: Callable[[], int], started: asyncio.Future[Served], stop: asyncio.Event
) -> None:
    config = msgspec.structs.replace(config, server=msgspec.structs.replace(config.server, port=0))
    tiers, metrics = load_tiers(config.tiers, config.model_dirs), Metrics()
    accounts = build_accounts(config, metrics)
    cache = None
    if config.cache.enabled:
        secrets = CacheSecrets(read_secret(config.cache))
        cache = SharedCache(
            config.cache, config.redis, by_name(tiers), metrics.registry, secrets=secrets, now_ms=now_ms
        )
    caching_service = CachingService(cache, script)
    service = cast("Service", SimpleNamespace(answer=script))
    ready, bodies = Readiness({}, 1.0), BodyMemory()
    admission = RequestAdmission(config.server, by_name(tiers), accounts.authenticator, accounts.ledger, bodies)
    runner = RequestRunner(service, caching_service, accounts.ledger, metrics)
    server = build_server(config, by_name(tiers), admission, runner, ready, accounts, metrics, bodies)
    listener = gateway_listener(config.server, server.handle, config.web_origins)
    async with anyio.create_task_group() as tasks, aiohttp.ClientSession() as session:
        await accounts.prepare()
        await listener.start()
        accounts.start(tasks)
        caching_service.start(tasks)
        started.set_result(Served(f"http://127.0.0.1:{listener.port}", script, metrics, session))
        await stop.wait()
        await listener.close()
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await caching_service.close()
            await accounts.close()


async def main(path: str) -> None:
    script = Script(head=HEAD)
    loop = asyncio.get_running_loop()
    async with served(load_config(Path(path), Flags()), script) as gateway:
        print(f"ready url={gateway.url}", flush=True)
        while await loop.run_in_executor(None, sys.stdin.readline):
            script.permit()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
