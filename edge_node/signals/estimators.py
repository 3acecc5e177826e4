"""Learned estimates of one request: `edge.quality` before the device answers, calibrated confidence afterwards.

Each estimator was trained for exactly one version of a model. If a pair of models of the policy was calibrated
(`causeway-models calibrate`), its signals replace both. Only the estimators that the active policy needs are loaded.
Without one, a rule that needs `edge.quality` does not hold, and a handoff compares the engine's raw score.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from causeway_server.models.catalog.artifact import (
    ArtifactError,
    ArtifactNotFound,
    SignalKind,
    find_artifact,
    find_signal,
    list_artifacts,
)
from causeway_server.models.signals.calibration import ConfidenceCalibrator, Refit
from causeway_server.router.policy.compiled import Policy
from causeway_server.router.types import Chunk, Confidence, Message, Request, TextPart

from ..backends.backend import BackendRequest
from .promises import Promises

if TYPE_CHECKING:
    from causeway_server.models.signals.pair import GoldenAnswer, PairEstimator
    from causeway_server.models.signals.quality import QualityEstimator

log = logging.getLogger(__name__)

QUALITY = "edge.quality"
_T = TypeVar("_T")


class PairEstimates(msgspec.Struct, frozen=True):
    """The estimates of a calibrated pair for one answer, also if it is set aside.

    Attributes:
        sha256: Digest of the pair's signals.
        quality: The prompt's `edge.quality`.
        score: The probability that the handoff compares; None without a confidence. Both are without the device's
            refit.
        kind: The number of the prompt's probable kind.
    """

    sha256: str
    quality: float
    score: float | None
    kind: int


class LearnedEstimators:
    """The estimators of the active policy.

    Args:
        extra_dirs: Folders searched for models before those that ship.
        always_quality: Whether to estimate `edge.quality` also if the policy does not name it.
    """

    def __init__(self, extra_dirs: Sequence[Path] = (), *, always_quality: bool = False) -> None:
        self._dirs = extra_dirs
        self._always_quality = always_quality
        self._quality_estimators: dict[str, QualityEstimator] = {}  # by model
        self._calibrators: dict[str, ConfidenceCalibrator] = {}  # by model
        self._pairs: dict[str, PairEstimator] = {}  # by the edge's model
        self._aside: dict[str, str] = {}  # sha256 of a pair's signals → why they are not used
        self.set_aside_pairs: dict[str, str] = {}
        """The reason for each edge model of the active policy whose calibrated signals are set aside."""
        self.promises = Promises()
        self.refits: dict[str, Refit] | None = None
        """The refits in use by digest of a pair's signals; None: the policy asks for none."""
        self._policy: Policy | None = None

    def activate(self, policy: Policy) -> None:
        """Load the estimators that this policy needs. Takes milliseconds; never raise."""
        self._policy = policy
        judged = judged_models(policy)
        wanted = self._always_quality or QUALITY in policy.needs
        estimated = [model for model in judged if model == _first_edge_model(policy)] if wanted else []
        calibrated = judged if any(route.handoff is not None for route in policy.routes) else []
        self._pairs = self._load(
            dict.fromkeys([*estimated, *calibrated]),
            lambda model, folders: load_pair(model, policy, folders),
            "The calibration of %s is not used: %s",
        )
        self.set_aside_pairs = {
            model: self._aside[pair.sha256] for model, pair in self._pairs.items() if pair.sha256 in self._aside
        }
        self._quality_estimators = self._load(
            [model for model in estimated if self._pair(model) is None],
            load_quality_estimator,
            f"{QUALITY} of %s stays absent, because its estimator cannot be used: %s",
            optional=False,
        )
        self._calibrators = self._load(
            [model for model in calibrated if self._pair(model) is None],
            load_calibrator,
            "The confidence of %s is not calibrated: %s",
        )

    def quality(self, policy: Policy, request: Request) -> float | None:
        """Return `edge.quality`: the first edge target's model on the last user message; None without an estimator."""
        model, text = _first_edge_model(policy), prompt_text(request)
        pair, estimator = self._pair(model), self._quality_estimators.get(model)
        if pair is None or text is None:
            return None if estimator is None or text is None else estimator(text)
        (quality, kind), refit = pair.known(text), self._refit(pair)
        return quality if refit is None else refit.quality(quality, kind)

    def calibrate(
        self, call: BackendRequest, chunk: Chunk, quality: float | None, transcript_confidence: float | None = None
    ) -> Chunk:
        """Return the chunk with its confidence score as a probability, if the model has a calibrator.

        A model with an adapter has no calibrator, because signals are trained on the weights alone.

        Args:
            call: The attempt's request, which names the model.
            quality: The request's `edge.quality`, if known.
            transcript_confidence: Confidence of a spoken request's transcript; None if the request was typed.
        """
        confidence, after, ended = chunk.confidence, call.confidence_tokens, chunk.finish_reason is not None
        pair, calibrator = self._pair(call.target.model), self._calibrators.get(call.target.model)
        if confidence is None or call.target.adapter:
            return chunk
        if pair is not None and (text := prompt_text(call.request)) is not None:
            quality, kind = pair.known(text)
            score = stated = pair(confidence, after, text, quality, ended=ended)
            confidence = msgspec.structs.replace(confidence, kind=kind)
            if (refit := self._refit(pair)) is not None:
                confidence = msgspec.structs.replace(confidence, shipped=stated, calibration=refit.name)
                score = refit.confidence(stated, kind)
        elif calibrator is not None:
            score = calibrator(confidence, after, quality, ended=ended, transcript_confidence=transcript_confidence)
        else:
            return chunk
        return msgspec.structs.replace(chunk, confidence=msgspec.structs.replace(confidence, score=score))

    # --- calibrations that are set aside ---------------------------------------------------------------------------

    def estimate(
        self, model: str, text: str, confidence: Confidence | None, after: int, *, ended: bool
    ) -> PairEstimates | None:
        """Return the estimates of an edge model's calibrated pair; None without a pair.

        Args:
            after: The number of tokens after which the handoff decides.
            ended: Whether `confidence` covers all tokens of the answer.
        """
        pair = self._pairs.get(model)
        if pair is None:
            return None
        quality, kind = pair.known(text)
        score = None if confidence is None else pair(confidence, after, text, quality, ended=ended)
        return PairEstimates(pair.sha256, quality, score, kind)

    def set_aside(self, sha256: str, reason: str) -> None:
        """Stop using the signals with this digest. The model's own signals replace them, if there are any."""
        self._aside[sha256] = reason
        if self._policy is not None:
            self.activate(self._policy)

    def use_again(self, sha256: str) -> None:
        """Use signals again that were set aside."""
        if self._aside.pop(sha256, None) is not None and self._policy is not None:
            self.activate(self._policy)

    @property
    def pairs(self) -> dict[str, str]:
        """Return the digests of the active policy's calibrated signals, used or not, by edge model."""
        return {model: pair.sha256 for model, pair in self._pairs.items()}

    def golden(self, model: str) -> tuple[GoldenAnswer, ...]:
        """Return the golden answers of an edge model's calibrated pair."""
        pair = self._pairs.get(model)
        return () if pair is None else pair.parameters.golden

    def _refit(self, pair: PairEstimator) -> Refit | None:
        return None if self.refits is None else self.refits.get(pair.sha256)

    def _pair(self, model: str) -> PairEstimator | None:
        """Return the signals in use."""
        pair = self._pairs.get(model)
        return None if pair is None or pair.sha256 in self._aside else pair

    def _load(
        self, models: Iterable[str], load: Callable[[str, Sequence[Path]], _T], words: str, *, optional: bool = True
    ) -> dict[str, _T]:
        """Load a signal of each model. An unusable one is logged.

        Args:
            words: The log message, with the model and the error.
            optional: Whether a missing signal is normal, and not logged.
        """
        loaded: dict[str, _T] = {}
        for model in models:
            try:
                loaded[model] = load(model, self._dirs)
            except (ArtifactError, ImportError) as error:
                if not (optional and isinstance(error, ArtifactNotFound)):
                    log.warning(words, model, error)
        return loaded


