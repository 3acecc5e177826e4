"""Degradation as callers of the gateway see it: two real Tritons, of which the first is unloaded, killed or full."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import aiohttp
import anyio
import grpc
import pytest
import pytest_asyncio
from cryptography.fernet import Fernet
from tritonclient.grpc import service_pb2, service_pb2_grpc

from causeway_server.cloud_pool.upstreams.triton.model_control import HEADER, default_key_file, read_key
from tests.cloud_pool.conftest import PATIENCE_S, Command, Pool, triton_environment
from tests.redis_server import RedisServer, redis_server
from tests.waiting import until

__all__ = ["redis_server", "triton_environment"]

pytestmark = [pytest.mark.triton, pytest.mark.engine]

MODEL = "assistant-large"
CONFIG = """
server: {{port: 0, token_file: tokens, readiness_cache_s: 0}}
tiers:
  - {{name: large, model: assistant-large, artifact: assistant-large, triton: "{large}"}}
  - {{name: tight, model: assistant-large, artifact: assistant-large, triton: "{large}", concurrency: 1, max_queued: 0}}
  - {{name: medium, model: assistant-large, artifact: assistant-large, triton: "{medium}"}}
  # No server is as fast as that: each first token is late.
  - {{name: late, model: assistant-large, artifact: assistant-large, triton: "{medium}",
     concurrency: 4, min_concurrency: 0, ttft_objective_s: 0.00001}}
degradation:
  tiers: [large, tight, medium]
  truncated_answer_tokens: 2
  warm_up_after_idle_s: 0.5
audit_file: audit.log
"""
OLD = """
server: {{port: 0, readiness_cache_s: 0}}
tiers: [{{name: large, model: assistant-large, artifact: assistant-large, triton: "{large}"}}]
redis: {redis}
cache: {{enabled: true, ttl_s: 0.5, redis_timeout_s: 0.7}}
"""
CHAT = {"messages": [{"role": "user", "content": "wake me up at seven"}], "temperature": 0, "max_tokens": 60}
LONG = {**CHAT, "max_tokens": 1900, "ignore_eos": True, "stream": True}


class Answer:
    """A complete answer, read to its end."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes, stream: bool) -> None:
        self.status = status
        self.headers = headers
        self.error = ""
        if stream and status == 200:
            events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith(b"data: {")]
            assert body.rstrip().endswith(b"[DONE]"), body
            self.text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
            self.reason = events[-1]["choices"][0]["finish_reason"]
            (self.model,) = {event["model"] for event in events}
            return
        document = json.loads(body)
        self.error = document.get("error", {}).get("code", "")
        self.text = ""
        if status == 200:
            self.text = document["choices"][0]["message"]["content"] or ""
            self.reason = document["choices"][0]["finish_reason"]
            self.model = document["model"]

    @property
    def tier_reason(self) -> str:
        return self.headers.get("x-causeway-tier-reason", "")

    @property
    def is_degraded(self) -> bool:
        return self.headers.get("x-causeway-degraded") == "true"


class Bed:
    def __init__(self, large: Pool, medium: Pool, addresses: Mapping[str, str], folder: Path) -> None:
        self.large = large
        self.medium = medium
        self.url = addresses["url"]
        self.operator = addresses["operator"]
        self.folder = folder
        self.http: aiohttp.ClientSession

    async def send(self, model: str, *, stream: bool = False, text: str = "", **headers: str) -> Answer:
        body = {**CHAT, "model": model, "stream": stream}
        body |= {"messages": [{"role": "user", "content": text}]} if text else {}
        headers = {"authorization": "Bearer kiosk-secret", **{f"x-causeway-{key}": headers[key] for key in headers}}
        async with self.http.post(f"{self.url}/chat/completions", json=body, headers=headers) as reply:
            return Answer(reply.status, reply.headers, await reply.read(), stream)

    async def until_answered(self, model: str, tier_reason: str, refusal: str = "", **headers: str) -> Answer:
        """Repeat the request until that is the reason; each one on the way is answered, or refused by that code."""
        with anyio.fail_after(PATIENCE_S):
            while True:
                found = await self.send(model, stream=False, **headers)
                assert found.status == 200 or found.error == refusal, found.error
                if found.tier_reason == tier_reason:
                    return found
                await asyncio.sleep(0.05)

    async def until_ready(self) -> None:
        """Wait until every tier has answered a real request."""
        with anyio.fail_after(PATIENCE_S):
            while True:
                async with self.http.get(self.url.replace("/v1", "/readyz")) as reply:
                    if reply.status == 200:
                        return
                await asyncio.sleep(0.05)

    async def metrics(self) -> str:
        async with self.http.get(f"{self.operator}/metrics") as reply:
            return await reply.text()


