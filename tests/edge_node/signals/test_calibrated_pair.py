"""The signals of a calibrated pair in the daemon: `edge.quality`, the confidence of a handoff, and other weights."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

pytest.importorskip("onnxruntime")

from causeway_server.edge_node.backends.backend import BackendRequest
from causeway_server.edge_node.cli.doctor.policy_and_models import check_models, check_signals
from causeway_server.edge_node.config.schema import EngineConfig
from causeway_server.edge_node.signals.estimators import LearnedEstimators
from causeway_server.models.catalog.artifact import find_artifact, find_signal
from causeway_server.models.signals.calibration import LinearLogit
from causeway_server.models.signals.pair import HANDOFF_INPUTS, KindMixture, ModelIdentity, PairParameters, PairStage
from causeway_server.models.signals.structure import STRUCTURE, structure
from causeway_server.router.policy.compiled import parse_policy
from causeway_server.router.types import Chunk, Confidence, Message, Request, Target
from causeway_train.publish_signal import SignalMetadata, publish_signal

TEXT = """
version: 1
name: pair
targets:
  small: {at: edge, model: assistant}
  large: {at: cloud, model: assistant-large}
routes:
  - {name: hard, when: edge.quality < 0.5, use: [large, small]}
  - {name: calibrated, use: [small, large], handoff: {after_tokens: 8, below: 0.6, within: 700ms}}
"""
POLICY = parse_policy(TEXT)
QUIZ, OPEN = "Which?\nA. this one\nB. that one", "Which one?"
SURE, UNSURE = Confidence(8, 0.9, -0.1, 0.9, 0.2), Confidence(8, 0.3, -1.2, 0.2, 0.9)


def publish(folder: Path, **changes: object) -> Path:
    """Signals by hand: a prompt with choices is bad for the device, and the probability is the score."""
    quality = [0.0] * (STRUCTURE + 256)
    quality[structure(QUIZ).index(1.0)] = -4.0
    stage = LinearLogit((1.0, *[0.0] * (HANDOFF_INPUTS - 1)), 0.0)
    small, large = (find_artifact(name) for name in ("assistant", "assistant-large"))
    parameters = PairParameters(
        small=ModelIdentity(small.name, small.manifest.sha256),
        large=ModelIdentity(large.name, large.manifest.sha256),
        encoder_sha256=find_signal("embedding").manifest.sha256,
        quality=LinearLogit(tuple(quality), 2.0),
        stages=(PairStage(1, stage), PairStage(8, stage)),
    )
    weights = folder / "signals.json"
    weights.write_bytes(msgspec.json.encode(msgspec.structs.replace(parameters, **changes)))
    metadata = SignalMetadata("pair", "logistic regression", "JSON", "test", "test", {}, data=())
    publish_signal(weights, "pair", folder / "models", metadata, judged=small)
    return folder / "models"


def chat(text: str) -> Request:
    return Request(kind="chat", model="auto", messages=(Message("user", text),))


def score(learned: LearnedEstimators, request: Request, confidence: Confidence) -> float:
    target = Target("small", "edge", "assistant")
    call = BackendRequest("id", request, target, deadline=1.0, first_token_by=1.0, confidence_tokens=8)
    found = learned.calibrate(call, Chunk("x", confidence=confidence), None).confidence
    assert found is not None
    return found.score


def test_the_pair_s_signals_take_the_place_of_the_model_s_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`edge.quality` is the pair's, the handoff compares its probability, and doctor says so."""
    folder = publish(tmp_path)
    learned = LearnedEstimators((folder,))
    learned.activate(POLICY)
    assert learned.quality(POLICY, chat(OPEN)) == pytest.approx(0.88, abs=0.01)
    assert learned.quality(POLICY, chat(QUIZ)) == pytest.approx(0.12, abs=0.01)
    assert score(learned, chat(OPEN), SURE) == pytest.approx(0.9)
    assert score(learned, chat(OPEN), UNSURE) == pytest.approx(0.3)
    assert not caplog.records
    (finding,) = check_signals(POLICY, EngineConfig(model_dirs=(str(folder),)))
    assert finding.level == "ok"
    assert "calibrated beside assistant-large" in finding.found


