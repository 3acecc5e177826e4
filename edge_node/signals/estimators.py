"""What is estimated about one request: `edge.quality` before the device is asked, and what its first tokens are worth.

Both are learned, and belong to exactly one version of a model. Only what the policy in force names is loaded; what
cannot be had is absent: a rule that needs `edge.quality` does not hold, and a handoff compares the engine's own score.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from models.catalog.artifact import Artifact, ArtifactError, ArtifactNotFound, find_artifact
from models.signals.calibration import ConfidenceCalibrator
from models.signals.lookup import SignalKind, find_signal
from router.policy.compiled import Policy
from router.types import Chunk, Message, Request, TextPart

from ..backends.backend import BackendRequest

if TYPE_CHECKING:
    from models.signals.quality import QualityEstimator

log = logging.getLogger(__name__)

QUALITY = "edge.quality"
_T = TypeVar("_T")


class LearnedEstimators:
    """`extra_dirs`: folders searched for models before those that ship."""

    def __init__(self, extra_dirs: Sequence[Path] = ()) -> None:
        self._dirs = extra_dirs
        self._qualities: dict[str, QualityEstimator] = {}  # by the model that they judge
        self._calibrators: dict[str, ConfidenceCalibrator] = {}

    def activate(self, policy: Policy) -> None:
        """From now on what this policy names. Takes milliseconds; never raises."""
        edge = list(dict.fromkeys(target.model for target in policy.targets if target.at == "edge"))
        judged = edge[:1] if QUALITY in policy.needs else []
        handed = [model for model in edge if any(route.handoff is not None for route in policy.routes)]
        self._qualities = {model: found for model in judged if (found := self._quality(model)) is not None}
        self._calibrators = {model: line for model in handed if (line := self._calibrator(model)) is not None}

    def quality(self, policy: Policy, request: Request) -> float | None:
        """`edge.quality` of the first edge target's model for the last user message; None where nobody can tell."""
        model = next((target.model for target in policy.targets if target.at == "edge"), "")
        quality = self._qualities.get(model)
        text = _asked(request)
        return None if quality is None or text is None else quality(text)

    def calibrate(self, call: BackendRequest, chunk: Chunk, quality: float | None) -> Chunk:
        """The same chunk with its confidence's score as a probability, if a calibrator belongs to the call's model."""
        calibrator = self._calibrators.get(call.target.model)
        if calibrator is None or chunk.confidence is None:
            return chunk
        ended = chunk.finish_reason is not None
        score = calibrator(chunk.confidence, call.confidence_tokens, quality, ended=ended)
        return msgspec.structs.replace(chunk, confidence=msgspec.structs.replace(chunk.confidence, score=score))

    def _quality(self, model: str) -> QualityEstimator | None:
        try:
            return load_quality_estimator(model, self._dirs)
        except (ArtifactError, ImportError) as error:
            log.warning("the policy names %s, which is absent here: %s", QUALITY, error)
            return None

    def _calibrator(self, model: str) -> ConfidenceCalibrator | None:
        try:
            return load_calibrator(model, self._dirs)
        except ArtifactNotFound:
            return None  # most models have none
        except ArtifactError as error:
            log.warning("the confidence of %s stays as the engine reports it: %s", model, error)
            return None


def load_quality_estimator(model: str, extra_dirs: Sequence[Path]) -> QualityEstimator:
    """Raises ArtifactError when none judges this model, ImportError when ONNX Runtime is not installed."""
    # Not before a policy wants it: ONNX Runtime takes memory, and a box need not have it.
    from models.signals.quality import QualityEstimator

    return _beside("edge.quality", model, extra_dirs, QualityEstimator.for_model)


def load_calibrator(model: str, extra_dirs: Sequence[Path]) -> ConfidenceCalibrator:
    """Raises ArtifactNotFound when none judges this model, ArtifactError when it is broken."""
    return _beside("confidence", model, extra_dirs, ConfidenceCalibrator.for_model)


def _beside(kind: SignalKind, model: str, extra_dirs: Sequence[Path], load: Callable[[Artifact, Artifact], _T]) -> _T:
    judged = find_artifact(model, extra_dirs)
    return load(find_signal(kind, judged, extra_dirs), judged)


def _asked(request: Request) -> str | None:
    """The last user message, or the first prompt if it is text; None for what has no answer to judge."""
    if request.kind == "embedding":
        return None
    if request.kind == "completion":
        return next((prompt for prompt in request.prompts if isinstance(prompt, str)), None)
    return next((_text(message) for message in reversed(request.messages) if message.role == "user"), None)


def _text(message: Message) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    return " ".join(part.text for part in message.content if isinstance(part, TextPart))