@pytest.fixture(scope="module")
def tritons(triton_environment: Path) -> Iterator[tuple[Pool, Pool]]:
    flags = ("--grpc-port", "0", "--metrics-port", "0", "--threads", "1", "--drain-s", "1")
    commands = [Command("triton", *flags, CAUSEWAY_TRITON_ENV=str(triton_environment)) for _ in range(2)]
    try:
        yield Pool(commands[0]), Pool(commands[1])
    finally:
        for command in commands:
            command.stop_triton()


@pytest.fixture(scope="module")
def gateway(
    tritons: tuple[Pool, Pool], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Mapping[str, str], Path]]:
    folder = tmp_path_factory.mktemp("ladder")
    (folder / "tokens").write_text("kiosk kiosk-secret priority=interactive critical=true\n")
    (folder / "keys").write_bytes(Fernet.generate_key())
    large, medium = tritons
    (folder / "gateway.yaml").write_text(CONFIG.format(large=large.grpc, medium=medium.grpc))
    command = Command("serve", "--config", str(folder / "gateway.yaml"))
    try:
        yield command.ready(), folder
        assert command.stop() == 0
    finally:
        command.process.kill()


@pytest_asyncio.fixture
async def bed(tritons: tuple[Pool, Pool], gateway: tuple[Mapping[str, str], Path]) -> AsyncIterator[Bed]:
    made = Bed(*tritons, *gateway)
    async with aiohttp.ClientSession() as made.http:
        await made.until_ready()
        yield made


