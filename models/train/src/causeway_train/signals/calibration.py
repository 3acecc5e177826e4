"""Fitting of the calibrator: logistic regressions from the confidence at the handoff decision to a probability.

They are fitted on one half of the rows that were held back from the model and measured on the other (`quality.halves`).
A probability is valid for a mix of traffic: rows are weighted so that in-domain requests make up
`graded_answers.DOMAIN_SHARE`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from causeway_server.models.signals.calibration import (
    CalibrationParameters,
    CalibrationStage,
    ConfidenceCalibrator,
    calibration_inputs,
    log_odds,
)
from causeway_server.router.types import Confidence

from ..calibrate.fit import fit_logistic
from ..calibrate.routing_curves import Array64
from .graded_answers import CONFIDENCE_TOKENS, GradedAnswer, traffic_weights
from .quality import QualityMetrics, correctness, halves, measure


class CalibrationMetrics(msgspec.Struct, frozen=True):
    """Metrics on held-back prompts that the fit did not use, for a handoff after `tokens` tokens."""

    tokens: int
    raw: QualityMetrics  # metrics of the uncalibrated score that the engine reports
    alone: QualityMetrics  # metrics of the calibrated confidence alone
    joined: QualityMetrics  # metrics of the calibrated confidence joined with edge.quality

    def metrics(self) -> dict[str, float]:
        """Return all figures as one mapping, for a manifest."""
        named = {"raw": self.raw, "alone": self.alone, "joined": self.joined}
        return {f"{name}/{key}": value for name, fit in named.items() for key, value in fit.metrics().items()}


def train_calibrator(
    held: Sequence[GradedAnswer], quality: Callable[[str], float], target: Path, *, tokens: int = 8
) -> CalibrationMetrics:
    """Fit on one half of `held`, write the parameters to `target`, and measure on the other half.

    Args:
        quality: edge.quality of a prompt, 0..1.
        tokens: measure the calibration of a handoff after this many tokens.
    """
    first, second = halves([one for one in held if one.confidences])
    odds = [log_odds(quality(one.text)) for one in first]
    stages = tuple(_stage(first, odds, count) for count in range(1, CONFIDENCE_TOKENS + 1))
    target.write_bytes(msgspec.json.format(msgspec.json.encode(CalibrationParameters(stages)), indent=1))
    calibrator = ConfidenceCalibrator.load(target)

    def probabilities(quality: Callable[[str], float] | None) -> Array64:
        return np.array([probability_at(calibrator, one, tokens, quality) for one in second])

    return CalibrationMetrics(
        tokens=tokens,
        raw=measure(np.array([confidence_at(one, tokens)[0].score for one in second]), second),
        alone=measure(probabilities(None), second),
        joined=measure(probabilities(quality), second),
    )


def probability_at(
    calibrator: ConfidenceCalibrator, one: GradedAnswer, tokens: int, quality: Callable[[str], float] | None = None
) -> float:
    """Return the probability that a handoff after `tokens` tokens compares with its threshold."""
    confidence, ended = confidence_at(one, tokens)
    return calibrator(confidence, tokens, None if quality is None else quality(one.text), ended=ended)


def confidence_at(one: GradedAnswer, tokens: int) -> tuple[Confidence, bool]:
    """Return the confidence at the handoff decision after `tokens` tokens, and whether the answer has ended by then."""
    length = len(one.confidences)
    return one.confidences[min(tokens, length) - 1], length <= tokens and length < CONFIDENCE_TOKENS


def _stage(graded: Sequence[GradedAnswer], quality_odds: Sequence[float], tokens: int) -> CalibrationStage:
    alone = np.array([calibration_inputs(*confidence_at(one, tokens)) for one in graded])
    joined = np.concatenate([alone, np.array(quality_odds)[:, None]], axis=1)
    truth, weights = correctness(graded), traffic_weights(graded)
    return CalibrationStage(
        tokens, alone=fit_logistic(alone, truth, weights), joined=fit_logistic(joined, truth, weights)
    )
