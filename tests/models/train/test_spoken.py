"""The calibrator's stage for spoken requests: misheard commands are handed off, understood ones kept."""

from __future__ import annotations

import random

from causeway_server.models.signals.calibration import CalibrationParameters, ConfidenceCalibrator
from causeway_train.data.transcripts import TranscribedRow
from causeway_train.function_calls.dataset import Row
from causeway_train.signals.graded_answers import GradedAnswer
from causeway_train.signals.spoken import SpokenAnswer, fit_spoken, measure_spoken
from tests.models.signals.test_calibration import confidence, stage

TOKENS = 4


def heard(draw: random.Random, number: int) -> SpokenAnswer:
    """A model that is always sure, of transcripts of which a confidence c is right with probability c."""
    clear = draw.random()
    right = draw.random() < clear
    confidences = tuple(confidence(0.9, tokens) for tokens in range(1, TOKENS + 1))
    return SpokenAnswer(GradedAnswer(f"prompt {number}", right, confidences=confidences), clear)


def test_the_stage_hands_off_what_was_misheard() -> None:
    draw = random.Random(3)
    rows = [heard(draw, number) for number in range(800)]
    typed = CalibrationParameters((stage(TOKENS),))
    fitted = fit_spoken(rows[:400], ConfidenceCalibrator(typed), TOKENS)
    figures = measure_spoken(
        rows[400:], ConfidenceCalibrator(CalibrationParameters(typed.stages, fitted)), TOKENS, below=0.55
    )
    assert (figures.rows, figures.typed_kept) == (400, 1.0)
    assert figures.typed_wrong_kept == 1.0 - figures.right
    assert figures.spoken_wrong_kept < figures.typed_wrong_kept / 2
    assert figures.spoken_kept > 0.3
    assert set(figures.metrics()) >= {"spoken/rows", "spoken/spoken_wrong_kept"}


def test_a_transcript_becomes_the_row_that_the_model_gets() -> None:
    row = Row("wake me at six am", "alarm_set", (("time", "six am"),), source="hwu64")
    transcribed = TranscribedRow(row, "en-us", "Wake me at six A.M.!", 0.9)
    assert transcribed.as_heard == Row("wake me at six am", "alarm_set", (("time", "six am"),), source="hwu64")
