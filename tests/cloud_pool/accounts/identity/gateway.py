"""A gateway on a real socket with a scripted service instead of Triton."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp
import anyio
import msgspec

from causeway_server.cloud_pool.accounts.accounts import Accounts
from causeway_server.cloud_pool.app import build_accounts, build_server
from causeway_server.cloud_pool.cache.caching_service import CachingService
from causeway_server.cloud_pool.config import Config
from causeway_server.cloud_pool.core.request_context import BodyMemory, Piece, RequestContext, answer_head
from causeway_server.cloud_pool.http.config import ServerConfig
from causeway_server.cloud_pool.http.info_routes import Readiness
from causeway_server.cloud_pool.http.request_admission import RequestAdmission
from causeway_server.cloud_pool.http.request_runner import RequestRunner
from causeway_server.cloud_pool.http.server import Server, gateway_listener
from causeway_server.cloud_pool.observability.metrics import Metrics
from causeway_server.cloud_pool.serving.service import Service
from causeway_server.cloud_pool.tiers.tier import by_name, load_tiers
from causeway_server.router.errors import CausewayError
from causeway_server.router.types import Chunk, Usage

ASK = {"model": "assistant-large", "messages": [{"role": "user", "content": "my secret question"}]}


class ScriptedService:
    """Answers with ten tokens. `fault` breaks it after the first one; `held` holds it there until it is set."""

    def __init__(self) -> None:
        self.calls: list[RequestContext] = []
        self.fault: CausewayError | None = None
        self.held: anyio.Event | None = None
        self.reached = anyio.Event()

    async def answer(self, call: RequestContext) -> AsyncGenerator[Piece, None]:
        self.calls.append(call)
        yield answer_head(call.tier.name, "asked")
        yield Chunk(text="my secret ", tokens=1)
        self.reached.set()
        if self.held is not None:
            await self.held.wait()
        if self.fault is not None:
            raise self.fault
        yield Chunk(text="answer", tokens=9, finish_reason="stop")
        yield Chunk(usage=Usage(prompt_tokens=20, completion_tokens=10))


class Gateway:
    def __init__(
        self,
        url: str,
        service: ScriptedService,
        accounts: Accounts,
        server: Server,
        admission: RequestAdmission,
        runner: RequestRunner,
        bodies: BodyMemory,
        metrics: Metrics,
    ) -> None:
        self.url = url
        self.service = service
        self.accounts = accounts
        self.server = server
        self.admission = admission
        self.runner = runner
        self.bodies = bodies
        self._metrics = metrics

    async def post(
        self, token: str = "", body: dict[str, Any] | None = None, path: str = "/v1/chat/completions", **headers: str
    ) -> tuple[int, dict[str, Any]]:
        if token:
            headers["authorization"] = f"Bearer {token}"
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.url + path, json=body or ASK, headers=headers) as answer,
        ):
            return answer.status, await answer.json()

    def metrics(self) -> str:
        return self._metrics.text().decode()


@asynccontextmanager
async def running(config: Config, caching_service: CachingService | None = None) -> AsyncIterator[Gateway]:
    config = msgspec.structs.replace(config, server=msgspec.structs.replace(config.server, port=0))
    tiers, metrics, service = load_tiers(config.tiers, config.model_dirs), Metrics(), ScriptedService()
    accounts = build_accounts(config, metrics)
    answers = caching_service or CachingService(None, service.answer)
    bodies = BodyMemory()
    admission = RequestAdmission(
        config.server,
        by_name(tiers),
        accounts.authenticator,
        accounts.ledger,
        bodies,
        critical_tenants=config.degradation.critical_tenants,
    )
    runner = RequestRunner(cast("Service", service), answers, accounts.ledger, metrics, callers=accounts.authenticator)
    server = build_server(config, by_name(tiers), admission, runner, Readiness({}, 1.0), accounts, metrics, bodies)
    listener = gateway_listener(config.server, server.handle, config.web_origins)
    async with anyio.create_task_group() as tasks:
        await accounts.prepare()
        await listener.start()
        accounts.start(tasks)
        try:
            yield Gateway(listener.url, service, accounts, server, admission, runner, bodies, metrics)
        finally:
            await listener.close()
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await accounts.close()


def static_token_config(folder: Path) -> ServerConfig:
    """One static token, `secret` of `kiosk`."""
    (folder / "tokens").write_text("kiosk secret\n")
    return ServerConfig(token_file=str(folder / "tokens"))
