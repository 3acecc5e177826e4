"""A whole daemon on real sockets, with scripted generators, and a client that speaks to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from causeway_server.edge_node.agent.interfaces import FleetLink
from causeway_server.edge_node.app import App, build
from causeway_server.edge_node.clock import Clock
from causeway_server.edge_node.config.schema import (
    CloudServer,
    Config,
    DeviceFilesConfig,
    DeviceIdentityConfig,
    EngineConfig,
    LimitsConfig,
    MqttConfig,
    OutboxConfig,
    ResponsesConfig,
    ServerConfig,
)
from causeway_server.edge_node.storage.state_folder import FLEET_FOLDER
from causeway_server.models.parts.process.messages import WorkerSpec
from causeway_server.router.bundle.settings import CloudSettings, DecisionsConfig, PartsConfig, RealtimeConfig
from causeway_server.router.config import TracingConfig
from causeway_server.router.types import DecisionRecord, Modality

from .scripted import ScriptedCloud, ScriptedEngine

CHAT = "/v1/chat/completions"
POLICY = """
version: 1
name: test
targets:
  small:
    at: edge
    model: m-small
    first_token_timeout: 20s
    can: [chat, completion, embedding, tools, json, logprobs]
  large:
    at: cloud
    model: m-large
    first_token_timeout: 20s
    timeout: 25s
    price: {input: 1000, output: 1000}
    can: [chat, completion, embedding, tools, json, logprobs]
constraints:
  - name: private-stays
    when: '"private" in request.tags'
    keep: on_device
routes:
  - name: cloud-first
    when: '"cloud" in request.tags'
    use: [large, small]
  - name: unsure
    when: '"handoff" in request.tags'
    use: [small, large]
    handoff: {after_tokens: 2, below: 0.5}
  - name: only-edge
    when: '"edge" in request.tags'
    use: [small]
  - name: edge-first
    use: [small, large]
cache:
  - when: request.temperature == 0.0 && "stale" in request.tags
    exact: {ttl: 1ms, stale_if_error: 10m}
  - name: greedy
    when: request.temperature == 0.0
    exact: {ttl: 30s, stale_if_error: 10m}
limits: {concurrent: 4, queue: 4}
"""


def hasty(*targets: str) -> str:
    """Return the policy with short timeouts of these targets, whose faults end by a timeout alone."""
    policy = POLICY
    if "small" in targets:
        policy = policy.replace("m-small\n    first_token_timeout: 20s", "m-small\n    first_token_timeout: 200ms")
    if "large" in targets:
        policy = policy.replace("m-large\n    first_token_timeout: 20s", "m-large\n    first_token_timeout: 200ms")
        policy = policy.replace("timeout: 25s", "timeout: 350ms")
    return policy


_TURNS = 12
"""Turns of the event loop that an answer takes beyond its last byte: the daemon, which runs in the same loop, counts a
request once the client has its answer."""


class Device:
    """The daemon, its generators, and an HTTP session to it."""

    def __init__(self, app: App, engine: ScriptedEngine, cloud: ScriptedCloud, session: aiohttp.ClientSession) -> None:
        self.app = app
        self.engine = engine
        self.cloud = cloud
        self.session = session
        self.parts = app.parts

    async def ask(
        self, text: str = "hello", *, tags: str = "", headers: Mapping[str, str] = {}, path: str = CHAT, **body: object
    ) -> Answer:
        all_headers = {"x-causeway-tags": tags, **headers} if tags else dict(headers)
        body = {"model": "auto", "messages": [{"role": "user", "content": text}], **body}
        async with self.session.post(path, json=body, headers=all_headers) as response:
            answer = Answer(response.status, dict(response.headers), await _all(response))
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        return answer

    async def get(self, path: str) -> Answer:
        async with self.session.get(path) as response:
            return Answer(response.status, dict(response.headers), await response.read())

    async def record(self, answer: Answer) -> DecisionRecord:
        found = await self.get(f"/v1/decisions/{answer.headers['x-causeway-decision']}")
        assert found.status == 200
        return msgspec.json.decode(found.body, type=DecisionRecord)

    def newest(self) -> DecisionRecord:
        newest = self.parts.decisions.newest
        assert newest is not None
        return newest

    def assert_nothing_leaks(self) -> None:
        stats = self.parts.admission
        assert (stats.running, stats.waiting, len(self.parts.shared_generations)) == (0, 0, 0)
        assert self.engine.running == 0


class Answer(msgspec.Struct, frozen=True):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        return msgspec.json.decode(self.body, type=dict[str, Any])

    @property
    def text(self) -> str:
        """The answer's text: of choice 0, whole or streamed."""
        if self.headers["Content-Type"].startswith("text/event-stream"):
            return "".join(_delta(event) for event in self.events)
        return msgspec.json.decode(self.body, type=_Whole).choices[0].message.content

    @property
    def events(self) -> list[dict[str, Any]]:
        """The stream's events, without [DONE]."""
        lines = [line[6:] for line in self.body.decode().splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]

    @property
    def done(self) -> bool:
        return self.body.endswith(b"data: [DONE]\n\n")

    @property
    def finish_reasons(self) -> list[object]:
        choices = [choice for event in self.events for choice in event.get("choices", [])]
        return [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]

    @property
    def code(self) -> str:
        """Of the error object."""
        return msgspec.json.decode(self.body, type=_Failed).error.code

    @property
    def message(self) -> str:
        return msgspec.json.decode(self.body, type=_Failed).error.message


