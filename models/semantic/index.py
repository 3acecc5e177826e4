"""The entries of the semantic cache, in memory: bounded, oldest use out first, searched by exact inner product.

Entries are compared only within one bucket: the same scope (whose request it is, and all of it but the question) and
the same protected words.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import msgspec

from .judge import ComparedText, Judge
from .protected import Signature, opposed
from .vectors import VectorTable

CANDIDATES: Final = 4  # nearest entries that the judge looks at
LEAST_SIMILARITY: Final = 0.3
ENTRIES: Final = 10_000

_BucketKey = tuple[bytes, Signature]


class Match(msgspec.Struct, frozen=True):
    """An earlier question. `similarity`: of the vectors, -1 to 1; `log_odds`: of the judge."""

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
        """Remove an entry; the last one takes its row."""
        row = self.keys.index(key)
        self.vectors.remove(row)
        self.questions[row], self.keys[row] = self.questions[-1], self.keys[-1]
        self.questions.pop()
        self.keys.pop()


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
        nearest = [
            (bucket.questions[row], similarity, bucket.keys[row])
            for row, similarity in bucket.vectors.nearest(question.vector, CANDIDATES, LEAST_SIMILARITY)
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
