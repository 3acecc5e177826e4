"""A gateway in this process whose tiers are servers with OpenAI's HTTP API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio

from causeway_server.cloud_pool.app import App, build
from causeway_server.cloud_pool.config import Config
from causeway_server.cloud_pool.degradation.config import DegradationConfig
from causeway_server.cloud_pool.dispatch.config import LoadBalancingConfig
from causeway_server.cloud_pool.http.config import ServerConfig
from causeway_server.cloud_pool.tiers.config import TierAbility, TierConfig
from causeway_server.cloud_pool.upstreams.config import UpstreamConfig
from tests.edge_node.device import Answer

Event = dict[str, object]
ABLE: tuple[TierAbility, ...] = ("chat", "completion", "embedding")
# No probes beside slow answers, which tests count.
QUICK = LoadBalancingConfig(silent_before_probe_s=30.0, probe_timeout_s=0.2, base_ejection_s=0.05, hung_after_s=0.5)


class Gateway:
    """The gateway, its audit records and a client of it."""

    def __init__(self, app: App, session: aiohttp.ClientSession, audit: Path) -> None:
        self.app = app
        self.session = session
        self._audit = audit

    @property
    def audit(self) -> list[Event]:
        return [json.loads(line) for line in self._audit.read_text().splitlines()]

    async def post(self, path: str, body: Event, headers: Mapping[str, str] = {}) -> Answer:
        async with self.session.post(self.app.url + path, json=body, headers=headers) as response:
            return Answer(response.status, dict(response.headers), await response.read())

    async def ask(self, *, headers: Mapping[str, str] = {}, model: str = "large", **fields: object) -> Answer:
        """Post a chat."""
        body = {"model": model, "messages": [{"role": "user", "content": "hello there"}], **fields}
        return await self.post("/chat/completions", body, headers)


def http_tier(*urls: str, name: str = "large", upstream: UpstreamConfig | None = None, **fields: object) -> TierConfig:
    return TierConfig(
        name=name,
        upstream=upstream or UpstreamConfig(kind="openai", urls=urls, verify_features=False),
        **{"model": "m", "can": ABLE, **fields},  # type: ignore[arg-type]
    )


@asynccontextmanager
async def serving(
    folder: Path,
    *tiers: TierConfig,
    degradation: DegradationConfig | None = None,
    load_balancing: LoadBalancingConfig = QUICK,
    **sections: Any,
) -> AsyncIterator[Gateway]:
    """Serve these tiers. `sections`: further sections of the configuration."""
    audit = folder / "audit.jsonl"
    audit.touch()
    config = Config(
        server=ServerConfig(port=0, drain_s=5.0, heartbeat_s=0.0),
        tiers=tiers,
        audit_file=str(audit),
        load_balancing=load_balancing,
        degradation=degradation or DegradationConfig(warm_up_after_idle_s=0.0),
        **sections,
    )
    async with anyio.create_task_group() as tasks, aiohttp.ClientSession() as session:
        app = build(config, tasks)
        failed: BaseException | None = None
        try:
            await app.start()
            yield Gateway(app, session, audit)
        except BaseException as error:  # raised below: the task group, which `stop` cancels, would drop it
            failed = error
        finally:
            await app.stop()
    await app.close()
    if failed is not None:
        raise failed
