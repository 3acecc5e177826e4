"""What a sentence encoder makes of the training texts: a lesson in meaning beside the lesson in answers.

A few thousand commands do not teach that "volume" and "loudness" are near each other; an encoder that has read a
thousand million sentences knows. While training, a linear map of the state that names the function has to say the
encoder's vector of the utterance (hints from a teacher's inner states: Romero et al. 2015, arXiv 1412.6550). The map is
dropped afterwards. Where a tutor hints at functions (`hints`), the vectors are the tutor's, of its many texts too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from ...signals.encoder import SentenceEncoder

TEXTS, VECTORS = "texts.json", "meanings.npy"
UNKNOWN = -1  # a text that the encoder was not asked about


class SentenceEmbeddings:
    """The vectors [texts, n], of length 1, and where each text's is."""

    def __init__(self, texts: Sequence[str], vectors: Tensor) -> None:
        self.vectors = vectors
        self._at = {text: index for index, text in enumerate(texts)}

    @classmethod
    def of(cls, encoder: Path, texts: Sequence[str], folder: Path) -> SentenceEmbeddings:
        """Asks the ONNX file `encoder` once; kept in `folder` from then on."""
        if not is_kept(folder):
            wanted = list(dict.fromkeys(texts))
            keep(wanted, SentenceEncoder(encoder).encode_all(wanted), folder)
        return cls.kept(folder)

    @classmethod
    def kept(cls, folder: Path) -> SentenceEmbeddings:
        """What `keep` wrote there."""
        known = msgspec.json.decode((folder / TEXTS).read_bytes(), type=list[str])
        vectors = np.load(folder / VECTORS, allow_pickle=False).astype(np.float32)
        return cls(known, functional.normalize(torch.from_numpy(vectors), dim=-1))

    def at(self, text: str) -> int:
        return self._at.get(text, UNKNOWN)


def keep(texts: Sequence[str], vectors: NDArray[np.floating], folder: Path) -> None:
    """Writes the texts and their vectors [texts, n] into `folder`, at half precision."""
    partial = folder / f"partial.{VECTORS}"
    (folder / TEXTS).write_bytes(msgspec.json.encode(list(texts)))
    np.save(partial, vectors.astype(np.float16))
    partial.replace(folder / VECTORS)


def is_kept(folder: Path) -> bool:
    return (folder / VECTORS).is_file()


class EmbeddingProjection(nn.Module):
    """The linear map from the network's states to the encoder's vectors."""

    def __init__(self, width: int, meanings: SentenceEmbeddings) -> None:
        super().__init__()
        self.map = nn.Linear(width, meanings.vectors.shape[1])
        self._vectors = meanings.vectors

    def loss(self, states: Tensor, places: Sequence[int]) -> Tensor:
        """One minus the cosine, mean over the texts that are known; states [n, width], places as of `Meanings.at`."""
        known = torch.tensor([place != UNKNOWN for place in places], device=states.device)
        if not known.any():
            return torch.zeros((), device=states.device)
        wanted = self._vectors[[place for place in places if place != UNKNOWN]].to(states.device)
        return 1.0 - functional.cosine_similarity(self.map(states[known].float()), wanted).mean()
