"""edge.quality: features, the ONNX graph, training, calibration, and the tie to one version of a model."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from causeway_server.models.catalog.artifact import (
    ArtifactError,
    ArtifactNotFound,
    find_artifact,
    find_signal,
    load_artifact,
)
from causeway_server.models.signals.calibration import ConfidenceCalibrator
from causeway_server.models.signals.drift import calibration_error
from causeway_server.models.signals.quality import BUCKETS, QualityEstimator, features
from causeway_server.router.types import Confidence
from causeway_train.cli.commands import main
from causeway_train.publish_signal import SignalMetadata, publish_signal
from causeway_train.signals.graded_answers import GradedAnswer
from causeway_train.signals.quality import QualityNetwork, halves, measure, train_quality

pytest.importorskip("onnxruntime")

RIGHT = [f"turn {way} the {what}" for way in ("on", "off", "up") for what in ("light", "radio", "heater", "fan")]
WRONG = [f"explain {what} to {whom}" for what in ("gravity", "jazz", "tax", "dna") for whom in ("me", "her", "us")]
GRADED = [GradedAnswer(text, True) for text in RIGHT] + [GradedAnswer(text, False, in_domain=False) for text in WRONG]
METADATA = SignalMetadata("edge.quality", "a test", "int8", "a test", "a test", {"auroc": 0.9})


def test_features_are_buckets_whatever_the_text() -> None:
    """Never empty, always inside the table, bounded for long prompts, case-insensitive."""
    for text in ("", "   ", "Turn ON", "日本語", "word " * 5000, "x" * 1_000_000):
        found = features(text)
        assert found.dtype == np.int64
        assert 1 <= len(found) <= 300
        assert found.min() >= 0
        assert found.max() < BUCKETS
    assert features("Turn ON").tolist() == features("turn on").tolist()


def test_the_graph_computes_what_the_network_computes(tmp_path: Path) -> None:
    """Up to the int8 rounding of the table."""
    estimator = QualityNetwork(np.random.default_rng(1))
    estimator.write(tmp_path / "q.onnx")
    quality = QualityEstimator(tmp_path / "q.onnx")
    for text in (*RIGHT, *WRONG, ""):
        wanted = 1 / (1 + np.exp(-estimator.log_odds([text])[0]))
        assert quality(text) == pytest.approx(wanted, abs=0.01)


def test_it_learns_which_prompts_are_answered_correctly(tmp_path: Path) -> None:
    fit = train_quality(GRADED * 20, GRADED, tmp_path / "q.onnx", seed=3)
    assert fit.auroc > 0.95
    quality = QualityEstimator(tmp_path / "q.onnx")
    assert quality("turn on the oven") > 0.6
    assert quality("explain dna to him") < 0.4


def test_what_it_is_calibrated_on_is_not_what_it_is_measured_on() -> None:
    """The halves are disjoint and complete; duplicates stay together."""
    first, second = halves([*GRADED, *GRADED])
    assert len(first) + len(second) == 2 * len(GRADED)
    assert first
    assert second
    assert not {one.text for one in first} & {one.text for one in second}


def test_calibration_error_is_the_mean_gap() -> None:
    """0.85 predicted and half of them right is a gap of 0.35."""
    predicted = np.array([0.85] * 4)
    assert calibration_error(predicted, np.array([True, True, False, False])) == pytest.approx(0.35)
    assert calibration_error(np.array([0.5, 0.5]), np.array([True, False])) == pytest.approx(0.0)
    halves_apart = np.array([0.05, 0.95]), np.array([False, False])
    assert calibration_error(*halves_apart) == pytest.approx(0.5)
    assert calibration_error(*halves_apart, np.array([3.0, 1.0])) == pytest.approx((3 * 0.05 + 0.95) / 4)


def test_figures_of_right_answers_alone_are_zero() -> None:
    fit = measure(np.full(len(RIGHT), 0.5), [GradedAnswer(text, True) for text in RIGHT])
    assert (fit.auroc, fit.right, fit.rows) == (0.0, 1.0, len(RIGHT))


def test_an_estimator_loads_for_one_version_of_a_model_only(tmp_path: Path) -> None:
    QualityNetwork(np.random.default_rng(1)).write(tmp_path / "q.onnx")
    model = find_artifact("assistant")
    other = msgspec.structs.replace(model, manifest=msgspec.structs.replace(model.manifest, sha256="0" * 64))
    signal = publish_signal(tmp_path / "q.onnx", "signal", tmp_path / "models", METADATA, judged=model)
    assert load_artifact(signal.folder).manifest == signal.manifest
    assert "a test" in (signal.folder / "README.md").read_text()
    assert 0.0 <= QualityEstimator(signal.path_for(model))("lights on") <= 1.0
    with pytest.raises(ArtifactError, match="another version"):
        QualityEstimator(signal.path_for(other))
    with pytest.raises(ArtifactNotFound, match="another version"):
        find_signal("edge.quality", other, (tmp_path / "models",))


@pytest.mark.engine
def test_both_signals_of_a_model_are_made_by_one_command(tmp_path: Path) -> None:
    """From real answers of the shipped model; a second run generates none."""
    pytest.importorskip("llama_cpp")
    (tmp_path / "intents").mkdir()
    lines = [json.dumps({"text": text, "intent": "iot_hue_lightoff"}) for text in [*RIGHT * 4, *WRONG]]
    (tmp_path / "intents" / "hwu64.jsonl").write_text("\n".join(lines))
    folders = ("--data", tmp_path, "--run", tmp_path / "run", "--to", tmp_path / "models")
    command = [str(word) for word in ("train-quality", *folders, "--limit", 60)]
    first, second = (CliRunner().invoke(main, command, catch_exceptions=False) for _ in range(2))
    assert first.exit_code == second.exit_code == 0, first.output
    assert "has answered" in first.output
    assert "has answered" not in second.output
    model = find_artifact("assistant")
    quality = QualityEstimator(load_artifact(tmp_path / "models" / "edge-quality").path_for(model))
    calibrator = ConfidenceCalibrator.load(load_artifact(tmp_path / "models" / "calibrator").path_for(model))
    estimate = quality("turn off the lights")
    assert 0.0 < estimate < 1.0
    assert 0.0 < calibrator(Confidence(8, 0.9, -0.1, 0.9, 0.2), 8, estimate, ended=False) < 1.0


def test_a_signal_about_no_model_is_found_by_its_kind(tmp_path: Path) -> None:
    """A folder in extra_dirs precedes the shipped artifacts."""
    QualityNetwork(np.random.default_rng(1)).write(tmp_path / "q.onnx")
    about = msgspec.structs.replace(METADATA, kind="embedding")
    mine = publish_signal(tmp_path / "q.onnx", "encoder", tmp_path / "models", about)
    assert find_signal("embedding", None, (tmp_path / "models",)) == mine


def test_a_broken_graph_is_an_artifact_error(tmp_path: Path) -> None:
    (tmp_path / "junk.onnx").write_bytes(b"junk")
    for name in ("junk.onnx", "gone.onnx"):
        with pytest.raises(ArtifactError, match=name):
            QualityEstimator(tmp_path / name)
