"""The entries of the semantic cache, in memory: bounded, least recently used evicted, searched by exact inner product.

Entries are compared only within one bucket: the same scope (the caller, and everything in the request except the
question) and the same protected words.

The cost of a search is reading the vectors: 10 MB for 10,000 vectors of 256 dimensions. A search therefore reads a
quarter of that first. Each vector also has int8 codes (scalar quantisation, one scale per vector), and a bound on the
error of the codes says which vectors can be among the nearest; the exact inner product is computed only for those. The
result is the same as that of a search of all vectors.

ONNX Runtime multiplies the codes. The query has 7 bits, because x86 without VNNI adds pairs of products in 16 bits.
Before vectors become codes, a random rotation spreads their peaks over all components, so that the error is small; it
does not change inner products.
"""

from __future__ import annotations

import base64
import math
from collections import OrderedDict
from functools import cache
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..signals.onnx_graph import OnnxGraph
from .judge import ComparedText, Judge
from .protected import Signature, opposed

Vector = NDArray[np.float32]

CODED: Final = 2048  # so many vectors at least have codes: fewer are searched as fast without
_MAX_CANDIDATES: Final = 8  # one in this many vectors; above, all vectors are searched instead
_BLOCK = 1024  # vectors; OpenBLAS splits larger products over threads, and then waits for cores that the engine uses
_LANES = 64  # columns; a stride of an odd multiple of it keeps the rows of codes in different sets of the cache
_QUERY_ZERO = 64  # code of 0 in the query, which has no sign
_ROUNDING = 3e-5  # of float32 sums, relative to the lengths of the vectors

# query uint8 [1, dimensions], codes int8 [dimensions, vectors] → products int32 [1, vectors]: one MatMulInteger.
GRAPH: Final = base64.b64decode(
    "CAg6nwEKKQoFcXVlcnkKBWNvZGVzEghwcm9kdWN0cyINTWF0TXVsSW50ZWdlcjoAEghwcm9kdWN0c1ohCgVxdWVyeRIYChYIAhISCgIIAQoMEgpk"
    "aW1lbnNpb25zWiUKBWNvZGVzEhwKGggDEhYKDBIKZGltZW5zaW9ucwoGEgRyb3dzYh4KCHByb2R1Y3RzEhIKEAgGEgwKAggBCgYSBHJvd3NCBAoA"
    "EAo="
)

CANDIDATES: Final = 4  # nearest entries that the judge looks at
MIN_SIMILARITY: Final = 0.3
ENTRIES: Final = 10_000
_BucketKey = tuple[bytes, Signature]


class VectorTable:
    """A matrix of vectors that grows by doubling. A removed row is replaced by the last row."""

    __slots__ = ("_codes", "_count", "_rows")

    def __init__(self, dimensions: int) -> None:
        self._rows: Vector = np.empty((1, dimensions), np.float32)
        self._count = 0
        self._codes: Codes | None = None

    def __len__(self) -> int:
        return self._count

    def add(self, vector: Vector) -> None:
        """Add a row: float32 [dimensions]."""
        if self._count == len(self._rows):
            self._rows = np.concatenate([self._rows, np.empty_like(self._rows)])
        self._rows[self._count] = vector
        self._count += 1
        if self._codes is not None:
            self._codes.add(self._rows[self._count - 1 : self._count])

    def remove(self, row: int) -> None:
        """Remove a row; the last row gets its number."""
        self._count -= 1
        self._rows[row] = self._rows[self._count]
        if self._codes is not None:
            self._codes.remove(row)

    def nearest(self, vector: Vector, most: int, least: float) -> list[tuple[int, float]]:
        """Return up to `most` rows with their inner products of at least `least`, the nearest first.

        Among equal inner products the lower row comes first.
        """
        rows = None
        if self._count >= CODED:
            self._codes = self._codes or Codes(self._rows[: self._count])
            rows = self._codes.candidates(vector, most, least)
        if rows is None:
            return _greatest(_inner_products(self._rows, self._count, vector), most, least)
        found = _greatest(self._rows.take(rows, axis=0) @ vector, most, least)
        return [(int(rows[at]), product) for at, product in found]


