"""`best_of` in a daemon: the order of each request, its record and explanation, and every fallback."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

pytest.importorskip("onnxruntime")

from causeway_server.models.catalog.artifact import find_signal
from causeway_server.models.signals.calibration import LinearLogit
from causeway_server.models.signals.candidates import CandidateModel, CandidateParameters, Logistic
from causeway_server.models.signals.pair import ModelIdentity
from causeway_server.models.signals.structure import STRUCTURE, structure
from causeway_train.publish_signal import SignalMetadata, publish_signal

from ..device import POLICY, Device, running

BEST = POLICY.replace(
    "use: [small, large]\ncache", "use: {best_of: [small, large], weights: {quality: 1, usd: 0.5}}\ncache"
)
QUIZ, OPEN = "Which?\nA. this one\nB. that one", "Which one?"


def publish(folder: Path, *models: str) -> tuple[str, ...]:
    """Estimates by hand: the first model is bad at prompts with choices, the other is 88 % right at any prompt."""
    weights = [0.0] * (STRUCTURE + 256)
    weights[structure(QUIZ).index(1.0)] = -4.0
    logits = (LinearLogit(tuple(weights), 2.0), LinearLogit((0.0,) * len(weights), 2.0))
    parameters = CandidateParameters(
        1,
        tuple(CandidateModel(ModelIdentity(name), 100) for name in models),
        find_signal("embedding").manifest.sha256,
        Logistic(logits),
    )
    folder.mkdir()
    (folder / "estimates.json").write_bytes(msgspec.json.encode(parameters))
    metadata = SignalMetadata("candidates", "logistic", "JSON", "test", "test", {})
    publish_signal(folder / "estimates.json", "candidates", folder, metadata)
    return (str(folder),)


async def target_of(device: Device, text: str, **body: object) -> str:
    return (await device.ask(text, **body)).headers["x-causeway-target"]  # type: ignore[arg-type]


async def test_each_request_is_answered_by_the_target_with_the_best_score(tmp_path: Path) -> None:
    """The large model costs 0.05 a request: worth it for a quiz only. The record explains it, and so does a preview."""
    dirs = publish(tmp_path / "models", "m-small", "m-large")
    async with running(tmp_path / "device", policy=BEST, model_dirs=dirs) as device:
        assert await target_of(device, OPEN) == "small"
        answer = await device.ask(QUIZ)
        assert answer.headers["x-causeway-target"] == "large"
        record = await device.record(answer)
        assert record.decision is not None
        scored = {one.target: one.detail for one in record.decision.reasons if one.code == "target_scored"}
        assert scored["small"].startswith("score 0.11")
        assert "quality 0.881" in scored["large"]
        candidates = record.estimates.candidates
        assert candidates is not None
        assert [(one.model, one.answer_tokens) for one in candidates] == [("m-small", 100), ("m-large", 100)]
        assert candidates[0].latency_s is not None
        assert candidates[1].latency_s is None
        body = {"model": "auto", "messages": [{"role": "user", "content": QUIZ}]}
        async with device.session.post("/v1/route", json=body) as response:
            plan = await response.json()
        assert [one["target"]["name"] for one in plan["decision"]["attempts"]] == ["large", "small"]
        assert (await device.record(await device.ask(QUIZ, model="small"))).estimates.candidates is None


async def test_without_a_calibration_the_order_of_the_list_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The models of the file are others, or there is none: the log and the record say so."""
    dirs = publish(tmp_path / "models", "others", "m-large")
    async with running(tmp_path / "device", policy=BEST, model_dirs=dirs) as device:
        assert await target_of(device, QUIZ) == "small"
        record = device.newest()
        assert record.decision is not None
        assert {one.target for one in record.decision.reasons if one.code == "estimate_absent"} == {"small", "large"}
    assert (
        "`best_of` cannot compare its targets and tries them in the order of its list: no estimates cover "
        "m-large, m-small" in caplog.text
    )


async def test_a_target_that_fails_gives_way_to_the_next_score(tmp_path: Path) -> None:
    dirs = publish(tmp_path / "models", "m-small", "m-large")
    async with running(tmp_path / "device", policy=BEST, model_dirs=dirs) as device:
        device.cloud.status = 500
        answer = await device.ask(QUIZ)
        assert answer.headers["x-causeway-target"] == "small"
        assert answer.headers["x-causeway-degraded"] == "true"


async def test_a_reloaded_policy_takes_the_new_weights(tmp_path: Path) -> None:
    dirs = publish(tmp_path / "models", "m-small", "m-large")
    async with running(tmp_path / "device", policy=BEST, model_dirs=dirs) as device:
        assert await target_of(device, QUIZ) == "large"
        (tmp_path / "device" / "policy.yaml").write_text(BEST.replace("usd: 0.5", "usd: 50"))
        await device.app.parts.policies.reload()
        assert await target_of(device, QUIZ) == "small"


async def test_the_length_of_answers_is_learned(tmp_path: Path) -> None:
    """The scripted answers have three tokens, where the calibration says 100. Errors teach nothing."""
    dirs = publish(tmp_path / "models", "m-small", "m-large")
    async with running(tmp_path / "device", policy=BEST, model_dirs=dirs) as device:

        async def lengths() -> list[float | None]:
            candidates = (await device.record(await device.ask(QUIZ))).estimates.candidates
            assert candidates is not None
            return [one.answer_tokens for one in candidates]

        device.cloud.status = 500
        await device.ask(QUIZ, model="large")
        device.cloud.status = 200
        for _ in range(29):
            await device.ask(OPEN, n=2)  # on the device, by its score
            await device.ask(QUIZ)
        assert await lengths() == [100, 100]
        await device.ask(OPEN, n=2)
        assert await lengths() == [pytest.approx(3, abs=0.5), pytest.approx(3, abs=0.5)]
        (tmp_path / "device" / "policy.yaml").write_text(BEST.replace("usd: 0.5", "usd: 0.4"))
        await device.app.parts.policies.reload()
        assert await lengths() == [pytest.approx(3, abs=0.5), pytest.approx(3, abs=0.5)]
