"""Shadow requests in a whole daemon: what is asked, what is not, and that no client pays for it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

pytest.importorskip("onnxruntime")

from causeway_server.edge_node.app import build
from causeway_server.edge_node.backends.backend import EngineWork
from causeway_server.edge_node.clock import Clock, system_clock
from causeway_server.edge_node.config.schema import CloudServer
from causeway_server.edge_node.storage.shadow import ShadowStore
from causeway_server.models.catalog.artifact import find_artifact
from causeway_server.models.signals.encoder import SentenceEncoder, Vector
from causeway_server.models.signals.pair import ModelIdentity, prompt_features
from causeway_server.models.signals.shadow import ShadowAnswer
from causeway_server.router.types import DeviceSignals
from causeway_train.calibrate.prompts import Pair
from causeway_train.calibrate.shadow import read_shadow_rows
from tests.edge_node.signals.test_calibrated_pair import publish
from tests.edge_node.storage.test_cache import every_byte
from tests.waiting import until

from ..device import POLICY, Answer, Device, config, running
from ..scripted import CLOUD_WORDS, EDGE_WORDS, ScriptedCloud, ScriptedEngine

pytestmark = pytest.mark.slow

SHADOW = POLICY + "shadow: {share: 1.0, usd_per_day: 1.0}\n"
EDGE, CLOUD = "".join(EDGE_WORDS), "".join(CLOUD_WORDS)
NOON = Clock(monotonic=system_clock().monotonic, unix=lambda: 1_780_000_000.0)


def metrics(text: str, name: str) -> dict[str, float]:
    """The values of a metric by its labels."""
    lines = [line for line in text.splitlines() if line.startswith(name)]
    return {line.rpartition(" ")[0].removeprefix(name): float(line.rpartition(" ")[2]) for line in lines}


async def results(device: Device) -> dict[str, float]:
    return metrics((await device.get("/metrics")).body.decode(), "causeway_edge_shadow_requests_total")


async def finished(device: Device, count: int = 1) -> Mapping[str, float]:
    """Wait for so many shadow requests, and return how often there was which result."""
    async with asyncio.timeout(60):
        while sum((found := await results(device)).values()) < count:  # noqa: ASYNC110 -- a counter has no event
            await asyncio.sleep(0.01)
    return found


def one(target: str, result: str) -> dict[str, float]:
    return {f'{{result="{result}",target="{target}"}}': 1.0}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_an_answer_of_the_device_is_followed_by_a_question_to_the_cloud(tmp_path: Path, stream: bool) -> None:
    """As bulk work that no cache keeps; its cost counts, the record names it, and no content is left."""
    async with running(tmp_path, policy=SHADOW) as device:
        answer = await device.ask("the secret question", stream=stream, max_tokens=50)
        assert answer.text == EDGE
        assert await finished(device) == one("large", "agreed")  # two of three words are the same
        (body,), (headers,) = device.cloud.bodies, device.cloud.request_headers
        assert body["messages"] == [{"role": "user", "content": "the secret question"}]
        assert (body.get("stream", False), body["max_tokens"]) == (False, 50)
        assert (headers["x-causeway-priority"], headers["cache-control"]) == ("bulk", "no-store")
        record = await device.record(answer)
        assert (record.shadow, record.outcome.target, record.outcome.usd) == ("large", "small", 0.0)
        assert device.parts.spend.current.usd_today == pytest.approx(0.01)
        page = (await device.get("/metrics")).body.decode()
        assert metrics(page, "causeway_edge_shadow_usd_today") == {"": pytest.approx(0.01)}
        assert metrics(page, "causeway_edge_cost_usd_total") == {'{target="large"}': pytest.approx(0.01)}
    assert b"secret question" not in every_byte(tmp_path / "state")
    assert b"says so" not in every_byte(tmp_path / "state")


async def test_an_answer_of_the_cloud_is_followed_by_a_question_to_the_device(tmp_path: Path) -> None:
    """With confidence, as a handoff would have it. After a handoff the device is asked for its whole answer."""
    async with running(tmp_path, policy=SHADOW) as device:
        answer = await device.ask(tags="cloud")
        assert await finished(device) == one("small", "agreed")
        (call,) = device.engine.calls
        assert (call.confidence_tokens, call.durable, call.request.max_tokens) == (24, False, 76)
        assert device.parts.engines is not None
        assert device.parts.engines.work == EngineWork(tokens=len(EDGE_WORDS))  # no client's, and yet they take energy
        assert (await device.record(answer)).shadow == "small"
        device.engine.score = 0.1
        handed_off = await device.ask(tags="handoff")
        assert handed_off.text == CLOUD
        await finished(device, 2)
        assert [call.confidence_tokens for call in device.engine.calls] == [24, 2, 2]


async def ask_embedding(device: Device) -> Answer:
    async with device.session.post("/v1/embeddings", json={"model": "auto", "input": "x"}) as response:
        return Answer(response.status, dict(response.headers), await response.read())


TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"x-causeway-tags": "private"}, {}),
        ({"x-causeway-prefer": "only_on_device"}, {}),
        ({"x-causeway-prefer": "only_cloud"}, {}),
        ({"x-causeway-tags": "edge"}, {}),  # its route has one side
        ({}, {"model": "small"}),
        ({}, {"tools": TOOLS}),
        ({}, {"n": 2}),
    ],
    ids=["private", "only_on_device", "only_cloud", "one side", "named", "tools", "two choices"],
)
async def test_requests_that_are_never_followed(tmp_path: Path, headers: dict[str, str], body: dict[str, Any]) -> None:
    """Neither by a request nor by a count; the next one, which may be, is."""
    async with running(tmp_path, policy=SHADOW) as device:
        answer = await device.ask(headers=headers, **body)
        assert answer.status == 200
        assert (await ask_embedding(device)).status == 200
        assert (await device.record(answer)).shadow == ""
        calls, bodies = len(device.engine.calls), len(device.cloud.bodies)
        await device.ask()
        assert await finished(device) == one("large", "agreed")
        assert (len(device.engine.calls), len(device.cloud.bodies)) == (calls + 1, bodies + 1)


async def test_the_share_is_drawn_and_an_answer_from_the_cache_is_not_followed(tmp_path: Path) -> None:
    async with running(tmp_path, policy=SHADOW.replace("share: 1.0", "share: 0.0000001")) as device:
        for _ in range(20):
            assert (await device.record(await device.ask())).shadow == ""
    async with running(tmp_path, policy=SHADOW) as device:
        await device.ask(temperature=0)
        await finished(device)
        hit = await device.ask(temperature=0)
        assert hit.headers["x-causeway-cache"] == "hit"
        assert (await device.record(hit)).shadow == ""


async def test_the_budget_of_a_day_holds_over_a_restart(tmp_path: Path) -> None:
    """A request that could exceed it is not sent; the next day it is."""
    tight = SHADOW.replace("usd_per_day: 1.0", "usd_per_day: 0.1")  # one costs 0.01, and at most 0.081
    async with running(tmp_path, policy=tight, clock=NOON) as device:
        for _ in range(3):
            await device.ask()
        assert await finished(device, 3) == {
            '{result="agreed",target="large"}': 2.0,
            '{result="over_budget",target="large"}': 1.0,
        }
        assert device.parts.spend.current.usd_today == pytest.approx(0.02)
    async with running(tmp_path, policy=tight, clock=NOON) as device:
        await device.ask()
        assert await finished(device) == one("large", "over_budget")
    tomorrow = Clock(monotonic=NOON.monotonic, unix=lambda: NOON.unix() + 86400)
    async with running(tmp_path, policy=tight, clock=tomorrow) as device:
        await device.ask()
        assert await finished(device) == one("large", "agreed")


async def test_the_device_is_not_asked_while_its_energy_has_a_price(tmp_path: Path) -> None:
    async with running(tmp_path, policy=SHADOW + "budget: {heat: {limit_c: 80}}\n") as device:
        signals = device.parts.signals
        for second in range(20):
            hot = DeviceSignals(temperature_c=81.0, power_w=9.0)
            signals.energy.sample(hot, EngineWork(), signals.clock.monotonic() + second)
        await device.ask(tags="cloud")
        assert await finished(device) == one("small", "over_budget")
        assert device.engine.calls == []


async def test_a_client_s_request_interrupts_one_on_the_device(tmp_path: Path) -> None:
    """It is asked again when the device is idle."""
    async with running(tmp_path, policy=SHADOW) as device:
        device.engine.gate = asyncio.Event()
        await device.ask(tags="cloud")
        await until(lambda: device.engine.running == 1)  # the shadow request
        asked = asyncio.ensure_future(device.ask(tags="edge"))
        await until(lambda: len(device.engine.calls) == 2 and device.engine.running == 1)
        assert device.parts.shadows.waiting == 1
        device.engine.gate.set()
        assert (await asked).text == EDGE
        assert await finished(device) == one("small", "agreed")
        assert len(device.engine.calls) == 3


@pytest.mark.parametrize("fault", ["refuse", "corrupt", "unfinished", "unavailable"])
async def test_a_shadow_request_that_fails_changes_nothing_for_clients(tmp_path: Path, fault: str) -> None:
    """Neither the circuit breaker nor the model's health, however often it fails."""
    async with running(tmp_path, policy=SHADOW) as device:
        if fault == "unavailable":
            device.cloud.status, device.cloud.headers = 503, {"Retry-After": "60"}
            device.cloud.error = {"message": "x", "type": "x", "code": "model_unavailable"}
        else:
            device.cloud.fault = fault  # type: ignore[assignment]
        for count in range(1, 8):
            assert (await device.ask()).text == EDGE
            assert await finished(device, count) == {'{result="failed",target="large"}': float(count)}
        assert device.parts.clouds.first is not None
        signals = device.parts.clouds.first.signals()
        assert (signals.breaker, signals.unavailable_models) == ("closed", ())
        device.cloud.fault, device.cloud.status = "none", 200
        assert (await device.ask(tags="cloud")).text == CLOUD


