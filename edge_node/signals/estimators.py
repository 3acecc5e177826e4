"""Learned estimates of one request: `edge.quality` before the device answers, calibrated confidence afterwards.

Each estimator was trained for exactly one version of a model. Only the estimators that the active policy needs are
loaded. Without one, a rule that needs `edge.quality` does not hold, and a handoff compares the engine's raw score.
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
    """The estimators of the active policy.

    Args:
        extra_dirs: folders searched for models before those that ship.
        always_quality: estimate `edge.quality` also if the policy does not name it.
    """

    def __init__(self, extra_dirs: Sequence[Path] = (), *, always_quality: bool = False) -> None:
        self._dirs = extra_dirs
        self._always_quality = always_quality
        self._quality_estimators: dict[str, QualityEstimator] = {}  # by model
        self._calibrators: dict[str, ConfidenceCalibrator] = {}  # by model

    def activate(self, policy: Policy) -> None:
        """Load the estimators that this policy needs. Takes milliseconds; never raises."""
        edge_models = list(dict.fromkeys(target.model for target in policy.targets if target.at == "edge"))
        estimated = edge_models[:1] if self._always_quality or QUALITY in policy.needs else []
        calibrated = edge_models if any(route.handoff is not None for route in policy.routes) else []
        self._quality_estimators = {
            model: estimator for model in estimated if (estimator := self._load_quality(model)) is not None
        }
        self._calibrators = {
            model: calibrator for model in calibrated if (calibrator := self._load_calibrator(model)) is not None
        }

    def quality(self, policy: Policy, request: Request) -> float | None:
        """Return `edge.quality`: the first edge target's model on the last user message; None without an estimator."""
        model = next((target.model for target in policy.targets if target.at == "edge"), "")
        estimator = self._quality_estimators.get(model)
        text = _prompt_text(request)
        return None if estimator is None or text is None else estimator(text)

    def calibrate(self, call: BackendRequest, chunk: Chunk, quality: float | None) -> Chunk:
        """Return the chunk with its confidence score as a probability, if the model has a calibrator.

        Args:
            call: The attempt's request, which names the model.
            chunk: A chunk of the answer's first tokens.
            quality: The request's `edge.quality`, if known.
        """
        calibrator = self._calibrators.get(call.target.model)
        if calibrator is None or chunk.confidence is None:
            return chunk
        ended = chunk.finish_reason is not None
        score = calibrator(chunk.confidence, call.confidence_tokens, quality, ended=ended)
        return msgspec.structs.replace(chunk, confidence=msgspec.structs.replace(chunk.confidence, score=score))

    def _load_quality(self, model: str) -> QualityEstimator | None:
        try:
            return load_quality_estimator(model, self._dirs)
        except (ArtifactError, ImportError) as error:
            log.warning("%s stays absent, its estimator cannot be used: %s", QUALITY, error)
            return None

    def _load_calibrator(self, model: str) -> ConfidenceCalibrator | None:
        try:
            return load_calibrator(model, self._dirs)
        except ArtifactNotFound:
            return None  # expected: most models have none
        except ArtifactError as error:
            log.warning("the confidence of %s is not calibrated: %s", model, error)
            return None


def load_quality_estimator(model: str, extra_dirs: Sequence[Path]) -> QualityEstimator:
    """Load the quality estimator of a model.

    Raises:
        ArtifactError: The model has no estimator, or it is broken.
        ImportError: ONNX Runtime is not installed.
    """
    # Imported on demand: ONNX Runtime takes memory and is optional.
    from models.signals.quality import QualityEstimator

    return _load_signal("edge.quality", model, extra_dirs, QualityEstimator.for_model)


def load_calibrator(model: str, extra_dirs: Sequence[Path]) -> ConfidenceCalibrator:
    """Load the confidence calibrator of a model.

    Raises:
        ArtifactNotFound: The model has none.
        ArtifactError: It is broken.
    """
    return _load_signal("confidence", model, extra_dirs, ConfidenceCalibrator.for_model)


def _load_signal(
    kind: SignalKind, model: str, extra_dirs: Sequence[Path], load: Callable[[Artifact, Artifact], _T]
) -> _T:
    artifact = find_artifact(model, extra_dirs)
    return load(find_signal(kind, artifact, extra_dirs), artifact)


def _prompt_text(request: Request) -> str | None:
    """Return the last user message, or the first prompt if it is text; None for an embedding or token ids."""
    if request.kind == "embedding":
        return None
    if request.kind == "completion":
        return next((prompt for prompt in request.prompts if isinstance(prompt, str)), None)
    return next((_text(message) for message in reversed(request.messages) if message.role == "user"), None)


def _text(message: Message) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    return " ".join(part.text for part in message.content if isinstance(part, TextPart))
