"""Learned estimates: `edge.quality` before the device answers, calibrated confidence of its first tokens."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("onnxruntime")

from causeway_server.edge_node.backends.backend import BackendRequest
from causeway_server.edge_node.signals.estimators import LearnedEstimators
from causeway_server.models.catalog.artifact import SHIPPED, find_artifact, save_manifest
from causeway_server.router.policy.compiled import parse_policy
from causeway_server.router.types import Chunk, Confidence, ImagePart, Message, Request, Target, TextPart

from ..device import POLICY, Device, running
from ..scripted import EDGE_WORDS, ScriptedEngine

EDGE = "".join(EDGE_WORDS)
COMMAND, FACT = "turn off the lights in the kitchen", "what is the capital of france"
NAMED = POLICY.replace("model: m-small", "model: assistant").replace(
    "  - name: edge-first\n",
    "  - name: not-for-us\n    when: edge.quality < 0.5\n    use: [large, small]\n  - name: edge-first\n",
)
CACHED = NAMED.replace("  - name: greedy\n    when: request.temperature == 0.0", "  - when: edge.quality > 0.5")


def chat(*contents: str | tuple[TextPart | ImagePart, ...] | None, role: str = "user") -> Request:
    return Request(kind="chat", model="auto", messages=tuple(Message(role, content) for content in contents))


def other_weights(folder: Path) -> Path:
    """Add a model named assistant whose weights have no estimators."""
    manifest = msgspec.structs.replace(find_artifact("assistant").manifest, sha256="0" * 64)
    (folder / "assistant").mkdir(parents=True)
    (folder / "assistant" / manifest.file).write_bytes(b"other weights")
    save_manifest(manifest, folder / "assistant")
    return folder


def handoff(tokens: int = 8) -> BackendRequest:
    target = Target("small", "edge", "assistant")
    return BackendRequest("id", chat(COMMAND), target, deadline=1.0, first_token_by=1.0, confidence_tokens=tokens)


# --- edge.quality ----------------------------------------------------------------------------------------------------


async def test_a_rule_on_quality_sends_facts_to_the_cloud_and_keeps_commands(tmp_path: Path) -> None:
    """The estimate is in the decision record and in the explanation."""
    async with running(tmp_path, policy=NAMED) as device:
        command, fact = await device.ask(COMMAND), await device.ask(FACT)
        assert command.headers["x-causeway-reason"] == "edge-first"
        assert fact.headers["x-causeway-reason"] == "not-for-us"
        estimates = [(await device.record(answer)).estimates.quality for answer in (command, fact)]
        assert estimates[0] is not None
        assert estimates[1] is not None
        assert estimates[1] < 0.5 < estimates[0]
        assert await explained(device, FACT) == pytest.approx(estimates[1])


async def explained(device: Device, text: str) -> float:
    body = {"model": "auto", "messages": [{"role": "user", "content": text}]}
    async with device.session.post("/v1/route", json=body) as response:
        return float((await response.json())["estimates"]["quality"])


async def test_quality_is_computed_only_if_the_policy_names_it(tmp_path: Path) -> None:
    """Nor for a request that names its target."""
    async with running(tmp_path, policy=POLICY.replace("m-small", "assistant")) as device:
        assert (await device.record(await device.ask(COMMAND))).estimates.quality is None
    async with running(tmp_path / "named", policy=NAMED) as device:
        assert (await device.record(await device.ask(COMMAND, model="small"))).estimates.quality is None


async def test_a_cache_rule_may_use_quality(tmp_path: Path) -> None:
    async with running(tmp_path, policy=CACHED) as device:
        for text, expected in ((COMMAND, "hit"), (FACT, "bypass")):
            for _ in range(2):
                answer = await device.ask(text, temperature=0)
            assert answer.headers["x-causeway-cache"] == expected


async def test_without_an_estimator_the_rule_does_not_hold_and_the_record_says_why(tmp_path: Path) -> None:
    async with running(tmp_path, policy=NAMED.replace("model: assistant", "model: m-small")) as device:
        answer = await device.ask(FACT)
        assert answer.text == EDGE
        record = await device.record(answer)
        assert record.estimates.quality is None
        assert record.decision is not None
        reasons = [(reason.code, reason.rule, reason.detail) for reason in record.decision.reasons]
        assert ("signal_absent", "not-for-us", "edge.quality") in reasons


def test_an_estimator_of_other_weights_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log says so when the policy is activated."""
    policy = parse_policy(NAMED)
    learned = LearnedEstimators((other_weights(tmp_path),))
    learned.activate(policy)
    assert learned.quality(policy, chat(COMMAND)) is None
    assert "another version" in caplog.text


