"""Refits in a whole daemon: fitted while it is idle, shown in records, ended by an alarm, off unless a policy asks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("onnxruntime")

from click.testing import CliRunner

from causeway_server.edge_node.cli.main import main
from causeway_server.models.catalog.artifact import find_artifact
from causeway_server.models.signals.calibration import REFITS_FILE as FILE
from causeway_server.models.signals.calibration import Correction, Refit, read_refits
from causeway_server.router.types import Confidence, DeviceSignals, PromiseSignals
from tests.edge_node.signals.test_calibrated_pair import publish
from tests.edge_node.signals.test_corrections import golden
from tests.waiting import until

from ..device import Answer, Device, running
from .test_promise import OTHER_WORDS, ask
from .test_shadow import PAIR, finished, metrics, remember

pytestmark = pytest.mark.slow

REFIT = PAIR.replace("{share: 1.0}", "{share: 1.0, refit: true, max_drift: 0.15}")
PROMISED = PAIR.replace(
    "below: 0.6}}", "below: 0.1}, promise: {of: large, keep: 0.9, tolerance: 0.05, shadow: 1.0}}"
).replace("{share: 1.0}", "{share: 0.000001, usd_per_day: 1000, refit: true}")


def signals(folder: Path) -> tuple[str, ...]:
    """The folder of a pair that states the engine's score, with golden answers of which 70 % are good."""
    return (str(publish(folder, golden=tuple(golden(0.7)))),)


def digest(folders: tuple[str, ...]) -> str:
    return find_artifact("pair", tuple(map(Path, folders))).manifest.sha256


async def confidence(device: Device, answer: Answer) -> Confidence:
    found = (await device.record(answer)).outcome.attempts[0].confidence
    assert found is not None
    return found


def state_of(device: Device) -> PromiseSignals:
    return device.parts.signals.snapshot(device.parts.policies.active).promises["calibrated"]


async def asked_until(device: Device, holds: Callable[[], bool]) -> None:
    for _ in range(400):
        if holds():
            return
        await ask(device)
    raise AssertionError(state_of(device))


async def test_an_idle_device_refits_and_its_records_and_pages_say_so(tmp_path: Path) -> None:
    """Of 400 answers for which the signals state 0.9, 70 % are good. Signals that had drifted are used again."""
    folders, state = signals(tmp_path), tmp_path / "state"
    await remember(state, digest(folders), agreed=280, count=400)
    async with running(tmp_path, policy=REFIT, model_dirs=folders) as device:
        assert (await device.ask()).status == 200  # the signals drifted, and the engine's own score was compared
        await until((state / FILE).exists)
        page = (await device.get("/metrics")).body.decode()
        assert metrics(page, "causeway_edge_refits_total") == {'{model="assistant",result="adopted"}': 1.0}
        assert metrics(page, "causeway_edge_refit_labels") == {'{model="assistant"}': pytest.approx(400, abs=1)}
        assert metrics(page, "causeway_edge_calibration_set_aside") == {'{model="assistant"}': 0.0}
        kept = await confidence(device, await device.ask())
        (refit,) = read_refits(state)
        assert (kept.calibration, kept.shipped) == (refit.name, pytest.approx(0.9))
        assert kept.score == pytest.approx(0.7, abs=0.04)
        assert (await device.get("/readyz")).json["problems"] == []
    async with running(tmp_path, policy=REFIT, model_dirs=folders) as device:
        await device.ask()
        await finished(device)
        assert (await confidence(device, await device.ask())).calibration == refit.name
    (tmp_path / "policy.yaml").write_text(REFIT)
    (tmp_path / "edge.yaml").write_text(
        f"policy: {tmp_path}/policy.yaml\nengine: {{model_dirs: [{', '.join(map(str, folders))}]}}\n"
    )
    doctor = ["doctor", "--state-dir", str(state), "--format", "json"]
    shown = CliRunner().invoke(main, [*doctor, "--config", str(tmp_path / "edge.yaml")]).output
    assert f"are corrected: {refit.name}" in shown
    shown = CliRunner().invoke(main, doctor).output
    assert f"have a refit that the policy does not use: {refit.name}" in shown
    shown = CliRunner().invoke(main, ["doctor", "--state-dir", str(state), "--format", "json", "--drop-refits"]).output
    assert (refit.name in shown, (state / FILE).exists()) == (False, False)
    (state / FILE).mkdir()
    refused = CliRunner().invoke(main, ["doctor", "--state-dir", str(state), "--drop-refits"])
    assert (refused.exit_code, "Delete it yourself" in refused.output) == (2, True)