def load_quality_estimator(model: str, extra_dirs: Sequence[Path]) -> QualityEstimator:
    """Load the quality estimator of a model.

    Raises:
        ArtifactError: The model has no estimator, or it is broken.
        ImportError: ONNX Runtime is not installed.
    """
    # Imported on demand: ONNX Runtime takes memory and is optional.
    from causeway_server.models.signals.quality import QualityEstimator

    return QualityEstimator(_find_signal("edge.quality", model, extra_dirs))


def load_pair(model: str, policy: Policy, extra_dirs: Sequence[Path]) -> PairEstimator:
    """Load the signals of a pair: of `model` beside another model of the policy.

    Raises:
        ArtifactNotFound: No pair with this model is calibrated.
        ArtifactError: A pair is calibrated for other weights or beside another model, or its files are broken.
        ImportError: ONNX Runtime is not installed.
    """
    if all(artifact.manifest.signal != "pair" for artifact in list_artifacts(extra_dirs)):
        raise ArtifactNotFound("No pair of a device's model and a cloud model is calibrated.")
    # Imported on demand, like the quality estimator.
    from causeway_server.models.signals.pair import find_pair

    others = [target.model for target in policy.targets if target.model != model]
    return find_pair(find_artifact(model, extra_dirs), others, extra_dirs)


def load_calibrator(model: str, extra_dirs: Sequence[Path]) -> ConfidenceCalibrator:
    """Load the confidence calibrator of a model.

    Raises:
        ArtifactNotFound: The model has none.
        ArtifactError: It is broken.
    """
    return ConfidenceCalibrator.load(_find_signal("confidence", model, extra_dirs))


def _find_signal(kind: SignalKind, model: str, extra_dirs: Sequence[Path]) -> Path:
    return find_signal(kind, find_artifact(model, extra_dirs), extra_dirs).path


def judged_models(policy: Policy) -> list[str]:
    """Return the edge models that signals can be about: those that answer without an adapter."""
    edge = (target for target in policy.targets if target.at == "edge" and not target.adapter)
    return list(dict.fromkeys(target.model for target in edge))


def _first_edge_model(policy: Policy) -> str:
    return next((target.served for target in policy.targets if target.at == "edge"), "")


def prompt_text(request: Request) -> str | None:
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
