"""The probability that the device's answer is right, from the confidence of its first tokens.

Plain numbers in a JSON file: a line on the log odds for every number of tokens that a handoff waits for, and another
for when `edge.quality` is known too. It takes about two microseconds, without ONNX.
It belongs to one version of a model, as `edge.quality` does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from router.types import Confidence

from ..catalog.artifact import Artifact, ArtifactError

_LEAST = 1e-4  # probabilities nearer to 0 or 1 than this say no more


class LinearLogit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Log odds: `weights` times the inputs, plus `bias`."""

    weights: tuple[float, ...]
    bias: float

    def __call__(self, inputs: Sequence[float]) -> float:
        """The probability, 0..1. Raises ValueError when the inputs are not as many as the weights."""
        odds = self.bias + sum(weight * value for weight, value in zip(self.weights, inputs, strict=True))
        return 1 / (1 + math.exp(-min(max(odds, -30.0), 30.0)))


class CalibrationStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For a handoff after `tokens` tokens; `joined` has one weight more, for the log odds of `edge.quality`."""

    tokens: int
    alone: LinearLogit
    joined: LinearLogit


class CalibrationParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the file holds: at least one stage, by rising number of tokens."""

    stages: tuple[CalibrationStage, ...]


class ConfidenceCalibrator:
    """Confidence → probability."""

    def __init__(self, numbers: CalibrationParameters) -> None:
        """Raises ArtifactError when there is no stage, or weights do not fit the inputs."""
        fits = all(
            len(stage.alone.weights) == INPUTS and len(stage.joined.weights) == INPUTS + 1 for stage in numbers.stages
        )
        if not numbers.stages or not fits:
            raise ArtifactError(f"a calibrator has stages of {INPUTS} and {INPUTS + 1} weights")
        self._stages = numbers.stages

    @classmethod
    def load(cls, path: Path) -> ConfidenceCalibrator:
        try:
            return cls(msgspec.json.decode(path.read_bytes(), type=CalibrationParameters))
        except (OSError, msgspec.DecodeError) as error:
            raise ArtifactError(f"{path}: {error}") from error

    @classmethod
    def beside(cls, calibrator: Artifact, model: Artifact) -> ConfidenceCalibrator:
        """The calibrator, if it judges exactly this `model`. Raises ArtifactError otherwise."""
        judged = calibrator.manifest.judges_sha256
        if judged != model.manifest.sha256:
            raise ArtifactError(f"{calibrator.path}: judges another version of {model.name} (sha256 {judged})")
        return cls.load(calibrator.path)

    def __call__(self, confidence: Confidence, after: int, quality: float | None = None, *, ended: bool) -> float:
        """0..1, for a handoff `after` so many tokens. `ended`: these are all tokens of the answer."""
        stage = self._stage(after)
        told = inputs(confidence, ended)
        if quality is None:
            return stage.alone(told)
        return stage.joined((*told, log_odds(quality)))

    def _stage(self, after: int) -> CalibrationStage:
        """The last one that is not beyond `after`."""
        within = [stage for stage in self._stages if stage.tokens <= after]
        return within[-1] if within else self._stages[0]


def inputs(confidence: Confidence, ended: bool) -> tuple[float, ...]:
    """What a line weighs: the engine's own score, and what it was made of."""
    return (
        log_odds(confidence.score),
        -confidence.logprob,
        confidence.margin,
        confidence.entropy,
        log_odds(confidence.refusal),
        float(confidence.tokens),
        float(ended),
    )


def log_odds(probability: float) -> float:
    kept = min(max(probability, _LEAST), 1 - _LEAST)
    return math.log(kept / (1 - kept))


INPUTS = len(inputs(Confidence(1, 1.0, 0.0, 1.0, 0.0), ended=False))