def test_signals_are_not_those_of_a_model_with_an_adapter(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No estimate of the prompt, and the engine's score; doctor says so."""
    text = TEXT.replace("model: assistant}", "model: assistant+kiosk}", 1)
    adapted, folder = parse_policy(text), publish(tmp_path)
    learned = LearnedEstimators((folder,))
    learned.activate(adapted)
    assert learned.quality(adapted, chat(OPEN)) is None
    learned.activate(parse_policy(text.replace("targets:", "targets:\n  plain: {at: edge, model: assistant}")))
    target = Target("small", "edge", "assistant", adapter="kiosk")
    call = BackendRequest("id", chat(OPEN), target, deadline=1.0, first_token_by=1.0, confidence_tokens=8)
    chunk = Chunk("x", confidence=msgspec.structs.replace(SURE, score=0.7))
    assert learned.calibrate(call, chunk, None) is chunk
    assert not caplog.records
    (finding,) = check_signals(adapted, EngineConfig(model_dirs=(str(folder),)))
    assert (finding.level, "assistant+kiosk" in finding.found) == ("warn", True)
    _, findings = check_models(adapted, EngineConfig())
    assert [finding.level for finding in findings] == ["fail", "ok"]
    assert "assistant has no adapter `kiosk`. Available: none" in findings[0].found


def test_a_prompt_of_token_ids_keeps_the_engine_s_score(tmp_path: Path) -> None:
    """The pair's confidence needs the text."""
    learned = LearnedEstimators((publish(tmp_path),))
    learned.activate(POLICY)
    assert score(learned, Request(kind="completion", model="auto", prompts=((1, 2),)), UNSURE) == UNSURE.score


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"small": ModelIdentity("assistant", "0" * 64)}, "made for weights with sha256"),
        ({"large": ModelIdentity("assistant-large", "0" * 64)}, "other weights of assistant-large"),
        ({"large": ModelIdentity("another")}, "beside another, which is not a target"),
        ({"encoder_sha256": "0" * 64}, "made for word vectors with sha256"),
        ({"stages": ()}, "the signals of a pair of models must have"),
        ({"quality": LinearLogit((1.0,), 0.0)}, "the signals of a pair of models must have"),
        ({"kinds": KindMixture((), ())}, "the signals of a pair of models must have"),
    ],
)
def test_signals_that_do_not_belong_to_this_pair_are_ignored_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, object], fault: str
) -> None:
    """In the log and by doctor; the model's own signals are used instead."""
    folder = publish(tmp_path, **changes)
    learned, own = LearnedEstimators((folder,)), LearnedEstimators()
    learned.activate(POLICY)
    own.activate(POLICY)
    assert "The calibration of assistant is not used" in caplog.text
    assert fault in caplog.text
    assert learned.quality(POLICY, chat(OPEN)) == own.quality(POLICY, chat(OPEN))
    assert score(learned, chat(OPEN), SURE) == score(own, chat(OPEN), SURE)
    findings = list(check_signals(POLICY, EngineConfig(model_dirs=(str(folder),))))
    assert [finding.level for finding in findings] == ["warn", "ok", "ok"]
    assert fault in findings[0].found


def test_signals_of_another_model_are_not_mentioned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    learned = LearnedEstimators((publish(tmp_path, small=ModelIdentity("another", "0" * 64)),))
    learned.activate(POLICY)
    assert not caplog.records


def test_a_large_model_without_weights_here_belongs_by_its_name(tmp_path: Path) -> None:
    """Behind an endpoint only the name is known."""
    learned = LearnedEstimators((publish(tmp_path, large=ModelIdentity("assistant-large")),))
    learned.activate(POLICY)
    assert score(learned, chat(OPEN), SURE) == pytest.approx(0.9)
