"""The quality of any number of models' answers to a prompt, from the prompt alone: for `best_of` in a policy.

`causeway-models candidates` fits it on graded answers of all the models and writes it as JSON: for each model a
logistic regression over the prompt (the inputs of a pair's `edge.quality`), or the graded answers to the prompts whose
vectors are nearest; held-out rows choose which. Every file states the version of its format, and a device refuses a
version that it does not know. It belongs to one version of each model that it names, and one sentence encoder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..catalog.artifact import (
    Artifact,
    ArtifactError,
    ArtifactNotFound,
    ArtifactUnreadable,
    find_artifact,
    find_signal,
    list_artifacts,
)
from .calibration import LinearLogit
from .encoder import SentenceEncoder, Vector
from .pair import Encode, ModelIdentity, prompt_features

KIND: Literal["candidates"] = "candidates"
_RECENT_PROMPTS = 16


class CandidateModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model whose answers were graded. `answer_tokens`: the mean length of its answers, None if it was not given."""

    identity: ModelIdentity
    answer_tokens: float | None = None


class Logistic(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="logistic"):
    """Has one regression for each model, in the order of the models."""

    logits: tuple[LinearLogit, ...]

    def __call__(self, inputs: Sequence[float], vector: Vector) -> tuple[float, ...]:
        """Return the probability of each model. `inputs`: `pair.prompt_features`."""
        return tuple(logit(inputs) for logit in self.logits)

    def fits(self, models: int, inputs: int, dimensions: int) -> bool:
        """Return whether it has these numbers of models and inputs."""
        return len(self.logits) == models and all(len(logit.weights) == inputs for logit in self.logits)


class Neighbours(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="neighbours"):
    """The mean grade of the `count` nearest prompts, and `prior` times the mean of all.

    `vectors`: int8 [prompts, dimensions], unit vectors times 127; `grades`: float32 [models, prompts], 0 to 1.
    """

    count: int
    prior: float
    vectors: bytes
    grades: bytes

    def __call__(self, inputs: Sequence[float], vector: Vector) -> tuple[float, ...]:
        """Return the probability of each model. `vector`: the prompt's, float32 [dimensions]."""
        known = self.known(len(vector))
        grades: NDArray[np.float32] = np.frombuffer(self.grades, np.float32).reshape(-1, len(known))
        nearest = np.argsort(-(known @ vector), kind="stable")[: self.count]
        means = (grades[:, nearest].sum(axis=1) + self.prior * grades.mean(axis=1)) / (len(nearest) + self.prior)
        return tuple(means.tolist())

    def known(self, dimensions: int) -> NDArray[np.float32]:
        """Return the vectors, float32 [prompts, dimensions]."""
        return np.frombuffer(self.vectors, np.int8).reshape(-1, dimensions).astype(np.float32)

    def fits(self, models: int, inputs: int, dimensions: int) -> bool:
        """Return whether it has these numbers of models and dimensions, and at least one prompt."""
        prompts, rest = divmod(len(self.vectors), dimensions)
        return prompts > 0 and not rest and len(self.grades) == 4 * models * prompts and self.count > 0


class CandidateParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of the file."""

    version: Literal[1]
    models: tuple[CandidateModel, ...]
    encoder_sha256: str
    estimator: Logistic | Neighbours


class CandidateEstimator:
    """The estimates of one file. A prompt takes about 0.1 ms with regressions, 0.5 ms with 1,000 neighbours.

    `qualities`: the probability, 0 to 1, of each model that its answer to a prompt is right, by the model's name.
    """

    def __init__(self, parameters: CandidateParameters, encoder: Encode) -> None:
        """Check and keep `parameters`. Raises ArtifactError if numbers of models, inputs or prompts do not fit."""
        inputs, dimensions = len(prompt_features("", encoder)), len(encoder(""))
        if not parameters.models or not parameters.estimator.fits(len(parameters.models), inputs, dimensions):
            raise ArtifactError(
                f"the estimates of {len(parameters.models)} models do not have {inputs} inputs for each model"
            )
        self.parameters = parameters
        self.models: Mapping[str, CandidateModel] = {one.identity.name: one for one in parameters.models}
        self._estimator = parameters.estimator
        self._encoder = encoder
        self.qualities: Callable[[str], Mapping[str, float]] = lru_cache(_RECENT_PROMPTS)(self._qualities)

    def _qualities(self, text: str) -> Mapping[str, float]:
        vector = self._encoder(text)
        found = self._estimator(prompt_features(text, lambda _: vector), vector)
        return dict(zip(self.models, found, strict=True))


def find_candidates(models: Sequence[str], extra_dirs: Sequence[Path] = ()) -> CandidateEstimator:
    """Find and load the estimates that cover these models.

    Raises ArtifactNotFound if none covers all, ArtifactUnreadable for a file or format, and ArtifactError for other
    weights or another encoder.
    """
    faults: list[ArtifactError] = []
    for signal in list_artifacts(extra_dirs):
        if signal.manifest.signal != KIND:
            continue
        try:
            return load_candidates(signal, models, extra_dirs)
        except ArtifactNotFound:
            continue
        except ArtifactError as error:
            faults.append(error)
    if faults:
        raise faults[0]
    raise ArtifactNotFound(f"no estimates cover {', '.join(models)}")


def load_candidates(signal: Artifact, models: Sequence[str], extra_dirs: Sequence[Path]) -> CandidateEstimator:
    """Load one file; see `find_candidates` for arguments and errors."""
    try:
        parameters = msgspec.json.decode(signal.path.read_bytes(), type=CandidateParameters)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ArtifactUnreadable(f"{signal.path}: {error}") from error
    try:
        encoder = check_weights(parameters, models, extra_dirs)
    except ArtifactError as error:
        raise type(error)(f"{signal.path}: {error}") from error
    return CandidateEstimator(parameters, SentenceEncoder(encoder.path))


def check_weights(parameters: CandidateParameters, models: Sequence[str], extra_dirs: Sequence[Path]) -> Artifact:
    """Check that estimates cover these models with the weights that are here; return the sentence encoder.

    Raises ArtifactNotFound if a model is not covered, ArtifactError for other weights of a model or the encoder.
    """
    known = {one.identity.name: one.identity.sha256 for one in parameters.models}
    if not set(models) <= known.keys():
        raise ArtifactNotFound(f"covers {', '.join(known)}")
    encoder = find_signal("embedding", None, extra_dirs)
    for name, expected in [*((name, known[name]) for name in models), (encoder.name, parameters.encoder_sha256)]:
        try:
            found = find_artifact(name, extra_dirs).manifest.sha256
        except ArtifactNotFound:
            continue  # only the cloud has the weights
        if expected not in ("", found):
            raise ArtifactError(f"the estimates were made for other weights of {name}: sha256 {expected}")
    return encoder
