"""Soft tokens: vectors in a prompt, each with an id that no token has, so that a prompt stays a list of ids.

The prefix cache compares ids. Equal vectors have equal ids, and no two others ever share one.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from router.errors import InvalidRequest, UnsupportedFeature

from .native.vocabulary import Tokens
from .protocol import SoftTokens

_KNOWN = 4096  # vectors whose ids are remembered

Vectors = Mapping[int, NDArray[np.float32]]
"""By the id of a soft token: [embedding dimensions]."""


class SoftTokenIds:
    """Gives out ids below 0. Thread-safe.

    Args:
        dimensions: of the model's embeddings; 0: it takes no vectors.
    """

    def __init__(self, dimensions: int) -> None:
        self._dimensions = dimensions
        self._lock = threading.Lock()
        self._first: OrderedDict[str, int] = OrderedDict()  # id of the first vector by marker, oldest use first
        self._next = -1  # an id is never given out again: 2**31 of them are enough for years

    def assign(self, soft: Sequence[SoftTokens]) -> tuple[dict[str, Tokens], Vectors]:
        """Return the ids by marker, each int32 [tokens], and the vectors by id.

        Raises:
            InvalidRequest: these are no vectors for this model.
            UnsupportedFeature: the model takes none.
        """
        ids: dict[str, Tokens] = {}
        vectors: dict[int, NDArray[np.float32]] = {}
        for one in soft:
            rows, marker = self._rows(one), one.marker
            ids[marker] = self._range(marker, len(rows))
            vectors.update(zip(ids[marker].tolist(), rows, strict=True))
        return ids, vectors

    def _range(self, marker: str, count: int) -> Tokens:
        with self._lock:
            first = self._first.get(marker)
            if first is None:
                first, self._next = self._next, self._next - count
                self._first[marker] = first
                if len(self._first) > _KNOWN:
                    self._first.popitem(last=False)
            else:
                self._first.move_to_end(marker)
        return np.array(range(first, first - count, -1), np.int32)

    def _rows(self, soft: SoftTokens) -> NDArray[np.float32]:
        if not self._dimensions:
            raise UnsupportedFeature("this model takes no soft tokens: its positions have several parts")
        size = 4 * self._dimensions
        if not soft.vectors or len(soft.vectors) % size:
            raise InvalidRequest(f"{len(soft.vectors)} bytes are no vectors of {self._dimensions} values")
        rows = np.frombuffer(soft.vectors, "<f4").reshape(-1, self._dimensions)
        if not np.isfinite(rows).all():
            raise InvalidRequest("a soft token has a value that is not finite")
        return rows
