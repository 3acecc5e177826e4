"""The two signals that estimate whether the small model of a calibrated pair is good enough: `edge.quality` and
confidence.

`causeway-models calibrate` fits both on the answers of two models, and writes them as JSON. "Good enough" means that
the large model's answer is not better. `edge.quality` is a logistic regression over the prompt: the sentence encoder's
vector, a few structural features, and the small model's expected gain on the prompt's probable kind. The confidence is
another one over the first tokens of the answer, for each number of tokens that a handoff may hold back, with
`edge.quality` and the kind of the prompt as additional inputs.

A file belongs to exactly one version of both models, and to one sentence encoder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import msgspec

from causeway_server.router.types import Confidence

from ..catalog.artifact import Artifact, ArtifactError, ArtifactNotFound, find_artifact, find_signal, list_artifacts
from .calibration import LinearLogit, log_odds
from .encoder import SentenceEncoder, Vector
from .structure import has_choices, structure

_RECENT_PROMPTS = 16


class Encode(Protocol):
    """Returns the sentence vector of a text, as `SentenceEncoder` does."""

    def __call__(self, text: str, /) -> Vector: ...


class ModelIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The identity of a model of the pair. `sha256` is "" if the weights are known only to an endpoint."""

    name: str
    sha256: str = ""


class PairStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The regression for a handoff after `tokens` tokens."""

    tokens: int
    logit: LinearLogit


class KindMixture(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The expected gain of the small model, by a prompt's probable kind: `gains` by the log odds of `kinds`."""

    kinds: tuple[LinearLogit, ...]
    gains: tuple[float, ...]

    def __call__(self, inputs: Sequence[float]) -> float:
        """Return the expected gain, -1 to 1. Raises ValueError for another number of inputs."""
        return self.gain(self.shares(inputs))

    def shares(self, inputs: Sequence[float]) -> list[float]:
        """Return the probability of each kind, which need not add up to 1."""
        return [kind(inputs) for kind in self.kinds]

    def gain(self, shares: Sequence[float]) -> float:
        """Return the expected gain of a prompt whose kinds have these probabilities."""
        return sum(share * gain for share, gain in zip(shares, self.gains, strict=True)) / sum(shares)


