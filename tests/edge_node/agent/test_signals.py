"""Bundles with learned signals: fitted on the new weights, used with them, gone with them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from causeway_server.edge_node.backends.backend import BackendRequest
from causeway_server.edge_node.signals.estimators import LearnedEstimators
from causeway_server.models.catalog.artifact import SHIPPED, sha256_of
from causeway_server.router.bundle.protocol import DeviceState
from causeway_server.router.policy.compiled import parse_policy
from causeway_server.router.types import Chunk, Confidence, Message, Request
from tests.models.llama_cpp.tiny_gguf import write_tiny_gguf

from .fleet import Publisher, TestDevice

pytestmark = pytest.mark.slow

POLICY = """\
version: 1
name: unsure
targets:
  small: {at: edge, model: m-small, can: [chat, completion, embedding]}
  large: {at: cloud, model: m-large}
routes:
  - {name: doubtful, when: edge.quality < 0.2, use: [large]}
  - {name: device, use: [small, large], handoff: {after_tokens: 8, below: 0.5}}
"""
CASES = """\
policy: ../kiosk.yaml
cases:
  - {name: the device answers, expect: {route: device}}
"""
CONFIDENCE = Confidence(8, 0.5, -0.3, 0.6, 1.0)


def release(publisher: Publisher, *, number: int = 1, uncalibrated: bool = False, files: Mapping[str, str] = {}) -> str:
    """Release new weights, with the signals that ship as if they were fitted on them, unless `files` name others."""
    weights = publisher.path / f"model-{number}.gguf"
    write_tiny_gguf(weights, seed=number)
    (publisher.path / "policies" / "cases" / "kiosk.yaml").write_text(CASES)
    for name, file in (("edge-quality", "model.onnx"), ("calibrator", "model.json")):
        shutil.copy(SHIPPED / name / file, publisher.path / f"{name}{Path(file).suffix}")
    fitted = f"model_sha256: {sha256_of(weights)}"
    named = {"confidence": "calibrator.json", "edge.quality": "edge-quality.onnx", **files}
    signals = ", ".join(f"{kind}: {{file: {file}, {fitted}}}" for kind, file in named.items())
    keys = "uncalibrated: true" if uncalibrated else f"signals: {{{signals}}}"
    extra = f"    leaving: report\n    models:\n      m-small: {{file: {weights.name}, {keys}}}\n"
    return publisher.release(policy=POLICY, extra=extra)


def estimates(device: TestDevice, bundle: str) -> tuple[float | None, float]:
    """Return `edge.quality` and the score that a handoff compares, as the daemon computes them under this bundle."""
    policy = parse_policy(POLICY)
    learned = LearnedEstimators([device.booted.store.load(bundle).models])
    learned.activate(policy)
    request = Request(kind="chat", model="auto", messages=(Message("user", "wake me up at seven"),))
    quality = learned.quality(policy, request)
    call = BackendRequest("d-1", request, policy.targets[0], 60.0, confidence_tokens=8)
    chunk = learned.calibrate(call, Chunk("", confidence=CONFIDENCE), quality)
    assert chunk.confidence is not None
    return quality, chunk.confidence.score


async def test_new_weights_bring_the_signals_that_were_fitted_on_them(publisher: Publisher, device: TestDevice) -> None:
    """Without them the rule on `edge.quality` does not hold, and the handoff compares the engine's raw score."""
    bundle = release(publisher)
    await device.change()
    quality, score = estimates(device, bundle)
    assert quality is not None
    assert 0.0 < quality < 1.0
    assert score != CONFIDENCE.score
    bare = release(publisher, number=2, uncalibrated=True)
    await device.change()
    assert estimates(device, bare) == (None, CONFIDENCE.score)


@pytest.mark.parametrize("kind", ["confidence", "edge.quality", "pair"])
async def test_a_signal_that_cannot_be_used_is_refused_and_the_last_bundle_stays(
    publisher: Publisher, device: TestDevice, kind: str
) -> None:
    good = release(publisher)
    await device.change()
    (publisher.path / "broken").write_bytes(b"{}")
    bad = release(publisher, number=2, files={kind: "broken"})
    await device.until(DeviceState.IDLE)
    assert (device.agent.running, device.agent.row.code) == (good, "model_unusable")
    assert device.agent.row.quarantined[bad].startswith(
        f"model_unusable: The signal {kind} of m-small cannot be used: "
    )


async def test_a_damaged_signal_is_seen_at_the_start(publisher: Publisher, device: TestDevice) -> None:
    good = publisher.release()
    await device.change()
    bundle = release(publisher)
    await device.change()
    manifest = device.booted.store.load(bundle).models / "m-small+confidence" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"judges_sha256":"', b'"judges_sha256":"0'))
    device.start()
    assert (device.agent.running, device.agent.row.code) == (good, "bundle_altered")


async def test_a_bundle_without_signals_still_activates(publisher: Publisher, device: TestDevice) -> None:
    """It has the format of before, which older daemons read too."""
    bundle = publisher.release()
    assert publisher.manifest().format == 1
    await device.change()
    release(publisher)
    assert publisher.manifest().format == 2
    assert device.agent.running == bundle