class Codes:
    """The int8 codes of vectors, one column each, and a bound on the error of their inner products.

    Args:
        vectors: float32 [vectors, dimensions].
    """

    def __init__(self, vectors: Vector) -> None:
        self._count = 0
        self._codes = np.zeros((vectors.shape[1], 0), np.int8)
        self._scales = np.zeros(0, np.float32)  # of a vector's codes
        self._zeros = np.zeros(0, np.float32)  # what a vector's product has too much because of _QUERY_ZERO, scaled
        self._longest = 0.0  # length of a vector
        self._error = 0.0  # length of a vector's difference from its codes
        self.add(vectors)

    def add(self, vectors: Vector) -> None:
        """Add rows: float32 [vectors, dimensions]."""
        end = self._count + len(vectors)
        if end > len(self._scales):
            # Some more columns than are needed: an odd multiple of _LANES.
            more = -(-(end + end // 16) // (2 * _LANES)) * 2 * _LANES + _LANES - len(self._scales)
            self._codes = np.pad(self._codes, ((0, 0), (0, more)))
            self._scales, self._zeros = np.pad(self._scales, (0, more)), np.pad(self._zeros, (0, more))
        rotated = vectors @ _rotation(vectors.shape[1])
        steps = np.maximum(np.abs(rotated).max(axis=1), 1e-9) / np.float32(127.0)
        codes = np.rint(rotated / steps[:, None])
        # The least squares: the difference from the codes is perpendicular to them.
        scales = (rotated * codes).sum(axis=1) / np.maximum(np.square(codes).sum(axis=1), 1.0)
        self._error = max(self._error, _longest(rotated - codes * scales[:, None]))
        self._longest = max(self._longest, _longest(rotated))
        self._codes[:, self._count : end] = codes.T
        self._scales[self._count : end] = scales
        self._zeros[self._count : end] = codes.sum(axis=1) * scales * _QUERY_ZERO
        self._count = end

    def remove(self, row: int) -> None:
        """Remove a row; the last row gets its number."""
        self._count -= 1
        for array in (self._codes.T, self._scales, self._zeros):
            array[row] = array[self._count]

    def candidates(self, vector: Vector, most: int, least: float) -> NDArray[np.intp] | None:
        """Return rows, ascending, that include the `most` nearest ones with an inner product of at least `least`.

        Return None if the codes are too coarse to narrow the rows down.
        """
        rotated = vector @ _rotation(len(vector))
        step = np.abs(rotated).max() / np.float32(_QUERY_ZERO - 1)
        if not step > 0.0:
            return None
        codes = np.rint(rotated / step)
        scale = (rotated @ codes) / (codes @ codes)
        rest = rotated - codes * scale
        products = self._products((codes + _QUERY_ZERO).astype(np.uint8)[None])
        nearest = _greatest(products, most, -math.inf)
        for row, product in nearest:
            products[row] = product
        fewer = len(nearest) < most
        last = -math.inf if fewer else nearest[-1][1] * float(scale)
        bound = self._bound(math.sqrt(rotated @ rotated), math.sqrt(rest @ rest), last, least)
        rows = np.flatnonzero(products >= np.float32(bound / float(scale)))
        return rows if len(rows) * _MAX_CANDIDATES <= self._count else None

    def _bound(self, length: float, missed: float, last: float, least: float) -> float:
        """Return a lower bound on the codes' product of any vector whose inner product s may be among the greatest.

        Args:
            length: The length of the query q.
            missed: The length of its difference e = q - q̂ from its codes.
            last: The codes' product of the last vector among the greatest; -inf if all vectors are.
            least: The least inner product that is wanted.

        With d = x - x̂, the product of codes is off by s - x̂·q̂ = x·e + d·q̂.

        1. At most |x||e| + |d||q̂|, by Cauchy and Schwarz.
        2. If s >= t > 0, most of x and of q is parallel, and to e and d only the rest counts, because they are
           perpendicular to q̂ and x̂: at most |e|√(|x|² - t²/|q|²) + |d|√(|q|² - t²/|x|²), and terms of second order.
        """
        long, error = self._longest, self._error
        rounding = _ROUNDING * long * length
        most = long * missed + error * (length + missed) + rounding  # (1)
        t = last - most  # so much all of the greatest have, by (1)
        if t > 0.0:  # (2)
            across = missed * math.sqrt(max(0.0, long**2 - (t / length) ** 2))
            across += error * math.sqrt(max(0.0, length**2 - (t / long) ** 2))
            second = long * missed**2 / length + (length * error) ** 2 / t + error * missed
            last -= 2 * min(most, across + second + rounding)
        else:
            last -= 2 * most
        return max(last, least - most)

    def _products(self, query: NDArray[np.uint8]) -> Vector:
        """Return the inner products of the codes with a query's, in units of the query's scale: float32 [vectors]."""
        products = _multiply()({"query": query, "codes": self._codes})[0, : self._count].astype(np.float32)
        products *= self._scales[: self._count]
        products -= self._zeros[: self._count]
        return products


@cache
def _rotation(dimensions: int) -> Vector:
    """Return a pseudo-random orthogonal matrix, the same in every process: float32 [dimensions, dimensions]."""
    normal = np.random.default_rng(dimensions).standard_normal((dimensions, dimensions))
    return np.linalg.qr(normal)[0].astype(np.float32)


@cache
def _multiply() -> OnnxGraph:
    return OnnxGraph(GRAPH)


def _longest(vectors: Vector) -> float:
    """Return the greatest length of a row."""
    return float(np.sqrt(np.square(vectors).sum(axis=1).max()))


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
    """Finds the key of an earlier request whose question means the same.

    Args:
        entries: Maximum number of entries; the least recently used is evicted.
    """

    def __init__(self, judge: Judge, entries: int = ENTRIES) -> None:
        self._judge = judge
        self._limit = entries
        self._buckets: dict[_BucketKey, _Bucket] = {}
        self._used: OrderedDict[bytes, _BucketKey] = OrderedDict()  # by key, least recently used first

    def __len__(self) -> int:
        return len(self._used)

    def find(self, scope: bytes, question: ComparedText) -> Match | None:
        """Return the earlier question of this scope that most probably has the same answer; None if all are ruled out.

        Args:
            scope: A key that is equal for requests that differ only in the question.
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