async def control(pool: Pool, *, load: bool) -> None:
    """Load or unload a model as an operator does."""
    metadata = ((HEADER, read_key(default_key_file())),)
    async with grpc.aio.insecure_channel(pool.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        if load:
            await stub.RepositoryModelLoad(service_pb2.RepositoryModelLoadRequest(model_name=MODEL), metadata=metadata)
        else:
            await stub.RepositoryModelUnload(
                service_pb2.RepositoryModelUnloadRequest(model_name=MODEL), metadata=metadata
            )


@pytest.mark.parametrize("stream", [False, True])
async def test_the_requested_tier_answers_when_it_can(bed: Bed, stream: bool) -> None:
    found = await bed.send("large", stream=stream)
    assert (found.status, found.model, found.headers["x-causeway-tier"], found.tier_reason) == (
        200,
        "large",
        "large",
        "requested",
    )
    assert not found.is_degraded


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_tier_falls_back(bed: Bed, stream: bool) -> None:
    whole = await bed.send("medium", stream=stream)
    headers = {"authorization": "Bearer kiosk-secret"}
    async with bed.http.post(f"{bed.url}/chat/completions", json={**LONG, "model": "tight"}, headers=headers) as held:
        assert held.headers["x-causeway-tier"] == "tight"
        await held.content.readline()
        found = await bed.send("tight", stream=stream)
        assert (found.model, found.tier_reason, found.text) == ("medium", "tight=saturated", whole.text)
        assert found.is_degraded
        refused = await bed.send("tight", stream=stream, critical="true")
        assert refused.status == 429
        assert int(refused.headers["retry-after"]) >= 1
        held.close()
    # Triton is idle before the gateway knows it.
    found = await bed.until_answered("tight", "requested", refusal="queue_full", critical="true")
    assert found.model == "tight"


async def test_an_unloaded_model_falls_back_until_it_is_loaded(bed: Bed) -> None:
    """No request fails."""
    await control(bed.large, load=False)
    for stream in (False, True):
        found = await bed.send("large", stream=stream)
        assert (found.status, found.model, found.tier_reason) == (200, "medium", "large=broken; tight=broken")
        assert found.is_degraded
    assert (await bed.send("large", critical="true")).status == 503
    await control(bed.large, load=True)
    found = await bed.until_answered("large", "requested")
    assert found.model == "large"


async def test_a_killed_triton_falls_back_until_it_returns(bed: Bed) -> None:
    """No request fails."""
    bed.large.server.kill()
    found = await bed.send("large")
    assert (found.status, found.model) == (200, "medium")
    bed.large.wait_ready()
    assert (await bed.until_answered("large", "requested")).model == "large"
    await until(lambda: bed.large.is_idle() and bed.medium.is_idle())


async def test_audit_and_metrics_name_the_answering_tier(bed: Bed) -> None:
    text = await bed.metrics()
    assert 'causeway_gateway_tier_answers_total{reason="broken",requested="large",tier="medium"}' in text
    assert 'causeway_gateway_requests_total{outcome="ok",tier="medium"}' in text
    assert 'causeway_gateway_tier_share{priority="standard",tier="large"}' in text

    def records() -> list[dict[str, object]]:
        return [json.loads(line) for line in (bed.folder / "audit.log").read_text().splitlines()]

    before = len(records())
    await control(bed.large, load=False)
    assert (await bed.send("large")).model == "medium"
    await control(bed.large, load=True)
    await until(lambda: len(records()) > before)
    assert records()[before]["tier"] == "medium"
    await bed.until_answered("large", "requested")


# --- shortened answers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_truncated_under_stress(bed: Bed, stream: bool) -> None:
    """Once the tier is warm, one answer shows it to be slow, the next is truncated; a critical one never is."""
    uncut = await bed.send("medium")
    with anyio.fail_after(PATIENCE_S):
        while not (first := await bed.send("late", stream=stream)).tier_reason.endswith("; truncated"):
            assert first.status == 200, first.error
    assert (first.reason, first.is_degraded) == ("length", True)
    assert 0 < len(first.text) < len(uncut.text)
    assert uncut.text.startswith(first.text)
    whole = await bed.send("late", stream=not stream, critical="true")
    assert (whole.text, whole.reason, whole.is_degraded) == (uncut.text, uncut.reason, False)


# --- stale answers ----------------------------------------------------------------------------------------------------


async def test_a_stale_answer_precedes_an_error(
    tritons: tuple[Pool, Pool], redis_server: RedisServer, tmp_path: Path
) -> None:
    """Another question, and a critical one, get the error."""
    large, _ = tritons
    (tmp_path / "gateway.yaml").write_text(OLD.format(large=large.grpc, redis=redis_server.url))
    command = Command("serve", "--config", str(tmp_path / "gateway.yaml"))
    try:
        bed = Bed(*tritons, command.ready(), tmp_path)
        async with aiohttp.ClientSession() as bed.http:
            fresh = await bed.send("large")
            await control(large, load=False)
            with anyio.fail_after(PATIENCE_S):
                while not (old := await bed.send("large")).is_degraded:  # until it has expired
                    assert old.text == fresh.text
            assert (old.text, old.model) == (fresh.text, "large")
            assert old.tier_reason == "large=broken; stale"
            assert old.headers["x-causeway-cache"] == "stale"
            refused = [await bed.send("large", critical="true"), await bed.send("large", text="something else")]
            assert [(one.status, one.error) for one in refused] == [(503, refused[0].error)] * 2
            await control(large, load=True)
            await bed.until_answered("large", "requested")
        assert command.stop() == 0
    finally:
        command.process.kill()