def test_a_broken_estimator_counts_as_absent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A broken estimator and a broken calibrator: each is logged, and the policy is activated."""
    for name in ("edge-quality", "calibrator"):
        shutil.copytree(SHIPPED / name, tmp_path / name)
        next((tmp_path / name).glob("model.*")).write_bytes(b"garbage")
    policy = parse_policy(NAMED)
    learned = LearnedEstimators((tmp_path,))
    learned.activate(policy)
    assert learned.quality(policy, chat(COMMAND)) is None
    chunk = Chunk(text="x", confidence=Confidence(8, 0.5, -0.1, 0.5, 0.2))
    assert learned.calibrate(handoff(), chunk, None) is chunk
    assert caplog.text.count("WARNING") == 2


def test_quality_is_estimated_from_the_last_user_message() -> None:
    """As text or as content parts; embeddings and token ids have no quality."""
    policy = parse_policy(NAMED)
    learned = LearnedEstimators()
    learned.activate(policy)
    alone = learned.quality(policy, chat(COMMAND))
    assert alone is not None
    assert learned.quality(policy, chat(FACT, COMMAND)) == alone
    parts = (TextPart(COMMAND), ImagePart("data:,"))
    assert learned.quality(policy, chat(parts)) == alone
    assert learned.quality(policy, Request(kind="completion", model="auto", prompts=(COMMAND,))) == alone
    assert learned.quality(policy, chat(None)) is not None
    for request in (
        Request(kind="embedding", model="auto", prompts=(COMMAND,)),
        Request(kind="completion", model="auto", prompts=((1, 2),)),
        chat(COMMAND, role="system"),
    ):
        assert learned.quality(policy, request) is None


# --- confidence ------------------------------------------------------------------------------------------------------


async def test_a_handoff_compares_a_probability(tmp_path: Path) -> None:
    """The score in the record is the calibrated one, not the engine's."""
    policy = POLICY.replace("m-small", "assistant").replace("below: 0.5}", "below: 0.0001}")
    engine = ScriptedEngine("assistant")
    async with running(tmp_path, policy=policy, engine=engine) as device:
        record = await device.record(await device.ask("hello", tags="handoff"))
        confidence = record.outcome.attempts[0].confidence
        assert confidence is not None
        assert confidence.score != engine.score
        assert 0.0 < confidence.score < 1.0
        assert (confidence.logprob, confidence.margin) == (-0.1, 0.5), "the inputs of the score stay"


def test_a_model_without_a_calibrator_keeps_the_engines_score(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Most models have none, so nothing is logged."""
    learned = LearnedEstimators((other_weights(tmp_path),))
    learned.activate(parse_policy(POLICY.replace("m-small", "assistant")))
    chunk = Chunk(text="x", confidence=Confidence(8, 0.5, -0.1, 0.5, 0.2))
    assert learned.calibrate(handoff(), chunk, None) is chunk
    assert "WARNING" not in caplog.text


def test_quality_raises_the_calibrated_probability() -> None:
    """A chunk without confidence passes unchanged."""
    learned = LearnedEstimators()
    learned.activate(parse_policy(NAMED))
    chunk = Chunk(text="x", confidence=Confidence(8, 0.9, -0.1, 0.9, 0.2))
    scores = []
    for quality in (0.05, 0.95):
        confidence = learned.calibrate(handoff(), chunk, quality).confidence
        assert confidence is not None
        scores.append(confidence.score)
    assert scores[0] < scores[1]
    plain = Chunk(text="x")
    assert learned.calibrate(handoff(), plain, 0.5) is plain
