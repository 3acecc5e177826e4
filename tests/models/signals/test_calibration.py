"""The calibrator: confidence to probability, and the fit of its parameters."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from causeway_server.models.catalog.artifact import ArtifactError, find_artifact
from causeway_server.models.signals.calibration import (
    INPUT_COUNT,
    CalibrationParameters,
    CalibrationStage,
    ConfidenceCalibrator,
    LinearLogit,
)
from causeway_server.router.types import Confidence
from causeway_train.signals.calibration import confidence_at, probability_at, train_calibrator
from causeway_train.signals.graded_answers import CONFIDENCE_TOKENS, GradedAnswer


def stage(tokens: int, bias: float = 0.0) -> CalibrationStage:
    """A stage with weight 1 for the score and for `edge.quality`, and 0 for all other inputs."""
    rest = (0.0,) * (INPUT_COUNT - 1)
    return CalibrationStage(tokens, LinearLogit((1.0, *rest), bias), LinearLogit((1.0, *rest, 1.0), bias))


def confidence(score: float, tokens: int = 4, refusal: float = 0.0) -> Confidence:
    return Confidence(tokens, score, -1.0, 0.5, 1.0, refusal)


def graded(draw: random.Random, number: int) -> GradedAnswer:
    """An overconfident model: an answer with score s is right with probability s²."""
    in_scope = number % 2 == 0
    score = draw.random()
    right = in_scope and draw.random() < score**2
    length = draw.choice((3, 6, CONFIDENCE_TOKENS))
    confidences = tuple(confidence(score, tokens, 0.0 if in_scope else 0.9) for tokens in range(1, length + 1))
    return GradedAnswer(f"prompt {number}", right, in_scope, confidences)


def test_a_calibrated_score_is_a_probability() -> None:
    """With the score's log odds as the only input the score stays; edge.quality moves it."""
    calibrator = ConfidenceCalibrator(CalibrationParameters((stage(4),)))
    assert calibrator(confidence(0.8), 4, ended=False) == pytest.approx(0.8)
    assert calibrator(confidence(0.8), 4, 0.5, ended=False) == pytest.approx(0.8)
    assert calibrator(confidence(0.8), 4, 0.9, ended=False) > 0.9
    assert calibrator(confidence(0.8), 4, 0.1, ended=False) < 0.5
    for score in (0.0, 1.0):
        assert 0.0 < calibrator(confidence(score), 4, ended=True) < 1.0


def test_a_doubtful_transcript_lowers_the_probability_of_a_spoken_request_alone() -> None:
    typed = ConfidenceCalibrator(CalibrationParameters((stage(4),)))
    spoken = ConfidenceCalibrator(CalibrationParameters((stage(4),), LinearLogit((1.0, 0.5), 0.0)))
    answer = confidence(0.8)
    assert (
        typed(answer, 4, ended=False, transcript_confidence=0.1) == spoken(answer, 4, ended=False) == pytest.approx(0.8)
    )
    lost, doubtful, clear = (spoken(answer, 4, ended=False, transcript_confidence=sure) for sure in (0.01, 0.1, 0.9))
    assert lost < doubtful < clear == pytest.approx(0.8)
    with pytest.raises(ArtifactError, match="spoken"):
        ConfidenceCalibrator(CalibrationParameters((stage(4),), LinearLogit((1.0,), 0.0)))


def test_the_stage_follows_the_handoff_s_tokens() -> None:
    """Before the first stage the first, after the last the last."""
    calibrator = ConfidenceCalibrator(CalibrationParameters((stage(4, -9.0), stage(8, 0.0), stage(12, 9.0))))
    probabilities = [calibrator(confidence(0.5), after, ended=False) for after in (1, 4, 8, 100)]
    assert probabilities[0] == probabilities[1] < 0.01
    assert probabilities[2] == pytest.approx(0.5)
    assert probabilities[3] > 0.99


def test_an_answer_that_ends_early_is_judged_by_its_last_token() -> None:
    """A handoff after eight tokens sees the third of an answer of three, and that it ended."""
    short = GradedAnswer("x", True, True, tuple(confidence(0.1 * n, n) for n in (1, 2, 3)))
    assert confidence_at(short, 2) == (confidence(0.2, 2), False)
    assert confidence_at(short, 8) == (confidence(0.1 * 3, 3), True)
    long = GradedAnswer("x", True, True, tuple(confidence(0.5, n) for n in range(1, CONFIDENCE_TOKENS + 1)))
    assert confidence_at(long, CONFIDENCE_TOKENS) == (confidence(0.5, CONFIDENCE_TOKENS), False)


def test_the_fit_halves_the_calibration_error_of_an_overconfident_model(tmp_path: Path) -> None:
    """On held-out prompts, and the order of the scores stays."""
    draw = random.Random(4)
    rows = [graded(draw, number) for number in range(3000)]
    fits = train_calibrator(rows, lambda _: 0.5, tmp_path / "c.json", tokens=4)
    assert fits.raw.ece > 0.1
    assert fits.alone.ece < 0.5 * fits.raw.ece
    assert fits.alone.auroc > 0.9 * fits.raw.auroc
    calibrator = ConfidenceCalibrator.load(tmp_path / "c.json")
    sure = GradedAnswer("sure", True, True, (confidence(0.95, 1),) * CONFIDENCE_TOKENS)
    away = GradedAnswer("away", False, False, (confidence(0.95, 1, 0.9),) * CONFIDENCE_TOKENS)
    assert probability_at(calibrator, sure, 4) > 0.6
    assert probability_at(calibrator, away, 4) < 0.1
    assert fits.metrics()["joined/rows"] == fits.joined.rows


def test_invalid_parameters_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    for numbers in (
        CalibrationParameters(()),
        CalibrationParameters((msgspec.structs.replace(stage(1), joined=LinearLogit((1.0,), 0.0)),)),
    ):
        path.write_bytes(msgspec.json.encode(numbers))
        with pytest.raises(ArtifactError, match="weights"):
            ConfidenceCalibrator.load(path)
    path.write_bytes(b"{")
    for bad in (path, tmp_path / "gone.json"):
        with pytest.raises(ArtifactError, match=bad.name):
            ConfidenceCalibrator.load(bad)


def test_a_calibrator_loads_for_one_version_of_a_model_only() -> None:
    model = find_artifact("assistant")
    other = msgspec.structs.replace(model, manifest=msgspec.structs.replace(model.manifest, sha256="0" * 64))
    signal = msgspec.structs.replace(
        other, manifest=msgspec.structs.replace(other.manifest, judges_sha256=model.manifest.sha256)
    )
    with pytest.raises(ArtifactError, match="another version"):
        ConfidenceCalibrator.load(signal.path_for(other))
