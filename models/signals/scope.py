"""Out-of-scope detection: the probability that none of the trained intents fits a text, from the prompt alone.

Three views of the text (the sentence encoder's vector, hashed words and word pairs, hashed character n-grams), each
with a linear head over the intents. The features are the entropy of the heads' joint distribution, the distance to the
nearest training text, and the distance to the nearest training text of the likeliest intent; a logistic regression
combines them. One ONNX graph, int8. Where a model's own confidence is known, a second regression adds it.
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

ALONE_KEY, JOINED_KEY = "causeway.alone", "causeway.joined"
BUCKETS = 1 << 13
CHARACTERS = 200  # n-grams are taken from the first characters of a long text


class ScopeEstimator:
    """A loaded estimator; a call takes a fraction of a millisecond."""

    def __init__(self, path: Path, encoder: SentenceEncoder) -> None:
        """Load `path`, which reads the vectors of `encoder`.

        Raises:
            ArtifactError: the file is not an out-of-scope estimator.
        """
        self._graph, self._encoder = OnnxGraph(path), encoder
        metadata = self._graph.metadata
        try:
            self._alone, self._joined = (
                msgspec.json.decode(metadata[key], type=LinearLogit) for key in (ALONE_KEY, JOINED_KEY)
            )
        except (KeyError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ArtifactError(f"{path}: not an out-of-scope estimator ({error})") from error
        if set(self._graph.inputs) != {"embedding", "words", "letters"}:
            raise ArtifactError(f"{path}: not an out-of-scope estimator (it takes {self._graph.inputs})")

    @classmethod
    def for_encoder(cls, estimator: Artifact, encoder: Artifact) -> ScopeEstimator:
        """Load `estimator` if it was trained on exactly this `encoder`.

        Raises:
            ArtifactError: it was trained on another version, or a file is malformed.
        """
        if estimator.manifest.judges_sha256 != encoder.manifest.sha256:
            raise ArtifactError(f"{estimator.path}: made for another version of {encoder.name}")
        return cls(estimator.path, SentenceEncoder(encoder.path))

    def __call__(self, text: str, confidence: Confidence | None = None) -> float:
        """Return the probability, 0 to 1, that no intent fits `text`.

        Args:
            text: the prompt.
            confidence: that of a model's first tokens, once it has begun to answer.
        """
        alone = self._alone(self.novelty(text))
        return alone if confidence is None else self._joined((log_odds(alone), *joined_inputs(confidence)))

    def novelty(self, text: str) -> tuple[float, ...]:
        """Return the entropy of the heads (nats), the distance (1 - cosine) to the nearest training text, and the
        distance to the nearest one of the likeliest intent.
        """
        return tuple(float(value) for value in self._graph(self._inputs(text)))

    def intent(self, text: str) -> int:
        """Return the index of the likeliest intent, in the order of their names."""
        return int(self._graph(self._inputs(text), "odds").argmax())

    def _inputs(self, text: str) -> Arrays:
        return {"embedding": self._encoder(text), "words": words(text), "letters": letters(text)}


def words(text: str) -> NDArray[np.int64]:
    """Hash words, word pairs and word affixes into buckets; the length is left out."""
    buckets: NDArray[np.int64] = features(text)[1:] % BUCKETS
    return buckets


def letters(text: str) -> NDArray[np.int64]:
    """Hash byte n-grams of length 3, 4 and 5 into buckets; at least one."""
    padded = f" {text[:CHARACTERS].lower()} ".encode()
    ngrams = [padded[at : at + size] for size in (3, 4, 5) for at in range(max(1, len(padded) - size + 1))]
    return np.fromiter((zlib.crc32(ngram) % BUCKETS for ngram in ngrams), dtype=np.int64, count=len(ngrams))


def joined_inputs(confidence: Confidence) -> tuple[float, ...]:
    """Return the inputs that a model's first tokens add."""
    return (log_odds(confidence.refusal), log_odds(confidence.score))
