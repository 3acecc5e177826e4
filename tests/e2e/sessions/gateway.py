"""A gateway in this process before a real Triton, whose model does what the prompt says."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from causeway_server.cloud_pool.accounts.identity.config import IdentityConfig
from causeway_server.cloud_pool.app import App, build
from causeway_server.cloud_pool.config import Config, GatewaySessionConfig
from causeway_server.cloud_pool.http.config import GrpcConfig, ServerConfig
from causeway_server.cloud_pool.tiers.config import PartsConfig, TierConfig
from causeway_server.models.parts.process.messages import WorkerSpec
from tests.cloud_pool.dispatch.replica import Replica

from .peer import PATIENCE_S, Event, Peer

TEMPLATE = "{% set said = messages[-1].content %}{{ said if said is string else said[0].text }}"
ECHO = """{%- set said = messages[-1].content -%}
{%- set said = said if said is string else said | map(attribute="text") | join("\n") -%}
{{- {"mark": "parts", "a": [{"say": said}]} | tojson -}}"""
FOREVER: Event = {"wait": None}


@pytest.fixture(scope="module")
def replica(triton_environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    found = Replica("a", tmp_path_factory.mktemp("replica"))
    try:
        found.process.ready()
        yield found
    finally:
        found.process.stop()


class Gateway:
    """A gateway in this process, with its audit records."""

    def __init__(self, app: App, folder: Path) -> None:
        self.app = app
        self.port = int(app.url.rpartition(":")[2].split("/")[0])
        self._audit = folder / "audit.jsonl"

    @property
    def audit(self) -> list[Event]:
        return [json.loads(line) for line in self._audit.read_text().splitlines()]

    @property
    def open_sessions(self) -> tuple[int, int]:
        """Sessions with a connection, and without."""
        stats = self.app.sessions.stats
        return stats.connected, stats.cut

    @asynccontextmanager
    async def peer(self, query: str = "model=large", **headers: str) -> AsyncIterator[Peer]:
        found = await Peer.connect(self.port, query, headers=headers)
        try:
            if "session_id" not in query:
                await found.event()
            yield found
        finally:
            found.cut()


@asynccontextmanager
async def running(
    replica: Replica,
    folder: Path,
    *,
    tokens: str = "",
    identity: IdentityConfig | None = None,
    realtime: GatewaySessionConfig | None = None,
    grpc: GrpcConfig | None = None,
    speech: str = "",
    speech_detector: WorkerSpec | None = None,
    max_body_bytes: int = ServerConfig().max_body_bytes,
    origins: tuple[str, ...] = (),
) -> AsyncIterator[Gateway]:
    """`speech`: the address of an encoder of audio clips; then there are all encoders, and the model repeats its
    prompt."""
    (folder / "template.jinja").write_text(ECHO if speech else TEMPLATE)
    (folder / "tokens").write_text(tokens)
    (folder / "audit.jsonl").touch()
    tier = TierConfig(
        name="large",
        model="obedient",
        template_file=str(folder / "template.jinja"),
        context_tokens=4096,
        triton=replica.address,
    )
    encoders = (
        TierConfig("speech", triton=speech, can=("audio",)),
        TierConfig("images", triton=replica.address, can=("image",)),
    )
    config = Config(
        server=ServerConfig(
            port=0,
            drain_s=30.0,
            token_file=str(folder / "tokens") if tokens else "",
            max_body_bytes=max_body_bytes,
            origins=origins,
            max_body_memory_bytes=2 * max_body_bytes,
        ),
        identity=identity or IdentityConfig(),
        tiers=(tier, *encoders) if speech else (tier,),
        audit_file=str(folder / "audit.jsonl"),
        realtime=realtime or GatewaySessionConfig(),
        grpc=grpc or GrpcConfig(),
        parts=PartsConfig(audio_timeout_s=PATIENCE_S, image_timeout_s=PATIENCE_S),
    )
    async with anyio.create_task_group() as tasks:
        app = build(config, tasks, speech_detector=speech_detector)
        await app.start()
        try:
            yield Gateway(app, folder)
        finally:
            await app.stop()
    await app.close()


def orders(mark: str, *told: Event) -> str:
    return json.dumps({"mark": mark, "a": told})


def words(count: int) -> list[Event]:
    return [{"say": f"w{number} "} for number in range(count)]
