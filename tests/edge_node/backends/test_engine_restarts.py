"""Restarts of a real engine child: the pause between two of them, and what a request gets meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from causeway_server.edge_node.app import build
from causeway_server.edge_node.backends.engine.backend import EngineBackend, EngineModel
from causeway_server.edge_node.backends.engine.supervisor import RestartBackoff
from causeway_server.edge_node.config.schema import EngineConfig, ServerConfig
from tests.models.llama_cpp import scripted_drafts
from tests.models.llama_cpp.tiny_gguf import write_tiny_gguf
from tests.waiting import until

from ..device import POLICY, Answer, Device, config
from ..scripted import ScriptedCloud, ScriptedEngine

pytestmark = pytest.mark.engine
ON_DEVICE = {"x-causeway-prefer": "only_on_device"}


@asynccontextmanager
async def real_engine(tmp_path: Path, backoff: RestartBackoff) -> AsyncIterator[tuple[Device, EngineBackend]]:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    # Sampled, the answer of a tiny random model may be empty, or end before it is cancelled.
    model = EngineModel(temperature=0.0, name="m-small")
    engine = EngineBackend(path, EngineConfig(threads=1, sequences=4), model, backoff=backoff)
    policy = POLICY.replace("20s", "60s").replace("25s", "60s")
    server = ServerConfig(port=0, drain_s=1.0, default_deadline_s=60.0)
    app = build(config(tmp_path, policy=policy, server=server), make_engine=lambda _: engine, environ={})
    await app.start()
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{app.port}") as session:
            yield Device(app, ScriptedEngine(), ScriptedCloud(), session), engine
    finally:
        await app.close()


async def kill(engine: EngineBackend) -> None:
    """Kill the child, and wait until the daemon has noticed."""
    await engine.ready(asyncio.get_running_loop().time() + 60.0)
    assert engine.pid is not None
    restarts = engine.restarts
    os.kill(engine.pid, signal.SIGKILL)
    await until(lambda: engine.restarts > restarts)


async def test_a_request_does_not_wait_for_a_distant_restart(tmp_path: Path) -> None:
    """It is refused at once with 503, and Retry-After says when the engine is restarted."""
    async with real_engine(tmp_path, RestartBackoff(first_s=50.0)) as (device, engine):
        await kill(engine)
        answer = await device.ask(headers=ON_DEVICE)
        assert (answer.status, engine.state) == (503, "backing_off")
        assert 1 < int(answer.headers["Retry-After"]) <= 50
        assert "SIGKILL" in answer.message
        assert "it is restarted in 50.0 s" in answer.message


async def test_a_request_waits_for_a_restart_that_begins_soon(tmp_path: Path) -> None:
    """The pause does not grow while each child is healthy before it is killed."""
    async with real_engine(tmp_path, RestartBackoff(first_s=0.6, healthy_s=0.0)) as (device, engine):
        for killed in (1, 2, 3):
            await kill(engine)
            answer = await device.ask(headers=ON_DEVICE, max_tokens=4)
            assert (answer.status, engine.restarts) == (200, killed)


def test_the_pause_doubles_and_a_period_of_health_resets_it() -> None:
    """Ten kills in a row make it long; a child that was healthy makes it short again."""
    backoff = RestartBackoff()
    pauses = [backoff.pause_s(ready_s=0.5) for _ in range(10)]
    assert pauses[:4] == [0.1, 0.2, 0.4, 0.8]
    assert pauses[-1] == 30.0
    assert backoff.pause_s(ready_s=5.0) == 0.1
    assert [backoff.pause_s(ready_s=6.0) for _ in range(10)] == [0.1] * 10
    assert backoff.pause_s(ready_s=0.0) == 0.2


@pytest.mark.slow
async def test_a_child_killed_amid_a_speculated_answer_repeats_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client has every token up to the cut and an error; the next request gets the whole answer."""
    scripted_drafts.install(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    # Greedy, so that the text repeats; another seed is another entry of the cache. The bias: no end before the limit.
    question: dict[str, Any] = {
        "temperature": 0,
        "max_tokens": 300,
        "logprobs": True,
        "logit_bias": {"1": -100},
        "stream": True,
    }
    text = "turn on the light in the kitchen and set the alarm for six " * 3
    async with real_engine(tmp_path, RestartBackoff(first_s=0.1)) as (device, engine):
        whole = await device.ask(text, headers=ON_DEVICE, seed=1, **question)
        assert (whole.status, whole.done) == (200, True)
        (tmp_path / "stop").touch()
        asking = asyncio.create_task(device.ask(text, headers=ON_DEVICE, seed=2, **question))
        await until((tmp_path / "stopped").exists)
        left = int((tmp_path / "stopped").read_text())
        (tmp_path / "stop").unlink()
        await kill(engine)
        cut = await asking
        assert (cut.done, cut.events[-1]["error"]["code"]) == (False, "engine_crashed")
        got, expected = tokens_of(cut), tokens_of(whole)
        assert got == expected[: len(got)]
        # The first bytes of a character are held back until its last one.
        assert 0 <= 300 - left - len(got) <= 3
        assert len(got) > scripted_drafts.ENOUGH
        again = await device.ask(text, headers=ON_DEVICE, seed=3, **question)
        assert (again.text, again.done) == (whole.text, True)


def tokens_of(answer: Answer) -> list[object]:
    choices = [choice for event in answer.events for choice in event.get("choices", ())]
    return [entry["bytes"] for choice in choices for entry in (choice.get("logprobs") or {"content": ()})["content"]]
