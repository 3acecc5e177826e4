"""A daemon for these measurements, and one request with its record."""

from __future__ import annotations

import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec

from causeway_server.edge_node.app import App, build
from causeway_server.edge_node.config.schema import Config, EngineConfig, ServerConfig
from causeway_server.models.parts.process.messages import WorkerSpec
from causeway_server.router.bundle.settings import PartsConfig
from causeway_server.router.types import DecisionRecord, Modality

POLICY = """
version: 1
name: modalities
targets: {{small: {{at: edge, model: {model}, temperature: 0}}}}
constraints: [{{name: parts-stay, keep: parts_on_device}}]
routes: [{{name: device, use: [small]}}]
"""


class Reply(msgspec.Struct, frozen=True):
    text: str
    modalities: str  # of `x-causeway-modalities`
    record: DecisionRecord
    seconds: float  # as the client sees them

    @property
    def model_s(self) -> float:
        """The language model's own time."""
        return sum(attempt.duration_ms or 0.0 for attempt in self.record.outcome.attempts) / 1000.0

    @property
    def slowest_s(self) -> float:
        """The time of the slowest branch."""
        return max((part.duration_ms for part in self.record.parts), default=0.0) / 1000.0


class Bench:
    def __init__(self, app: App, session: aiohttp.ClientSession, state: Path) -> None:
        self.app = app
        self.state = state
        self._session = session

    async def ask(self, *parts: dict[str, object], max_tokens: int = 24) -> Reply:
        body = {"model": "auto", "messages": [{"role": "user", "content": parts}], "max_tokens": max_tokens}
        started = time.monotonic()
        async with self._session.post("/v1/chat/completions", json=body) as response:
            answer = await response.json()
            seconds = time.monotonic() - started
            assert response.status == 200, answer
            found = response.headers.get("x-causeway-modalities", "")
            decision = response.headers["x-causeway-decision"]
        async with self._session.get(f"/v1/decisions/{decision}") as response:
            record = msgspec.json.decode(await response.read(), type=DecisionRecord)
        return Reply(str(answer["choices"][0]["message"]["content"]), found, record, seconds)

    async def hear(self, wav: bytes) -> str:
        """What is understood of an audio clip; costs nothing if it was part of a request before."""
        form = aiohttp.FormData({"model": "auto"})
        form.add_field("file", wav, filename="question.wav")
        async with self._session.post("/v1/audio/transcriptions", data=form) as response:
            answer = await response.json()
            assert response.status == 200, answer
            return str(answer["text"])


@asynccontextmanager
async def benched(
    model: str,
    folders: Sequence[Path] = (),
    encoders: Mapping[Modality, WorkerSpec] | None = None,
    parts: PartsConfig | None = None,
) -> AsyncIterator[Bench]:
    """A running daemon whose only target is `model`. `encoders`: None: those that are installed."""
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder) / "policy.yaml"
        policy.write_text(POLICY.format(model=model))
        state = Path(folder) / "state"
        config = Config(
            policy=str(policy),
            state_dir=str(state),
            server=ServerConfig(port=0),
            engine=EngineConfig(model_dirs=tuple(str(one) for one in folders), context_tokens=1024, sequences=2),
            parts=parts or PartsConfig(audio_timeout_s=100.0, image_timeout_s=100.0),
        )
        app = build(config, environ={}, encoders=encoders)
        await app.start()
        try:
            async with aiohttp.ClientSession(f"http://127.0.0.1:{app.port}") as session:
                yield Bench(app, session, state)
        finally:
            await app.close()
