"""Ready means able: READY, the ready line and /readyz come once a target can answer, and say what is missing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
import pytest

from causeway_server.edge_node.app import build
from causeway_server.models.catalog.artifact import ArtifactNotFound
from tests.waiting import until

from ..device import POLICY, Device, config
from ..scripted import ScriptedCloud, ScriptedEngine
from ..test_app import Systemd


class Loading(ScriptedEngine):
    """Loads until `loaded` is set; answers wait for it, as a real engine's do."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.state = "starting"

    async def start(self) -> None:
        self.state = "starting"

    def finish_loading(self) -> None:
        self.state = "ready"
        assert self.gate is not None
        self.gate.set()


@asynccontextmanager
async def starting(
    tmp_path: Path, make_engine: Callable[[str], ScriptedEngine], *, cloud: str = "", enabled: bool = True
) -> AsyncIterator[tuple[Device, Systemd]]:
    settings = config(tmp_path, policy=POLICY, cloud=cloud)
    settings = msgspec.structs.replace(settings, engine=msgspec.structs.replace(settings.engine, enabled=enabled))
    systemd = Systemd(tmp_path / "notify")
    app = build(settings, make_engine=make_engine, environ=systemd.environ)
    await app.start()
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{app.port}") as session:
            yield Device(app, ScriptedEngine(), ScriptedCloud(), session), systemd
    finally:
        await app.close()
        systemd.close()


def told_ready(systemd: Systemd) -> bool:
    return any(message.startswith("READY=1") for message in systemd.listen())


async def test_ready_comes_after_the_engine_is_loaded(tmp_path: Path) -> None:
    engine = Loading()
    async with starting(tmp_path, lambda _: engine) as (device, systemd):
        await until(lambda: systemd.listen().count("WATCHDOG=1") >= 3)
        assert not told_ready(systemd)
        readiness = await device.get("/readyz")
        assert readiness.status == 503
        assert readiness.json["waiting_for"] == ["target small"]  # no cloud is configured: nothing to wait for
        engine.finish_loading()
        await until(lambda: told_ready(systemd))
        assert (await device.get("/readyz")).status == 200


async def test_a_configured_cloud_is_enough_to_be_ready(tmp_path: Path) -> None:
    """Reachable or not: a device that boots without a network has started."""
    async with starting(tmp_path, lambda _: Loading(), cloud="http://127.0.0.1:9/v1") as (_, systemd):
        await until(lambda: told_ready(systemd))


async def test_a_question_in_the_first_second_waits_for_the_engine(tmp_path: Path) -> None:
    """No cloud is configured, so none is tried, and the answer is not second choice."""
    engine = Loading()
    async with starting(tmp_path, lambda _: engine) as (device, _):
        asking = asyncio.ensure_future(device.ask(tags="cloud"))  # the route's order is large, small
        await until(lambda: engine.running == 1)
        engine.finish_loading()
        answer = await asking
        assert (answer.status, answer.headers["x-causeway-reason"]) == (200, "cloud-first")
        assert answer.headers["x-causeway-degraded"] == "false"
        assert [attempt.target for attempt in (await device.record(answer)).outcome.attempts] == ["small"]


async def test_a_cloud_that_is_not_configured_is_not_called_unreachable(tmp_path: Path) -> None:
    async with starting(tmp_path, lambda _: ScriptedEngine()) as (device, _):
        answer = await device.ask(headers={"x-causeway-prefer": "only_cloud"})
        assert (answer.status, answer.code) == (503, "no_route")
        assert "large (target_absent: no cloud is configured)" in answer.message


@pytest.mark.parametrize("broken", ["missing", "failed"])
async def test_a_model_that_this_device_does_not_have_is_a_problem_until_the_policy_changes(
    tmp_path: Path, broken: str
) -> None:
    """No model on the disk, or one that cannot be loaded."""

    def make(model: str) -> ScriptedEngine:
        if model == "m-other":
            return ScriptedEngine()
        if broken == "missing":
            raise ArtifactNotFound(f"no model named {model!r}")
        engine = Loading()
        engine.problem = "not a GGUF file"
        return engine

    async with starting(tmp_path, make) as (device, systemd):
        expected = "no model named 'm-small'" if broken == "missing" else "not a GGUF file"
        readiness = await device.get("/readyz")
        assert (readiness.status, readiness.json["problems"]) == (503, [expected])
        assert not told_ready(systemd)
        (tmp_path / "policy.yaml").write_text(POLICY.replace("m-small", "m-other"))
        await device.parts.policies.reload()
        await until(lambda: told_ready(systemd))
        assert (await device.get("/readyz")).json["problems"] == []
