"""Out of scope, from the prompt alone: how probable it is that none of the intents that were taught fits a text.

Three views of the text (the sentence encoder's vector, hashed words with their pairs, hashed runs of letters), each
with a linear head over the intents; what counts is how undecided they are together (entropy), how far the nearest
taught text is, how far the nearest one of the likeliest intent is, and a line over these. One ONNX graph, int8. Where a
model's own confidence is known, a second line joins it in.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from router.types import Confidence

from ..catalog.artifact import Artifact, ArtifactError
from .calibration import LinearLogit, log_odds
from .encoder import SentenceEncoder
from .onnx_graph import Arrays, OnnxGraph
from .quality import features

ALONE, JOINED = "causeway.alone", "causeway.joined"
BUCKETS = 1 << 13
CHARACTERS = 200  # of a long text, whose runs are hashed


class ScopeEstimator:
    """A loaded estimator; a call takes a fraction of a millisecond."""

    def __init__(self, path: Path, encoder: SentenceEncoder) -> None:
        """Raises ArtifactError when the file is none of these."""
        self._graph, self._encoder = OnnxGraph(path), encoder
        about = self._graph.metadata
        try:
            self._alone, self._joined = (msgspec.json.decode(about[key], type=LinearLogit) for key in (ALONE, JOINED))
        except (KeyError, msgspec.DecodeError) as error:
            raise ArtifactError(f"{path}: no estimate of what is out of scope ({error})") from error
        if set(self._graph.inputs) != {"embedding", "words", "letters"}:
            raise ArtifactError(f"{path}: no estimate of what is out of scope (it takes {self._graph.inputs})")

    @classmethod
    def beside(cls, estimator: Artifact, encoder: Artifact) -> ScopeEstimator:
        """The estimator, if it was taught on exactly this encoder. Raises ArtifactError otherwise."""
        if estimator.manifest.judges_sha256 != encoder.manifest.sha256:
            raise ArtifactError(f"{estimator.path}: belongs to another version of {encoder.name}")
        return cls(estimator.path, SentenceEncoder(encoder.path))

    def __call__(self, text: str, confidence: Confidence | None = None) -> float:
        """0..1, the probability that no intent fits; with `confidence`, after a model has begun to answer."""
        alone = self._alone(self.told(text))
        return alone if confidence is None else self._joined((log_odds(alone), *joined_inputs(confidence)))

    def told(self, text: str) -> tuple[float, ...]:
        """How undecided the heads are (nats), and how far the nearest taught text is (1 - cosine): any, and one of
        the likeliest intent.
        """
        return tuple(float(one) for one in self._graph(self._inputs(text)))

    def intent(self, text: str) -> int:
        """The number of the likeliest intent, in the order of their names."""
        return int(self._graph(self._inputs(text), "odds").argmax())

    def _inputs(self, text: str) -> Arrays:
        return {"embedding": self._encoder(text), "words": words(text), "letters": letters(text)}


def words(text: str) -> NDArray[np.int64]:
    """Buckets of words, pairs of words and word ends, without the length."""
    found: NDArray[np.int64] = features(text)[1:] % BUCKETS
    return found


def letters(text: str) -> NDArray[np.int64]:
    """Buckets of three, four and five characters in a row; at least one."""
    padded = f" {text[:CHARACTERS].lower()} ".encode()
    runs = [padded[at : at + size] for size in (3, 4, 5) for at in range(max(1, len(padded) - size + 1))]
    return np.fromiter((zlib.crc32(run) % BUCKETS for run in runs), dtype=np.int64, count=len(runs))


def joined_inputs(confidence: Confidence) -> tuple[float, ...]:
    """What a model's first tokens add."""
    return (log_odds(confidence.refusal), log_odds(confidence.score))