class PairHandoff(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The handoff for a policy that meets the goal which the pair was calibrated for."""

    after_tokens: int
    below: float
    within_ms: int


class GoldenAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A graded answer without its content: the number of the prompt's kind, the log odds of both signals by a fit that
    did not see the prompt, and whether the small model's answer was good enough.
    """

    kind: int
    quality: float
    confidence: float
    good: bool


class PairParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A pair's file. `stages`: at least one, by ascending `tokens`. `kinds`: mixture for `quality`'s last input.
    `golden`: answers that a device's refit must not fail.
    """

    small: ModelIdentity
    large: ModelIdentity
    encoder_sha256: str
    quality: LinearLogit
    stages: tuple[PairStage, ...]
    handoff: PairHandoff | None = None
    kinds: KindMixture | None = None
    golden: tuple[GoldenAnswer, ...] = ()


class PairEstimator:
    """The two signals of one pair. They take about 0.1 ms for a prompt, and some microseconds for a held-back token.

    `known`: of a prompt, the probability, 0 to 1, that the small model's answer is good enough, and the number of its
    probable kind, 0 if the pair tells none apart.
    """

    def __init__(self, parameters: PairParameters, encoder: Encode, sha256: str = "") -> None:
        """Check and keep `parameters`; `sha256` is of their file. Raises ArtifactError."""
        inputs = len(prompt_features("", encoder))
        kinds = parameters.kinds
        fits = len(parameters.quality.weights) == inputs + (kinds is not None) and bool(parameters.stages)
        if kinds is not None:
            weights = [len(kind.weights) for kind in kinds.kinds]
            fits = fits and weights == [inputs] * len(kinds.gains) and bool(weights)
        if not fits or any(len(stage.logit.weights) != HANDOFF_INPUTS for stage in parameters.stages):
            need = f"{inputs} weights for a prompt, and {HANDOFF_INPUTS} in each stage of the handoff"
            raise ArtifactError(f"the signals of a pair of models must have {need}")
        self.parameters = parameters
        self.sha256 = sha256
        self._encoder = encoder
        # Each token that is held back asks for the quality of its prompt.
        self.known: Callable[[str], tuple[float, int]] = lru_cache(_RECENT_PROMPTS)(self._known)

    @classmethod
    def for_models(cls, signal: Artifact, small: Artifact, encoder: Artifact) -> PairEstimator:
        """Load `signal` if it was fitted on these weights of `small`, with this encoder. Raises ArtifactError."""
        parameters = read_parameters(signal)
        for part, model, sha256 in (
            ("weights", small, parameters.small.sha256),
            ("word vectors", encoder, parameters.encoder_sha256),
        ):
            if model.manifest.sha256 != sha256:
                raise ArtifactError(
                    f"{signal.path}: the signals were made for {part} with sha256 {sha256}, but {model.name} has "
                    "another sha256"
                )
        return cls(parameters, SentenceEncoder(encoder.path), signal.manifest.sha256)

    def __call__(self, confidence: Confidence, after: int, text: str, quality: float, *, ended: bool) -> float:
        """Return the probability, 0 to 1, that the answer is good enough.

        `confidence`: the engine's so far (of the whole answer if `ended`); `after`: the handoff's tokens, for the
        stage.
        """
        within = [stage for stage in self.parameters.stages if stage.tokens <= after]
        stage = within[-1] if within else self.parameters.stages[0]
        return stage.logit(handoff_inputs(confidence, ended, log_odds(quality), has_choices(text)))

    def quality(self, text: str) -> float:
        """Return the probability, 0 to 1, that the small model's answer to a prompt is good enough."""
        return self.known(text)[0]

    def _known(self, text: str) -> tuple[float, int]:
        inputs, kinds = prompt_features(text, self._encoder), self.parameters.kinds
        if kinds is None:
            return self.parameters.quality(inputs), 0
        shares = kinds.shares(inputs)
        return self.parameters.quality((*inputs, kinds.gain(shares))), shares.index(max(shares))


def find_pair(small: Artifact, others: Sequence[str], extra_dirs: Sequence[Path] = ()) -> PairEstimator:
    """Find and load the signals of `small` beside one of the models `others`, which may take over.

    `extra_dirs` come before the shipped artifacts. Raises ArtifactNotFound if no pair has a model like `small`,
    ArtifactError, with names, if one has other weights or models.
    """
    faults = []
    for signal in list_artifacts(extra_dirs):
        if signal.manifest.signal != "pair":
            continue
        parameters = read_parameters(signal)
        if small.name != parameters.small.name and small.manifest.sha256 != parameters.small.sha256:
            continue
        try:
            return load_pair_file(signal, small, others, extra_dirs)
        except ArtifactError as error:
            faults.append(str(error))
    if faults:
        raise ArtifactError("; ".join(faults))
    raise ArtifactNotFound(f"no pair of models with {small.name} is calibrated")


def load_pair_file(
    signal: Artifact, small: Artifact, others: Sequence[str], extra_dirs: Sequence[Path] = ()
) -> PairEstimator:
    """Load one file's signals, as `find_pair`. Raises ArtifactError for other weights, models or encoders."""
    large = read_parameters(signal).large
    if large.name not in others:
        raise ArtifactError(
            f"{signal.path}: the signals were calibrated beside {large.name}, which is not a target of this policy"
        )
    try:
        found = find_artifact(large.name, extra_dirs).manifest.sha256
    except ArtifactNotFound:
        found = large.sha256  # only the cloud has the weights
    if large.sha256 not in ("", found):
        raise ArtifactError(
            f"{signal.path}: the signals were calibrated beside other weights of {large.name}: sha256 {large.sha256}"
        )
    return PairEstimator.for_models(signal, small, find_signal("embedding", None, extra_dirs))


def read_parameters(signal: Artifact) -> PairParameters:
    """Read the file of a pair's signals. Raises ArtifactError: the file is missing or malformed."""
    try:
        return msgspec.json.decode(signal.path.read_bytes(), type=PairParameters)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{signal.path}: {error}") from error


def prompt_features(text: str, encode: Encode) -> tuple[float, ...]:
    """Return the inputs of `PairParameters.quality`: structural features, then the encoder's vector."""
    vector = encode(text)
    return (*structure(text), *(vector * math.sqrt(len(vector))).tolist())


def handoff_inputs(confidence: Confidence, ended: bool, quality_odds: float, choices: bool) -> tuple[float, ...]:
    """Return the inputs of `PairStage.logit`: the tokens' confidence, separate for prompts with choices, and quality.

    The confidences of a single letter, which answers a question with choices, and of an open answer differ in scale.
    """
    measured = (
        log_odds(confidence.score),
        -confidence.logprob,
        -confidence.least,
        confidence.margin,
        confidence.entropy,
        math.log1p(confidence.tokens),
        float(ended),
    )
    return (*measured, *(value * choices for value in measured), float(choices), quality_odds)


HANDOFF_INPUTS = len(handoff_inputs(Confidence(1, 1.0, 0.0, 1.0, 0.0), False, 0.0, False))
