"""`edge.quality`: the probability that the device's model will answer a prompt rightly, from the prompt alone.

Hashed words, pairs of words and word ends → mean of their vectors → a small network → a calibrated probability, in
one ONNX graph. It is trained on the device model's own measured mistakes, so it belongs to one version of that model:
`judges_sha256` in its manifest says which.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..catalog.artifact import Artifact, ArtifactError
from .onnx_graph import OnnxGraph

BUCKETS = 1 << 15
WORDS = 48  # of a long prompt, the first ones; its length is a feature of its own
CHARACTERS = 2048  # looked at
_WORD = re.compile(r"\w+|[^\w\s]")


class QualityEstimator:
    """A loaded estimator; a call takes some tens of microseconds."""

    def __init__(self, path: Path) -> None:
        self._graph = OnnxGraph(path)

    @classmethod
    def beside(cls, estimator: Artifact, model: Artifact) -> QualityEstimator:
        """The estimator, if it judges exactly this `model`. Raises ArtifactError otherwise."""
        judged = estimator.manifest.judges_sha256
        if judged != model.manifest.sha256:
            raise ArtifactError(f"{estimator.path}: judges another version of {model.name} (sha256 {judged})")
        return cls(estimator.path)

    def __call__(self, prompt: str) -> float:
        """0..1 for the last user message."""
        return float(self._graph({"features": features(prompt)})[0])


def features(text: str) -> NDArray[np.int64]:
    """Bucket numbers, int64 [at least 1]."""
    words = _WORD.findall(text[:CHARACTERS].lower())
    length = f"length {min(len(words), 40)}"
    kept = words[:WORDS]
    names = [length, *kept]
    names += [f"{left} {right}" for left, right in zip(["^", *kept], [*kept, "$"], strict=True)]
    names += [f"{word[:4]}-" for word in kept if len(word) > 4]
    names += [f"-{word[-3:]}" for word in kept if len(word) > 4]
    return np.fromiter((zlib.crc32(name.encode()) % BUCKETS for name in names), dtype=np.int64, count=len(names))