class _Message(msgspec.Struct):
    content: str


class _ChoiceStream(msgspec.Struct):
    message: _Message


class _Whole(msgspec.Struct):
    choices: list[_ChoiceStream]


class _Error(msgspec.Struct):
    message: str
    type: str
    code: str
    param: str | None


class _Failed(msgspec.Struct):
    error: _Error


def _delta(event: dict[str, object]) -> str:
    choices = event.get("choices")
    if not isinstance(choices, list) or not choices or choices[0]["index"] != 0:
        return ""
    return str(choices[0]["delta"].get("content") or "")


async def _all(response: aiohttp.ClientResponse) -> bytes:
    """The body, as far as it came."""
    body = b""
    try:
        async for data in response.content.iter_any():
            body += data
    except aiohttp.ClientPayloadError:
        pass
    return body


def config(
    state_dir: Path,
    *,
    policy: str = POLICY,
    server: ServerConfig | None = None,
    cloud: str = "",
    probe_interval_s: float = 5.0,
    model_dirs: tuple[str, ...] = (),
) -> Config:
    state_dir.mkdir(parents=True, exist_ok=True)
    path = state_dir / "policy.yaml"
    path.write_text(policy)
    return Config(
        policy=str(path),
        state_dir=str(state_dir / "state"),
        server=server or ServerConfig(port=0, drain_s=1.0, default_deadline_s=60.0),
        engine=EngineConfig(enabled=True, model_dirs=model_dirs),
        clouds={"main": CloudServer(url=cloud)} if cloud else {},
        cloud=CloudSettings(
            connect_timeout_s=5.0, first_token_timeout_s=20.0, timeout_s=30.0, probe_interval_s=probe_interval_s
        ),
    )


@asynccontextmanager
async def running(
    state_dir: Path,
    *,
    policy: str = POLICY,
    server: ServerConfig | None = None,
    engine: ScriptedEngine | None = None,
    cloud: ScriptedCloud | None = None,
    tracing: TracingConfig | None = None,
    api_key: str = "",
    decisions: DecisionsConfig | None = None,
    jobs: OutboxConfig | None = None,
    files: DeviceFilesConfig | None = None,
    responses: ResponsesConfig | None = None,
    clock: Clock | None = None,
    probe_interval_s: float = 5.0,
    encoders: Mapping[Modality, WorkerSpec] | None = None,
    speech_detector: WorkerSpec | None = None,
    parts: PartsConfig | None = None,
    environ: Mapping[str, str] = {},
    fleet: FleetLink | None = None,
    realtime: RealtimeConfig | None = None,
    mqtt: MqttConfig | None = None,
    model_dirs: tuple[str, ...] = (),
    clouds: Mapping[str, CloudServer] = {},
    identity: DeviceIdentityConfig | None = None,
    limits: LimitsConfig | None = None,
) -> AsyncIterator[Device]:
    engine = engine or ScriptedEngine()
    cloud = cloud or ScriptedCloud()
    if not cloud.url:
        await cloud.start()
    settings = config(
        state_dir,
        policy=policy,
        server=server,
        cloud=cloud.url,
        probe_interval_s=probe_interval_s,
        model_dirs=model_dirs,
    )
    keyed = {name: msgspec.structs.replace(one, key=api_key) for name, one in settings.clouds.items()}
    settings = msgspec.structs.replace(
        settings,
        clouds=dict(clouds) or keyed,
        tracing=tracing or TracingConfig(),
        decisions=decisions or DecisionsConfig(),
        jobs=jobs or OutboxConfig(),
        files=files or DeviceFilesConfig(),
        responses=responses or ResponsesConfig(),
        parts=parts or PartsConfig(),
        realtime=realtime or RealtimeConfig(),
        mqtt=mqtt or MqttConfig(),
        identity=identity or DeviceIdentityConfig(),
        limits=limits or LimitsConfig(),
    )
    if fleet is not None:
        (Path(settings.state_dir) / FLEET_FOLDER).mkdir(parents=True, exist_ok=True)
    app = build(
        settings,
        make_engine=lambda _: engine,
        environ=environ,
        clock=clock,
        encoders=encoders or {},
        speech_detector=speech_detector,
        fleet=fleet,
    )
    await app.start()
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{app.port}") as session:
            yield Device(app, engine, cloud, session)
    finally:
        await app.close()
        await cloud.stop()
