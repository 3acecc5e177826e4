"""The calibrator: plain numbers that turn confidence into a probability, and the fit that makes them."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from models.catalog.artifact import ArtifactError, find_artifact
from models.signals.calibration import (
    INPUT_COUNT,
    CalibrationParameters,
    CalibrationStage,
    ConfidenceCalibrator,
    LinearLogit,
)
from models.train.signals.calibration import confidence_at, probability_at, train_calibrator
from models.train.signals.graded_answers import CONFIDENCE_TOKENS, GradedAnswer
from router.types import Confidence


def stage(tokens: int, bias: float = 0.0) -> CalibrationStage:
    """Only the score counts, and `edge.quality` as much."""
    rest = (0.0,) * (INPUT_COUNT - 1)
    return CalibrationStage(tokens, LinearLogit((1.0, *rest), bias), LinearLogit((1.0, *rest, 1.0), bias))


def seen(score: float, tokens: int = 4, refusal: float = 0.0) -> Confidence:
    return Confidence(tokens, score, -1.0, 0.5, 1.0, refusal)


def judged(draw: random.Random, number: int) -> GradedAnswer:
    """A model that is far too sure of itself: what it scores `s` is right with a probability of s²."""
    own = number % 2 == 0
    score = draw.random()
    right = own and draw.random() < score**2
    length = draw.choice((3, 6, CONFIDENCE_TOKENS))
    confidences = tuple(seen(score, tokens, 0.0 if own else 0.9) for tokens in range(1, length + 1))
    return GradedAnswer(f"prompt {number}", right, own, confidences)


def test_the_score_of_a_line_is_a_probability() -> None:
    """With the score's own log odds as the line, a score stays what it was, and edge.quality moves it its own way."""
    calibrator = ConfidenceCalibrator(CalibrationParameters((stage(4),)))
    assert calibrator(seen(0.8), 4, ended=False) == pytest.approx(0.8)
    assert calibrator(seen(0.8), 4, 0.5, ended=False) == pytest.approx(0.8)
    assert calibrator(seen(0.8), 4, 0.9, ended=False) > 0.9
    assert calibrator(seen(0.8), 4, 0.1, ended=False) < 0.5
    for score in (0.0, 1.0):
        assert 0.0 < calibrator(seen(score), 4, ended=True) < 1.0


def test_a_handoff_is_judged_by_the_stage_that_it_has_reached() -> None:
    """After 1 token by the first one there is, after 8 by that of 8, after 100 by the last."""
    calibrator = ConfidenceCalibrator(CalibrationParameters((stage(4, -9.0), stage(8, 0.0), stage(12, 9.0))))
    told = [calibrator(seen(0.5), after, ended=False) for after in (1, 4, 8, 100)]
    assert told[0] == told[1] < 0.01
    assert told[2] == pytest.approx(0.5)
    assert told[3] > 0.99


def test_an_answer_that_ends_early_is_judged_by_its_last_token() -> None:
    """A handoff after eight tokens looks at the third of an answer of three, and knows that there are no more."""
    short = GradedAnswer("x", True, True, tuple(seen(0.1 * n, n) for n in (1, 2, 3)))
    assert confidence_at(short, 2) == (seen(0.2, 2), False)
    assert confidence_at(short, 8) == (seen(0.1 * 3, 3), True)
    long = GradedAnswer("x", True, True, tuple(seen(0.5, n) for n in range(1, CONFIDENCE_TOKENS + 1)))
    assert confidence_at(long, CONFIDENCE_TOKENS) == (seen(0.5, CONFIDENCE_TOKENS), False)


def test_it_keeps_the_promises_that_the_engine_does_not(tmp_path: Path) -> None:
    """On prompts that the fit did not see, the error of a boastful score falls by more than half, and order stays."""
    draw = random.Random(4)
    rows = [judged(draw, number) for number in range(3000)]
    fits = train_calibrator(rows, lambda _: 0.5, tmp_path / "c.json", tokens=4)
    assert fits.raw.ece > 0.1
    assert fits.alone.ece < 0.5 * fits.raw.ece
    assert fits.alone.auroc > 0.9 * fits.raw.auroc
    calibrator = ConfidenceCalibrator.load(tmp_path / "c.json")
    sure = GradedAnswer("sure", True, True, (seen(0.95, 1),) * CONFIDENCE_TOKENS)
    away = GradedAnswer("away", False, False, (seen(0.95, 1, 0.9),) * CONFIDENCE_TOKENS)
    assert probability_at(calibrator, sure, 4) > 0.6
    assert probability_at(calibrator, away, 4) < 0.1
    assert fits.metrics()["joined/rows"] == fits.joined.rows


def test_numbers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """No stage, too few weights, no such file, and no JSON: each an error that names what is wrong."""
    path = tmp_path / "c.json"
    for numbers in (
        CalibrationParameters(()),
        CalibrationParameters((msgspec.structs.replace(stage(1), joined=LinearLogit((1.0,), 0.0)),)),
    ):
        path.write_bytes(msgspec.json.encode(numbers))
        with pytest.raises(ArtifactError, match="weights"):
            ConfidenceCalibrator.load(path)
    path.write_bytes(b"{")
    for wrong in (path, tmp_path / "gone.json"):
        with pytest.raises(ArtifactError, match=wrong.name):
            ConfidenceCalibrator.load(wrong)


def test_a_calibrator_judges_one_version_only() -> None:
    """Beside weights that it was not made for it does not load."""
    model = find_artifact("assistant")
    other = msgspec.structs.replace(model, manifest=msgspec.structs.replace(model.manifest, sha256="0" * 64))
    signal = msgspec.structs.replace(
        other, manifest=msgspec.structs.replace(other.manifest, judges_sha256=model.manifest.sha256)
    )
    with pytest.raises(ArtifactError, match="another version"):
        ConfidenceCalibrator.for_model(signal, other)
