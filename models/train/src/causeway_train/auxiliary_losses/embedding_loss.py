"""An auxiliary loss: the network predicts a sentence encoder's vector of the message.

A few thousand commands do not teach that "volume" and "loudness" are similar; an encoder trained on a thousand million
sentences knows it. During training, a linear map of the state from which the function is predicted must also predict
the encoder's vector of the message (distillation from a teacher's inner states: Romero et al. 2015, arXiv 1412.6550).
The map is discarded after training. With a function teacher, the vectors are the teacher's, of all texts it labelled.
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

from causeway_server.models.signals.encoder import SentenceEncoder

TEXTS, VECTORS = "embedding_texts.json", "sentence_embeddings.npy"
NO_EMBEDDING = -1  # index of a text without a vector


class SentenceEmbeddings:
    """Sentence vectors float32 [texts, n] of length 1, and the index of each text."""

    def __init__(self, texts: Sequence[str], vectors: Tensor) -> None:
        self.vectors = vectors
        self._index = {text: index for index, text in enumerate(texts)}

    @classmethod
    def load_or_compute(cls, encoder: Path, texts: Sequence[str], folder: Path) -> SentenceEmbeddings:
        """Load the vectors in `folder`, or compute those of `texts` with the ONNX file `encoder` and save them."""
        if not has_embeddings(folder):
            distinct = list(dict.fromkeys(texts))
            save_embeddings(distinct, np.stack(list(map(SentenceEncoder(encoder), distinct))), folder)
        return cls.load(folder)

    @classmethod
    def load(cls, folder: Path) -> SentenceEmbeddings:
        """Load what `save_embeddings` wrote."""
        texts = msgspec.json.decode((folder / TEXTS).read_bytes(), type=list[str])
        vectors = np.load(folder / VECTORS, allow_pickle=False).astype(np.float32)
        return cls(texts, functional.normalize(torch.from_numpy(vectors), dim=-1))

    def index_of(self, text: str) -> int:
        """Return the row of the text's vector, or NO_EMBEDDING."""
        return self._index.get(text, NO_EMBEDDING)


def save_embeddings(texts: Sequence[str], vectors: NDArray[np.floating], folder: Path) -> None:
    """Write the texts and their vectors [texts, n] to `folder`, at half precision."""
    partial = folder / f"partial.{VECTORS}"
    (folder / TEXTS).write_bytes(msgspec.json.encode(list(texts)))
    np.save(partial, vectors.astype(np.float16))
    partial.replace(folder / VECTORS)


def has_embeddings(folder: Path) -> bool:
    return (folder / VECTORS).is_file()


class EmbeddingProjection(nn.Module):
    """Linear map from the network's states to the encoder's vectors."""

    def __init__(self, width: int, embeddings: SentenceEmbeddings) -> None:
        super().__init__()
        self.map = nn.Linear(width, embeddings.vectors.shape[1])
        self._vectors = embeddings.vectors

    def loss(self, states: Tensor, indices: Sequence[int]) -> Tensor:
        """Return one minus the mean cosine over the texts that have a vector, 0 if none has.

        Args:
            states: [n, width].
            indices: rows of the vectors, as `SentenceEmbeddings.index_of` returns them.
        """
        known = torch.tensor([index != NO_EMBEDDING for index in indices], device=states.device)
        if not known.any():
            return torch.zeros((), device=states.device)
        target = self._vectors[[index for index in indices if index != NO_EMBEDDING]].to(states.device)
        return 1.0 - functional.cosine_similarity(self.map(states[known].float()), target).mean()