async def test_few_wait_and_a_drain_cancels_them(tmp_path: Path) -> None:
    async with running(tmp_path, policy=SHADOW) as device:
        device.cloud.gate = asyncio.Event()
        await device.ask()
        await until(lambda: device.cloud.running == 1)
        for _ in range(9):
            assert (await device.ask()).text == EDGE
        assert device.parts.shadows.waiting == 9
        assert await results(device) == one("large", "dropped")
        assert await device.app.drain() is True
        await until(lambda: device.cloud.running == 0 and device.parts.shadows.waiting == 0)
        page = device.parts.metrics.text().decode()
        assert metrics(page, "causeway_edge_shadow_requests_total") == {
            '{result="dropped",target="large"}': 9.0,
            '{result="interrupted",target="large"}': 1.0,
        }


PAIR = """
version: 1
name: pair
targets:
  small: {at: edge, model: assistant}
  large: {at: cloud, model: assistant-large, price: {input: 100, output: 100}}
routes:
  - {name: calibrated, use: [small, large], handoff: {after_tokens: 8, below: 0.6}}
shadow: {share: 1.0}
"""


async def remember(state: Path, sha256: str, *, agreed: int, count: int) -> None:
    """Leave shadow answers whose signals say 0.9; so many of them agreed."""
    store = ShadowStore(state, system_clock())
    await store.restore(0)
    for number in range(count):
        store.keep(
            ShadowAnswer(
                small=ModelIdentity("assistant", find_artifact("assistant").manifest.sha256),
                large="assistant-large",
                route="calibrated",
                encoder_sha256=find_artifact("encoder").manifest.sha256,
                inputs=b"",
                agreed=number * agreed // count != (number + 1) * agreed // count,
                signals_sha256=sha256,
                quality=0.9,
                score=0.9,
            )
        )
    await asyncio.to_thread(store.close)


