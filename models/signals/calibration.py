"""The probability that the device's answer is right, from the confidence of its first tokens.

The file is JSON: for each number of tokens that a handoff may wait for, one logistic regression, and another one with
`edge.quality` as an additional input. A further regression lowers the probability for spoken requests by the
transcript's confidence. A call takes about two microseconds and needs no ONNX. Like `edge.quality`, a calibrator
belongs to one version of a model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from causeway_server.router.types import Confidence

from ..catalog.artifact import ArtifactError

_MIN_PROBABILITY = 1e-4  # log odds are taken of probabilities clipped to [1e-4, 1 - 1e-4]
_MAX_LOG_ODDS = 30.0
REFITS_FILE: Final = "refits-1.json"
MAX_SLOPE: Final = 4.0  # of a correction, whose slope is at least the reciprocal of it
MAX_OFFSET: Final = 3.0
_Count = Annotated[int, Meta(ge=0, le=10**9)]
_Offset = Annotated[float, Meta(ge=-MAX_OFFSET, le=MAX_OFFSET)]


class LinearLogit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Logistic regression: log odds = `weights` · inputs + `bias`."""

    weights: tuple[float, ...]
    bias: float

    def __call__(self, inputs: Sequence[float]) -> float:
        """Return the probability, 0 to 1. Raises ValueError for another number of inputs than weights."""
        return probability_of(
            self.bias + sum(weight * value for weight, value in zip(self.weights, inputs, strict=True))
        )


class Correction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A device's correction of a calibrated probability: its log odds become `slope` · log odds + `offset` + the offset
    of the prompt's kind in `kinds`. It keeps the order of the probabilities of one kind.
    """

    slope: Annotated[float, Meta(ge=1 / MAX_SLOPE, le=MAX_SLOPE)] = 1.0
    offset: _Offset = 0.0
    kinds: tuple[_Offset, ...] = ()  # a further kind has none

    def odds(self, odds: float, kind: int) -> float:
        """Return the corrected log odds."""
        return self.slope * odds + self.offset + (self.kinds[kind] if kind < len(self.kinds) else 0.0)

    def __call__(self, probability: float, kind: int) -> float:
        """Return the corrected probability, 0 to 1."""
        return probability_of(self.odds(log_odds(probability), kind))


class Refit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A device's correction of the signals whose file has the digest `signals_sha256`, fitted at Unix seconds `at` on
    so many `labels`. `gain`: log loss that it saves, nats per label that the fit did not see.
    """

    signals_sha256: str
    number: _Count
    at: Annotated[float, Meta(ge=0.0, le=4e9)]
    labels: _Count
    gain: float
    quality: Correction
    confidence: Correction

    @property
    def name(self) -> str:
        return f"refit {self.number} of {datetime.fromtimestamp(self.at, UTC):%Y-%m-%dT%H:%MZ}"

    @property
    def sentence(self) -> str:
        return f"{self.name}, on {self.labels} labels, saves {self.gain:.3f} nats of log loss a label"


def read_refits(directory: Path) -> list[Refit]:
    """Return the refits in a state folder. Raises OSError, ValueError."""
    try:
        return msgspec.json.decode((directory / REFITS_FILE).read_bytes(), type=list[Refit])
    except FileNotFoundError:
        return []


class CalibrationStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The regressions for a handoff after `tokens` tokens; `joined` also takes `edge.quality`'s log odds."""

    tokens: int
    alone: LinearLogit
    joined: LinearLogit


class CalibrationParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a calibrator's file: at least one stage, in ascending order of `tokens`.

    `spoken`: regression for spoken requests; its inputs are the log odds of the probability as for a typed request, and
    of the transcript's confidence. None: spoken requests are treated as typed ones.
    """

    stages: tuple[CalibrationStage, ...]
    spoken: LinearLogit | None = None


class ConfidenceCalibrator:
    """Maps the engine's confidence to the probability that the answer is right."""

    def __init__(self, parameters: CalibrationParameters) -> None:
        """Check and keep `parameters`. Raises ArtifactError without a stage, or for a wrong number of weights."""
        fits = all(
            len(stage.alone.weights) == INPUT_COUNT and len(stage.joined.weights) == INPUT_COUNT + 1
            for stage in parameters.stages
        )
        if not parameters.stages or not fits:
            raise ArtifactError(f"each stage of a calibrator must have {INPUT_COUNT} and {INPUT_COUNT + 1} weights")
        if parameters.spoken is not None and len(parameters.spoken.weights) != SPOKEN_INPUTS:
            raise ArtifactError(f"a calibrator's stage for spoken requests must have {SPOKEN_INPUTS} weights")
        self._stages = parameters.stages
        self._spoken = parameters.spoken

    @classmethod
    def load(cls, path: Path) -> ConfidenceCalibrator:
        """Read a calibrator. Raises ArtifactError: the file is missing or malformed."""
        try:
            return cls(msgspec.json.decode(path.read_bytes(), type=CalibrationParameters))
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ArtifactError(f"{path}: {error}") from error

    def __call__(
        self,
        confidence: Confidence,
        after: int,
        quality: float | None = None,
        *,
        ended: bool,
        transcript_confidence: float | None = None,
    ) -> float:
        """Return the probability, 0 to 1, that the answer is right.

        Args:
            confidence: The engine's confidence so far.
            after: The number of tokens that the handoff waits for; selects the stage.
            quality: `edge.quality` of the prompt, if it is known.
            ended: `confidence` covers all tokens of the answer.
            transcript_confidence: The confidence of a spoken request's transcript; None if it was typed.
        """
        within = [stage for stage in self._stages if stage.tokens <= after]
        stage = within[-1] if within else self._stages[0]
        values = calibration_inputs(confidence, ended)
        probability = stage.alone(values) if quality is None else stage.joined((*values, log_odds(quality)))
        if transcript_confidence is None or self._spoken is None:
            return probability
        # A request is never surer for having been spoken.
        return min(probability, self._spoken((log_odds(probability), log_odds(transcript_confidence))))


def calibration_inputs(confidence: Confidence, ended: bool) -> tuple[float, ...]:
    """Return the inputs of `CalibrationStage.alone`: the engine's score and its two factors."""
    return (
        log_odds(confidence.score),
        -confidence.logprob,
        confidence.margin,
        confidence.entropy,
        log_odds(confidence.refusal),
        float(confidence.tokens),
        float(ended),
    )


def probability_of(odds: float) -> float:
    """Return the probability with these log odds, which are clipped to ±30."""
    return 1 / (1 + math.exp(-min(max(odds, -_MAX_LOG_ODDS), _MAX_LOG_ODDS)))


def log_odds(probability: float) -> float:
    """Return log(p / (1 - p)), with p clipped so that the result is finite."""
    clipped = min(max(probability, _MIN_PROBABILITY), 1 - _MIN_PROBABILITY)
    return math.log(clipped / (1 - clipped))


SPOKEN_INPUTS = 2
INPUT_COUNT = len(calibration_inputs(Confidence(1, 1.0, 0.0, 1.0, 0.0), ended=False))
