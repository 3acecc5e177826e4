"""Fit the calibrator: logistic regressions on what is known of an answer when a handoff is decided.

Fitted on one half of the rows that were held back from the model, measured on the other (`quality.halves`). A
probability holds for a mix of traffic: rows are weighted so that the device's own domain makes `logistic.OWN_SHARE`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from router.types import Confidence

from ...signals.calibration import (
    CalibrationParameters,
    CalibrationStage,
    ConfidenceCalibrator,
    calibration_inputs,
    log_odds,
)
from .graded_answers import WATCH, GradedAnswer
from .logistic import Reals, fit_line, mix_weights
from .quality import QualityMetrics, halves, measure, truths


class CalibrationMetrics(msgspec.Struct, frozen=True):
    """Figures on held-back prompts that the fit did not see, for a handoff after `tokens` tokens."""

    tokens: int
    raw: QualityMetrics  # the score that the engine reports
    alone: QualityMetrics
    joined: QualityMetrics  # with edge.quality

    def metrics(self) -> dict[str, float]:
        named = {"raw": self.raw, "alone": self.alone, "joined": self.joined}
        return {f"{name}/{key}": value for name, fit in named.items() for key, value in fit.metrics().items()}


def train_calibrator(
    held: Sequence[GradedAnswer], quality: Callable[[str], float], target: Path, *, tokens: int = 8
) -> CalibrationMetrics:
    """Fit on a half of `held`, write the numbers to `target`, measure on the other half after `tokens` tokens."""
    first, second = halves([one for one in held if one.confidences])
    told = [log_odds(quality(one.text)) for one in first]
    numbers = CalibrationParameters(tuple(_stage(first, told, tokens) for tokens in range(1, WATCH + 1)))
    target.write_bytes(msgspec.json.format(msgspec.json.encode(numbers), indent=1))
    calibrator = ConfidenceCalibrator.load(target)

    def probabilities(known: Callable[[str], float] | None) -> Reals:
        return np.array([tell(calibrator, one, tokens, known) for one in second])

    return CalibrationMetrics(
        tokens=tokens,
        raw=measure(np.array([at(one, tokens)[0].score for one in second]), second),
        alone=measure(probabilities(None), second),
        joined=measure(probabilities(quality), second),
    )


def tell(
    calibrator: ConfidenceCalibrator, one: GradedAnswer, tokens: int, quality: Callable[[str], float] | None = None
) -> float:
    """What a handoff after `tokens` tokens would compare."""
    seen, ended = at(one, tokens)
    return calibrator(seen, tokens, None if quality is None else quality(one.text), ended=ended)


def at(one: GradedAnswer, tokens: int) -> tuple[Confidence, bool]:
    """The confidence when a handoff after so many tokens is decided, and whether the answer has ended by then."""
    length = len(one.confidences)
    return one.confidences[min(tokens, length) - 1], length <= tokens and length < WATCH


def _stage(judged: Sequence[GradedAnswer], told: Sequence[float], tokens: int) -> CalibrationStage:
    seen = np.array([calibration_inputs(*at(one, tokens)) for one in judged])
    joined = np.concatenate([seen, np.array(told)[:, None]], axis=1)
    truth, weights = truths(judged), mix_weights(judged)
    return CalibrationStage(tokens, alone=fit_line(seen, truth, weights), joined=fit_line(joined, truth, weights))