async def test_signals_that_have_drifted_are_set_aside_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the log, by `/readyz`, as a metric, and among a decision's reasons; the model's own signals are used."""
    folder = publish(tmp_path)
    sha256 = find_artifact("pair", (folder,)).manifest.sha256
    await remember(tmp_path / "state", sha256, agreed=60, count=120)
    async with running(tmp_path, policy=PAIR, model_dirs=(str(folder),)) as device:
        await until(lambda: "set aside" in caplog.text)
        problems = (await device.get("/readyz")).json["problems"]
        assert "The calibrated signals of assistant are set aside: over 120 shadow answers" in problems[0]
        page = (await device.get("/metrics")).body.decode()
        assert metrics(page, "causeway_edge_calibration_set_aside") == {'{model="assistant"}': 1.0}
        labels = '{model="assistant",signal="confidence"}'
        assert metrics(page, "causeway_edge_calibration_error")[labels] == pytest.approx(0.4)
        assert metrics(page, "causeway_edge_calibration_drift")[labels] == pytest.approx(0.4 - 0.022, abs=0.002)
        decision = (await device.record(await device.ask())).decision
        assert decision is not None
        assert [reason.code for reason in decision.reasons] == ["rule_held", "calibration_set_aside"]
        assert device.parts.signals.snapshot(device.parts.policies.active).uncalibrated == {"small"}


@pytest.mark.parametrize(("agreed", "count"), [(45, 50), (20, 50), (105, 120)])
async def test_signals_that_are_true_or_have_few_answers_stay(tmp_path: Path, agreed: int, count: int) -> None:
    folder = publish(tmp_path)
    sha256 = find_artifact("pair", (folder,)).manifest.sha256
    await remember(tmp_path / "state", sha256, agreed=agreed, count=count)
    async with running(tmp_path, policy=PAIR, model_dirs=(str(folder),)) as device:
        await device.ask()
        await finished(device)  # what was kept has been read before
        assert (await device.get("/readyz")).json["problems"] == []
        page = (await device.get("/metrics")).body.decode()
        assert metrics(page, "causeway_edge_calibration_set_aside") == {'{model="assistant"}': 0.0}
        assert "causeway_edge_calibration_error" in page


@pytest.mark.engine
async def test_the_engine_s_own_confidence_is_kept(tmp_path: Path) -> None:
    """Of a whole short answer: the end is part of it, and the score is the engine's."""
    cloud = await ScriptedCloud().start()
    settings = config(tmp_path, policy=PAIR.replace("after_tokens: 8, below: 0.6", "after_tokens: 64, below: 0.01"))
    app = build(msgspec.structs.replace(settings, clouds={"main": CloudServer(url=cloud.url)}), environ={})
    await app.start()
    try:
        engines = app.parts.engines
        assert engines is not None
        await until(lambda: engines.state == "ready")
        async with aiohttp.ClientSession(f"http://127.0.0.1:{app.port}") as session:
            device = Device(app, ScriptedEngine(), cloud, session)
            assert (await device.ask("wake me up at six am")).headers["x-causeway-target"] == "small"
            assert await finished(device) == one("large", "disagreed")
    finally:
        await app.close()
        await cloud.stop()
    pair = Pair(
        ModelIdentity("assistant", find_artifact("assistant").manifest.sha256), ModelIdentity("assistant-large")
    )
    rows, after = read_shadow_rows(tmp_path / "state", pair, find_artifact("encoder").manifest.sha256)
    (row,), (inputs,) = rows.answers, rows.inputs
    confidence = row.confidences[0]
    assert (after, row.task, row.small, row.large, row.confidences_end) == (64, "calibrated", 0.0, 1.0, True)
    assert confidence.tokens > 5
    assert confidence.score == pytest.approx((1 - confidence.refusal) * math.exp(confidence.logprob))
    assert inputs.tolist() == pytest.approx(prompt_features("wake me up at six am", encode), abs=1e-5)


def encode(text: str) -> Vector:
    return SentenceEncoder(find_artifact("encoder").path)(text)
