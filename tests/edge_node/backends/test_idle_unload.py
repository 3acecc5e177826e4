"""A model without requests leaves memory, and the next request loads it: real engine children of a real daemon."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import psutil
import pytest

from causeway_server.edge_node.app import build
from causeway_server.edge_node.backends.engine.backend import EngineBackend, EngineModel
from causeway_server.edge_node.cli.doctor.policy_and_models import check_unloading
from causeway_server.edge_node.config.schema import EngineConfig
from causeway_server.router.types import Request
from tests.models.llama_cpp.tiny_gguf import write_tiny_gguf
from tests.waiting import until

from ..device import POLICY, Device, config
from ..scripted import ScriptedCloud, ScriptedEngine

pytestmark = [pytest.mark.engine, pytest.mark.slow]
ON_DEVICE = {"x-causeway-prefer": "only_on_device"}


@asynccontextmanager
async def idle_device(tmp_path: Path) -> AsyncIterator[tuple[Device, EngineBackend]]:
    """A device without a cloud, whose model was unloaded."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    engine = EngineBackend(path, EngineConfig(threads=1, sequences=4, unload_after_s=0.3), EngineModel(name="m-small"))
    policy = POLICY.replace("20s", "60s").replace("25s", "60s")
    app = build(config(tmp_path, policy=policy), make_engine=lambda _: engine, environ={})
    await app.start()
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{app.port}") as session:
            await until(lambda: engine.state == "unloaded")
            yield Device(app, ScriptedEngine(), ScriptedCloud(), session), engine
    finally:
        await app.close()


def children() -> list[psutil.Process]:
    """Engine children of this process that have not ended."""
    return [child for child in psutil.Process(os.getpid()).children() if is_engine(child)]


def is_engine(child: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):  # it has just ended
        return any("llama_cpp.process.child" in word for word in child.cmdline())
    return False


async def test_an_idle_model_leaves_memory_and_the_next_request_loads_it(tmp_path: Path) -> None:
    async with idle_device(tmp_path) as (device, engine):
        await until(lambda: not children())
        assert engine.pid is None
        readiness = await device.get("/readyz")
        assert (readiness.status, readiness.json["edge"], readiness.json["problems"]) == (200, "unloaded", [])
        metrics = (await device.get("/metrics")).body.decode()
        assert 'causeway_edge_engine_unloaded{model="m-small"} 1.0' in metrics
        assert 'causeway_edge_engine_unloads_total{model="m-small"} 1.0' in metrics
        for number in (1, 2):
            answer = await device.ask(f"hello {number}", headers=ON_DEVICE, max_tokens=4)
            assert answer.status == 200, answer.message
            await until(lambda: engine.state == "unloaded")
        assert engine.restarts == 0
        assert engine.unloads >= 3
        device.assert_nothing_leaks()


async def test_requests_together_load_one_child(tmp_path: Path) -> None:
    async with idle_device(tmp_path) as (device, _):
        answers = await asyncio.gather(*(device.ask(f"hello {n}", headers=ON_DEVICE, max_tokens=4) for n in range(4)))
        assert [answer.status for answer in answers] == [200] * 4
        assert len(children()) <= 1


async def test_counting_a_prompt_loads_it(tmp_path: Path) -> None:
    """A route that needs the count would pass the model by for ever otherwise; a signal says that it can answer."""
    async with idle_device(tmp_path) as (_, engine):
        assert engine.signals().loaded
        assert await engine.count(Request(kind="completion", model="auto", prompts=("hello world",))) == 2
        await until(lambda: engine.state == "unloaded")


async def test_a_request_whose_deadline_is_earlier_gets_503_and_when_to_come_back(tmp_path: Path) -> None:
    """The load hangs: the model's file is a pipe that nobody writes to."""
    async with idle_device(tmp_path) as (device, engine):
        (tmp_path / "tiny.gguf").unlink()
        os.mkfifo(tmp_path / "tiny.gguf")
        late = await device.ask(headers={**ON_DEVICE, "x-causeway-deadline-ms": "300"})
        assert late.status == 503, late.message
        assert int(late.headers["Retry-After"]) >= 1
        assert "still reloading" in late.message
        assert engine.state == "reloading"
        device.assert_nothing_leaks()


async def test_a_model_that_cannot_be_loaded_again_fails_at_once(tmp_path: Path) -> None:
    async with idle_device(tmp_path) as (device, engine):
        (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
        answer = await device.ask(headers=ON_DEVICE)
        assert answer.status == 503
        assert "GGUF" in answer.message
        await until(lambda: engine.state != "reloading")
        assert any("m-small" in problem for problem in (await device.get("/readyz")).json["problems"])


def test_doctor_says_when_models_leave_memory() -> None:
    assert not list(check_unloading(EngineConfig()))
    assert [finding.level for finding in check_unloading(EngineConfig(unload_after_s=600.0))] == ["ok"]
    assert [finding.level for finding in check_unloading(EngineConfig(unload_after_s=5.0))] == ["warn"]
