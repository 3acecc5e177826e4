"""The entries of the semantic cache, in memory: bounded, least recently used evicted, searched by exact inner product.

Entries are compared only within one bucket: the same scope (the caller, and everything in the request except the
question) and the same protected words.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from .judge import ComparedText, Judge
from .protected import Signature, opposed

Vector = NDArray[np.float32]

_BLOCK = 1024  # vectors; OpenBLAS splits larger products over threads, and then waits for cores that the engine uses

CANDIDATES: Final = 4  # nearest entries that the judge looks at
MIN_SIMILARITY: Final = 0.3
ENTRIES: Final = 10_000
_BucketKey = tuple[bytes, Signature]


class VectorTable:
    """A matrix of vectors that grows by doubling. A removed row is replaced by the last row."""

    __slots__ = ("_count", "_rows")

    def __init__(self, dimensions: int) -> None:
        self._rows: Vector = np.empty((1, dimensions), np.float32)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, vector: Vector) -> None:
        """Add a row: float32 [dimensions]."""
        if self._count == len(self._rows):
            self._rows = np.concatenate([self._rows, np.empty_like(self._rows)])
        self._rows[self._count] = vector
        self._count += 1

    def remove(self, row: int) -> None:
        """Remove a row; the last row gets its number."""
        self._count -= 1
        self._rows[row] = self._rows[self._count]

    def nearest(self, vector: Vector, most: int, least: float) -> list[tuple[int, float]]:
        """Return up to `most` rows with inner products of at least `least`, the nearest first."""
        return _greatest(_inner_products(self._rows, self._count, vector), most, least)


def _inner_products(matrix: Vector, count: int, vector: Vector) -> Vector:
    """Return the inner products of the first `count` rows with `vector`: float32 [count]."""
    products = np.empty(count, np.float32)
    for start in range(0, count, _BLOCK):
        end = min(start + _BLOCK, count)
        np.dot(matrix[start:end], vector, out=products[start:end])
    return products


def _greatest(products: Vector, most: int, least: float) -> list[tuple[int, float]]:
    """Return up to `most` positions and values of at least `least`, greatest first; they become -inf in `products`."""
    found: list[tuple[int, float]] = []
    for _ in range(min(most, len(products))):
        at = int(products.argmax())
        value = float(products[at])
        if not value >= least:
            break
        found.append((at, value))
        products[at] = -math.inf
    return found


class Match(msgspec.Struct, frozen=True):
    """An earlier question that matches. `similarity`: inner product, -1 to 1; `log_odds`: the judge's."""

    key: bytes
    similarity: float
    log_odds: float


class _Bucket:
    """Questions and keys of one bucket; row i of `vectors` is the vector of question i."""

    __slots__ = ("keys", "questions", "vectors")

    def __init__(self, dimensions: int) -> None:
        self.vectors = VectorTable(dimensions)
        self.questions: list[ComparedText] = []
        self.keys: list[bytes] = []

    def add(self, question: ComparedText, key: bytes) -> None:
        self.vectors.add(question.vector)
        self.questions.append(question)
        self.keys.append(key)

    def remove(self, key: bytes) -> None:
        """Remove an entry; the last entry gets its row."""
        row = self.keys.index(key)
        self.vectors.remove(row)
        self.questions[row], self.keys[row] = self.questions[-1], self.keys[-1]
        self.questions.pop()
        self.keys.pop()


class SemanticIndex:
    """Finds the key of an earlier request whose question means the same, among the `entries` used most recently."""

    def __init__(self, judge: Judge, entries: int = ENTRIES) -> None:
        self._judge = judge
        self._limit = entries
        self._buckets: dict[_BucketKey, _Bucket] = {}
        self._used: OrderedDict[bytes, _BucketKey] = OrderedDict()  # by key, least recently used first

    def __len__(self) -> int:
        return len(self._used)

    def find(self, scope: bytes, question: ComparedText) -> Match | None:
        """Return the scope's earlier question that most probably has the same answer; None if all are ruled out.

        `scope`: a key that is equal for requests that differ only in the question.
        """
        bucket = self._buckets.get((scope, question.signature))
        if bucket is None:
            return None
        nearest = [
            (bucket.questions[row], similarity, bucket.keys[row])
            for row, similarity in bucket.vectors.nearest(question.vector, CANDIDATES, MIN_SIMILARITY)
            if not opposed(question.poles, bucket.questions[row].poles)
        ]
        if not nearest:
            return None
        questions, similarities, keys = zip(*nearest, strict=True)
        log_odds = self._judge.log_odds(question, questions, similarities)
        best = int(log_odds.argmax())
        return Match(keys[best], similarities[best], float(log_odds[best]))

    def add(self, scope: bytes, question: ComparedText, key: bytes) -> None:
        """Add the question of the request whose answer is cached under `key`."""
        self.remove(key)
        at = (scope, question.signature)
        bucket = self._buckets.get(at)
        if bucket is None:
            bucket = self._buckets[at] = _Bucket(len(question.vector))
        bucket.add(question, key)
        self._used[key] = at
        while len(self._used) > self._limit:
            self.remove(next(iter(self._used)))

    def touch(self, key: bytes) -> None:
        """Record that the answer under `key` was used."""
        self._used.move_to_end(key)

    def remove(self, key: bytes) -> None:
        """Remove an entry, if it is there."""
        at = self._used.pop(key, None)
        if at is None:
            return
        bucket = self._buckets[at]
        bucket.remove(key)
        if not bucket.keys:
            del self._buckets[at]
