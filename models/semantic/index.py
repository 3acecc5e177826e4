"""The entries of the semantic cache, in memory: bounded, oldest use out first, searched by exact inner product.

Entries are compared only within one bucket: the same scope (whose request it is, and all of it but the question) and
the same protected words. A bucket is one float32 matrix [entries, dimensions] that grows by doubling.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import msgspec
import numpy as np

from .judge import ComparedText, Judge, Vector
from .protected import Signature, opposed

CANDIDATES: Final = 4  # nearest entries that the judge looks at
LEAST_SIMILARITY: Final = 0.3
ENTRIES: Final = 10_000
_BLOCK = 1024  # rows; OpenBLAS splits larger products over threads, and then waits for cores that the engine uses

_BucketKey = tuple[bytes, Signature]


class Match(msgspec.Struct, frozen=True):
    """An earlier question. `similarity`: of the vectors, -1 to 1; `log_odds`: of the judge."""

    key: bytes
    similarity: float
    log_odds: float


class _Bucket:
    """Questions and keys of one bucket; row i of `matrix` is the vector of question i."""

    __slots__ = ("keys", "matrix", "questions")

    def __init__(self, dimensions: int) -> None:
        self.matrix: Vector = np.empty((1, dimensions), np.float32)
        self.questions: list[ComparedText] = []
        self.keys: list[bytes] = []

    def add(self, question: ComparedText, key: bytes) -> None:
        count = len(self.keys)
        if count == len(self.matrix):
            self.matrix = np.concatenate([self.matrix, np.empty_like(self.matrix)])
        self.matrix[count] = question.vector
        self.questions.append(question)
        self.keys.append(key)

    def remove(self, key: bytes) -> None:
        """Remove an entry; the last one takes its row."""
        row, last = self.keys.index(key), len(self.keys) - 1
        self.matrix[row] = self.matrix[last]
        self.questions[row], self.keys[row] = self.questions[last], self.keys[last]
        self.questions.pop()
        self.keys.pop()


def _inner_products(matrix: Vector, count: int, vector: Vector) -> Vector:
    """Return the inner products of the first `count` rows with `vector`: float32 [count]."""
    products = np.empty(count, np.float32)
    for start in range(0, count, _BLOCK):
        end = min(start + _BLOCK, count)
        np.dot(matrix[start:end], vector, out=products[start:end])
    return products


class SemanticIndex:
    """Finds the key of an earlier request whose question means the same.

    Args:
        judge: compares two questions.
        entries: bound; the entry that was used least recently makes room.
    """

    def __init__(self, judge: Judge, entries: int = ENTRIES) -> None:
        self._judge = judge
        self._limit = entries
        self._buckets: dict[_BucketKey, _Bucket] = {}
        self._used: OrderedDict[bytes, _BucketKey] = OrderedDict()  # by key, least recently used first

    def __len__(self) -> int:
        return len(self._used)

    def question(self, text: str) -> ComparedText | None:
        """Return a text as it is compared; None for one that is never compared."""
        return self._judge.question(text)

    def find(self, scope: bytes, question: ComparedText) -> Match | None:
        """Return the likeliest earlier question of this scope; None if all are ruled out.

        Args:
            scope: equal for requests that differ in nothing but the question.
        """
        bucket = self._buckets.get((scope, question.signature))
        if bucket is None:
            return None
        count = len(bucket.keys)
        similarities = _inner_products(bucket.matrix, count, question.vector)
        if count > CANDIDATES:
            nearest = np.argpartition(similarities, count - CANDIDATES)[count - CANDIDATES :]
        else:
            nearest = np.arange(count)
        rows = [
            int(row)
            for row in nearest
            if similarities[row] >= LEAST_SIMILARITY and not opposed(question.poles, bucket.questions[row].poles)
        ]
        if not rows:
            return None
        similar = [float(similarities[row]) for row in rows]
        log_odds = self._judge.log_odds(question, [bucket.questions[row] for row in rows], similar)
        best = int(log_odds.argmax())
        return Match(bucket.keys[rows[best]], similar[best], float(log_odds[best]))

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
        """Note that the answer under `key` was used."""
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
