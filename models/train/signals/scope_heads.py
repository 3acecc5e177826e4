"""Linear heads over intents, on three representations of a text: the encoder's vector, hashed words, hashed letters."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...signals.encoder import SentenceEncoder, Vector
from ...signals.scope import BUCKETS, letters, words
from .optimizers import Adam, Array32, Indices

BATCH, RATE, DECAY, DROPOUT = 256, 0.03, 1e-2, 0.3
VECTOR_SCALE = 8.0  # vectors of length 1 are too short for confident logits

Bags = Sequence[Indices]


class TextFeatures(msgspec.Struct, frozen=True):
    """The heads' inputs: one row or bag per text."""

    vectors: Vector
    bags: tuple[Bags, Bags]  # words, letters

    @classmethod
    def of(cls, encoder: SentenceEncoder, texts: Sequence[str]) -> TextFeatures:
        return cls(encoder.encode_all(texts), ([words(text) for text in texts], [letters(text) for text in texts]))

    def __len__(self) -> int:
        return len(self.vectors)

    def select(self, mask: NDArray[np.bool_]) -> TextFeatures:
        """Return the texts where `mask` [texts] is true."""
        first, second = ([bag for bag, chosen in zip(bags, mask, strict=True) if chosen] for bags in self.bags)
        return TextFeatures(self.vectors[mask], (first, second))


class IntentExamples(msgspec.Struct, frozen=True):
    """The training texts that a new one is compared with."""

    vectors: Vector
    intents: Indices

    @classmethod
    def of(cls, features: TextFeatures, intents: Indices) -> IntentExamples:
        return cls(features.vectors, intents)


class IntentHeads:
    """Linear heads over the intents: one on the encoder's vectors, one on hashed words, one on hashed letters."""

    def __init__(self, features: TextFeatures, intents: Indices, seed: int, epochs: int) -> None:
        """Train on texts with the indices of their intents [texts]."""
        count, draw = int(intents.max()) + 1, np.random.default_rng(seed)
        self.intent_count = count
        self._dense = Adam(np.zeros((features.vectors.shape[1], count), np.float32), decay=DECAY)
        self._sparse = [Adam(np.zeros((BUCKETS, count), np.float32), decay=DECAY) for _ in features.bags]
        self._biases = [Adam(np.zeros(count, np.float32)) for _ in range(1 + len(features.bags))]
        for epoch in range(epochs):
            rate = RATE * (1 - epoch / epochs)
            for batch in np.array_split(draw.permutation(len(intents)), -(-len(intents) // BATCH)):
                vectors: Array32 = features.vectors[batch] * np.float32(VECTOR_SCALE)
                gradient = _cross_entropy_gradient(vectors @ self._dense.value + self._biases[0].value, intents[batch])
                self._dense.step(vectors.T @ gradient, rate)
                self._biases[0].step(gradient.sum(axis=0), rate)
                for table, bias, bags in zip(self._sparse, self._biases[1:], features.bags, strict=True):
                    touched, shares = _shares([_drop_features(bags[i], draw) for i in batch])
                    gradient = _cross_entropy_gradient(shares @ table.value[touched] + bias.value, intents[batch])
                    table.step(shares.T @ gradient, rate, touched)
                    bias.step(gradient.sum(axis=0), rate)

    def probabilities(self, features: TextFeatures) -> Array32:
        """Return the mean of the heads' probabilities: float32 [texts, intents]."""
        mean = _softmax(features.vectors @ self.dense + self._biases[0].value)
        for table, bias, bags in zip(self._sparse, self._biases[1:], features.bags, strict=True):
            sums = [table.value[bag].sum(axis=0) / np.float32(max(1, len(bag)) ** 0.5) for bag in bags]
            mean += _softmax(np.stack(sums) + bias.value)
        return mean / np.float32(1 + len(self._sparse))

    @property
    def dense(self) -> Array32:
        return self._dense.value * np.float32(VECTOR_SCALE)

    @property
    def sparse(self) -> tuple[Array32, ...]:
        return tuple(table.value for table in self._sparse)

    @property
    def biases(self) -> tuple[Array32, ...]:
        return tuple(bias.value for bias in self._biases)


def _shares(bags: Bags) -> tuple[Indices, Array32]:
    """Return the distinct features of a batch, and each text's counts of them over the root of its length."""
    touched, columns = np.unique(np.concatenate(bags), return_inverse=True)
    shares = np.zeros((len(bags), len(touched)), np.float32)
    np.add.at(shares, (np.repeat(np.arange(len(bags)), [len(bag) for bag in bags]), columns), 1.0)
    lengths = np.sqrt(np.maximum(1.0, shares.sum(axis=1, keepdims=True)))
    return touched, (shares / lengths).astype(np.float32)


def _drop_features(bag: Indices, draw: np.random.Generator) -> Indices:
    return bag[draw.random(len(bag)) >= DROPOUT]


def _cross_entropy_gradient(logits: Array32, intents: Indices) -> Array32:
    gradient = _softmax(logits)
    gradient[np.arange(len(intents)), intents] -= 1
    gradient /= len(intents)
    return gradient


def _softmax(logits: Array32) -> Array32:
    powers: Array32 = np.exp(logits - logits.max(axis=1, keepdims=True))
    powers /= powers.sum(axis=1, keepdims=True)
    return powers
