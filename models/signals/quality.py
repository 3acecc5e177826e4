"""`edge.quality`: the probability that the device's model will answer a prompt correctly, from the prompt alone.

Hashed words, word pairs and word affixes -> mean of their vectors -> a small network -> a calibrated probability, in
one ONNX graph. It is trained on the measured mistakes of the device's model and therefore belongs to one version of
it, named by `judges_sha256` in the manifest.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .onnx_graph import OnnxGraph

BUCKETS = 1 << 15
WORDS = 48  # the first words of a long prompt; the length is a feature of its own
CHARACTERS = 2048  # a longer text is cut there first
_WORD = re.compile(r"\w+|[^\w\s]")


class QualityEstimator:
    """A loaded estimator; a call takes some tens of microseconds."""

    def __init__(self, path: Path) -> None:
        self._graph = OnnxGraph(path)

    def __call__(self, prompt: str) -> float:
        """Return the probability, 0 to 1, for `prompt`, the last user message."""
        return float(self._graph({"features": features(prompt)})[0])


def features(text: str) -> NDArray[np.int64]:
    """Hash `text` into bucket numbers: int64 [n], n at least 1."""
    words = _WORD.findall(text[:CHARACTERS].lower())
    length = f"length {min(len(words), 40)}"
    first = words[:WORDS]
    names = [length, *first]
    names += [f"{left} {right}" for left, right in zip(["^", *first], [*first, "$"], strict=True)]
    names += [f"{word[:4]}-" for word in first if len(word) > 4]
    names += [f"-{word[-3:]}" for word in first if len(word) > 4]
    return np.fromiter((zlib.crc32(name.encode()) % BUCKETS for name in names), dtype=np.int64, count=len(names))
