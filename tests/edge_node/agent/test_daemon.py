"""A real daemon on real sockets takes bundles of a real signed fleet; inspections run in a real child process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from causeway_server.edge_node.agent.interfaces import AgentSettings, FleetLink
from causeway_server.edge_node.agent.source import FolderSource
from causeway_server.edge_node.agent.trial import TrialSettings
from causeway_server.edge_node.app import App, build
from causeway_server.edge_node.storage.decisions import read_stored
from causeway_server.router.bundle.protocol import DeviceState

from ..device import config
from ..scripted import ScriptedEngine
from .fleet import FACTORY, Publisher, member

pytestmark = pytest.mark.slow

# The latency of a busy machine is not judged; test_trial has that.
TRIAL = TrialSettings(least_s=0.1, least_requests=5, longest_s=3600.0, poll_s=0.05, latency_margin=1.0)


@asynccontextmanager
async def daemon(tmp_path: Path, publisher: Publisher, engine: ScriptedEngine) -> AsyncIterator[App]:
    settings = config(tmp_path / "device", policy=FACTORY)
    (Path(settings.state_dir) / "fleet").mkdir(parents=True, exist_ok=True)
    link = FleetLink(
        member=lambda: member(publisher.root),
        source=FolderSource(publisher.folder),
        settings=AgentSettings(check_interval_s=0.2, retry_s=0.2, trial=TRIAL),
    )
    app = build(settings, make_engine=lambda _: engine, environ={}, fleet=link)
    await app.start()
    try:
        yield app
    finally:
        await app.close()


async def ask(app: App) -> tuple[int, str]:
    """Return the status of an answer, and the policy that routed it."""
    body = {"model": "auto", "messages": [{"role": "user", "content": "hello"}]}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://127.0.0.1:{app.port}/v1/chat/completions", json=body) as response,
    ):
        await response.read()
        return response.status, response.headers.get("x-causeway-policy", "").partition("@")[0]


async def wait_for(app: App, state: DeviceState, running: str | None) -> None:
    agent = app.agent
    assert agent is not None
    async with asyncio.timeout(120.0):
        while (agent.state, agent.running) != (state, running):  # noqa: ASYNC110 -- nothing tells of both
            await asyncio.sleep(0.02)


async def test_a_policy_is_taken_while_requests_are_answered(tmp_path: Path, publisher: Publisher) -> None:
    async with daemon(tmp_path, publisher, ScriptedEngine()) as app:
        assert await ask(app) == (200, "kiosk-0")
        bundle = publisher.release()
        await wait_for(app, DeviceState.TRIAL, bundle)
        for _ in range(6):
            assert await ask(app) == (200, "kiosk-1")
        await wait_for(app, DeviceState.IDLE, bundle)
    async with daemon(tmp_path, publisher, ScriptedEngine()) as app:
        assert await ask(app) == (200, "kiosk-1")


async def test_no_request_and_no_decision_is_lost_over_a_change(tmp_path: Path, publisher: Publisher) -> None:
    """Three users ask all the time while a policy is taken, tried, and taken back."""
    async with daemon(tmp_path, publisher, ScriptedEngine()) as app:
        first = publisher.release()
        await wait_for(app, DeviceState.TRIAL, first)
        for _ in range(6):
            await ask(app)
        await wait_for(app, DeviceState.IDLE, first)
        answers: list[tuple[int, str]] = []
        done = asyncio.Event()

        async def user() -> None:
            while not done.is_set():
                answers.append(await ask(app))
                await asyncio.sleep(0.02)

        before = app.parts.metrics.traffic().requests
        async with asyncio.TaskGroup() as users:
            for _ in range(3):
                users.create_task(user())
            second = publisher.release()
            await wait_for(app, DeviceState.IDLE, second)
            publisher.assign(second, from_bundle=first, share=0)
            await wait_for(app, DeviceState.IDLE, first)
            done.set()
        assert {status for status, _ in answers} == {200}
        assert {policy for _, policy in answers} == {"kiosk-1", "kiosk-2"}
        assert app.parts.metrics.traffic().requests - before == len(answers)
    stored = list(read_stored(tmp_path / "device" / "state").records)
    assert len(stored) == before + len(answers)


async def test_a_policy_that_breaks_answers_is_undone_by_itself(tmp_path: Path, publisher: Publisher) -> None:
    """It passes every check: its target names a model that this device's engine cannot run."""
    engine = ScriptedEngine()
    async with daemon(tmp_path, publisher, engine) as app:
        for _ in range(25):
            assert await ask(app) == (200, "kiosk-0")
        bundle = publisher.release()
        await wait_for(app, DeviceState.TRIAL, bundle)
        engine.fault = "refuse"
        answers = [await ask(app) for _ in range(4)]
        engine.fault = "none"
        assert [status for status, _ in answers] == [503] * 4
        await wait_for(app, DeviceState.IDLE, None)
        agent = app.agent
        assert agent is not None
        assert agent.row.code == "errors_rose"
        assert list(agent.row.quarantined) == [bundle]
        assert await ask(app) == (200, "kiosk-0")