@pytest.mark.parametrize("policy", [PAIR, REFIT], ids=["off", "few-labels"])
async def test_without_the_key_or_labels_nothing_is_fitted(tmp_path: Path, policy: str) -> None:
    folders = signals(tmp_path)
    await remember(tmp_path / "state", digest(folders), agreed=126, count=140)
    async with running(tmp_path, policy=policy, model_dirs=folders) as device:
        await device.ask()
        await finished(device)
        page = (await device.get("/metrics")).body.decode()
        assert metrics(page, "causeway_edge_refits_total") == {}
        kept = await confidence(device, await device.ask())
        assert (kept.calibration, kept.shipped, kept.score) == ("", None, pytest.approx(0.9))
    assert not (tmp_path / "state" / FILE).exists()


@pytest.mark.parametrize("device_is", [DeviceSignals(throttled=True), DeviceSignals(battery=0.2, discharging=True)])
async def test_a_hot_or_empty_device_does_not_refit(tmp_path: Path, device_is: DeviceSignals) -> None:
    folders, state = signals(tmp_path), tmp_path / "state"
    await remember(state, digest(folders), agreed=280, count=400)
    async with running(tmp_path, policy=REFIT, model_dirs=folders) as device:
        device.parts.shadows.read_device = lambda: device_is
        await device.ask()
        await finished(device)
        assert not (state / FILE).exists()
        device.parts.shadows.read_device = DeviceSignals
        await device.ask()
        await until((state / FILE).exists)


async def test_a_busy_device_does_not_refit(tmp_path: Path) -> None:
    """A request that runs in the cloud holds it up, until it ends. Signals that drifted would go to the cloud, too."""
    folders, state = signals(tmp_path), tmp_path / "state"
    await remember(state, digest(folders), agreed=139, count=199)
    async with running(tmp_path, policy=REFIT.replace("0.15", "0.5"), model_dirs=folders) as device:
        device.cloud.gate = asyncio.Event()
        held = asyncio.create_task(device.ask(model="large"))
        await until(lambda: device.cloud.running == 1)
        gate, device.cloud.gate = device.cloud.gate, None
        await device.ask()
        await finished(device)
        assert device.parts.admission.running == 1
        assert not (state / FILE).exists()
        gate.set()
        await held
        await until((state / FILE).exists)


async def test_an_alarm_of_a_promise_ends_the_trial(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folders, state = signals(tmp_path), tmp_path / "state"
    refit = Refit(digest(folders), 3, 1_780_000_000.0, 600, 0.1, Correction(), Correction(1.0, 0.2))
    state.mkdir()
    (state / FILE).write_bytes(msgspec.json.encode([refit]))
    async with running(tmp_path, policy=PROMISED, model_dirs=folders) as device:
        device.parts.shadows.rng = random.Random(1)
        await asked_until(device, lambda: state_of(device).threshold is not None)
        assert (await confidence(device, await device.ask())).calibration == "refit 3 of 2026-05-28T20:26Z"
        device.cloud.words = OTHER_WORDS
        await asked_until(device, lambda: state_of(device).threshold is None)
        assert (
            "The calibration of assistant is again the one that was shipped: a promise raised an alarm." in caplog.text
        )
        assert not (state / FILE).exists()
        assert device.parts.learned.refits == {}
