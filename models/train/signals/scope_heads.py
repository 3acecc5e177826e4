"""Linear heads over intents, on three views of a text: the encoder's vector, hashed words, hashed letters."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...signals.encoder import SentenceEncoder, Vector
from ...signals.scope import BUCKETS, letters, words
from .adam import Adam, Reals

BATCH, RATE, DECAY, DROPOUT = 256, 0.03, 1e-2, 0.3
STRETCH = 8.0  # vectors of length 1 are short for a head that is to be decided

Bags = Sequence[NDArray[np.int64]]


class TextFeatures(msgspec.Struct, frozen=True):
    """Texts as the heads see them."""

    vectors: Vector
    bags: tuple[Bags, Bags]  # words, letters

    @classmethod
    def of(cls, encoder: SentenceEncoder, texts: Sequence[str]) -> TextFeatures:
        return cls(encoder.encode_all(texts), ([words(text) for text in texts], [letters(text) for text in texts]))

    def __len__(self) -> int:
        return len(self.vectors)

    def part(self, kept: NDArray[np.bool_]) -> TextFeatures:
        first, second = ([bag for bag, k in zip(bags, kept, strict=True) if k] for bags in self.bags)
        return TextFeatures(self.vectors[kept], (first, second))


class IntentExamples(msgspec.Struct, frozen=True):
    """The texts that a new one is held against."""

    vectors: Vector
    intents: NDArray[np.int64]

    @classmethod
    def of(cls, views: TextFeatures, intents: NDArray[np.int64]) -> IntentExamples:
        return cls(views.vectors, intents)


class IntentHeads:
    """Linear heads over the intents: one on the encoder's vectors, one on hashed words, one on hashed letters."""

    def __init__(self, views: TextFeatures, intents: NDArray[np.int64], seed: int, epochs: int) -> None:
        kinds, draw = int(intents.max()) + 1, np.random.default_rng(seed)
        self.kinds = kinds
        self._dense = Adam(np.zeros((views.vectors.shape[1], kinds), np.float32), decay=DECAY)
        self._sparse = [Adam(np.zeros((BUCKETS, kinds), np.float32), decay=DECAY) for _ in views.bags]
        self._biases = [Adam(np.zeros(kinds, np.float32)) for _ in range(1 + len(views.bags))]
        for epoch in range(epochs):
            rate = RATE * (1 - epoch / epochs)
            for at in np.array_split(draw.permutation(len(intents)), -(-len(intents) // BATCH)):
                part: Reals = views.vectors[at] * np.float32(STRETCH)
                push = _push(part @ self._dense.value + self._biases[0].value, intents[at])
                self._dense.step(part.T @ push, rate)
                self._biases[0].step(push.sum(axis=0), rate)
                for table, bias, bags in zip(self._sparse, self._biases[1:], views.bags, strict=True):
                    touched, shares = _shares([_thinned(bags[i], draw) for i in at])
                    push = _push(shares @ table.value[touched] + bias.value, intents[at])
                    table.step(shares.T @ push, rate, touched)
                    bias.step(push.sum(axis=0), rate)

    def odds(self, views: TextFeatures) -> Reals:
        """Mean of the heads' probabilities: float32 [texts, intents]."""
        mean = _softmax(views.vectors @ self.dense + self._biases[0].value)
        for table, bias, bags in zip(self._sparse, self._biases[1:], views.bags, strict=True):
            sums = [table.value[bag].sum(axis=0) / np.float32(max(1, len(bag)) ** 0.5) for bag in bags]
            mean += _softmax(np.stack(sums) + bias.value)
        return mean / np.float32(1 + len(self._sparse))

    @property
    def dense(self) -> Reals:
        return self._dense.value * np.float32(STRETCH)

    @property
    def sparse(self) -> tuple[Reals, ...]:
        return tuple(table.value for table in self._sparse)

    @property
    def biases(self) -> tuple[Reals, ...]:
        return tuple(bias.value for bias in self._biases)


def _shares(bags: Bags) -> tuple[NDArray[np.int64], Reals]:
    """The features of a batch, and each text's weights of them, over the root of its length."""
    touched, places = np.unique(np.concatenate(bags), return_inverse=True)
    shares = np.zeros((len(bags), len(touched)), np.float32)
    np.add.at(shares, (np.repeat(np.arange(len(bags)), [len(bag) for bag in bags]), places), 1.0)
    lengths = np.sqrt(np.maximum(1.0, shares.sum(axis=1, keepdims=True)))
    return touched, (shares / lengths).astype(np.float32)


def _thinned(bag: NDArray[np.int64], draw: np.random.Generator) -> NDArray[np.int64]:
    return bag[draw.random(len(bag)) >= DROPOUT]


def _push(odds: Reals, intents: NDArray[np.int64]) -> Reals:
    """The cross entropy's gradient."""
    push = _softmax(odds)
    push[np.arange(len(intents)), intents] -= 1
    push /= len(intents)
    return push


def _softmax(odds: Reals) -> Reals:
    powers: Reals = np.exp(odds - odds.max(axis=1, keepdims=True))
    powers /= powers.sum(axis=1, keepdims=True)
    return powers
