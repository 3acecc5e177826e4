"""A sentence encoder: text → a vector of length 1, in one ONNX graph of token ids, with its word pieces inside.

Two kinds of file have the same face. The one that ships is a static table (Tulkens and van Dongen 2024, Model2Vec):
the mean of its tokens' rows, int8, tens of microseconds. A transformer (all-MiniLM-L6-v2, made by `causeway-models
minilm`) takes milliseconds, for a box that can afford it.

What the file says of itself: `causeway.pieces` (word pieces, one a line), `causeway.around` (ids put before and after,
for a transformer).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..catalog.artifact import ArtifactError
from .onnx_graph import OnnxGraph

PIECES, AROUND = "causeway.pieces", "causeway.around"
TOKENS = 256  # of a long text, the first ones
CHARACTERS = 4096  # looked at; a text is cut there first
UNKNOWN = "[UNK]"
_LONGEST_WORD = 100  # characters; a longer one is unknown
_WORD = re.compile(r"[^\W_]+|[^\w\s]|_")
_MARKS = re.compile(r"[\u0300-\u036f]")
_IDEOGRAPHS = re.compile(r"([\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff])")

Vector = NDArray[np.float32]


class WordPieces:
    """BERT's uncased tokenizer (Devlin et al. 2018, arXiv 1810.04805): lower case, no accents, longest piece first."""

    def __init__(self, pieces: Sequence[str]) -> None:
        """Raises ArtifactError when there is no piece for what is unknown."""
        self.listed = tuple(pieces)
        self._ids = {piece: number for number, piece in enumerate(pieces)}
        if UNKNOWN not in self._ids:
            raise ArtifactError(f"these word pieces have no {UNKNOWN}")
        self.unknown = self._ids[UNKNOWN]

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = []
        known = self._ids
        for word in _WORD.findall(_plain(text[:CHARACTERS])):
            whole = known.get(word)
            if whole is None:
                ids += self._cut(word)
            else:
                ids.append(whole)
        return ids

    def __len__(self) -> int:
        return len(self._ids)

    def _cut(self, word: str) -> list[int]:
        """A word that is no piece by itself; unknown as a whole if any part of it is."""
        if len(word) > _LONGEST_WORD:
            return [self.unknown]
        found: list[int] = []
        start, prefix = 0, ""
        while start < len(word):
            end = len(word)
            while (piece := self._ids.get(prefix + word[start:end])) is None:
                end -= 1
                if end == start:
                    return [self.unknown]
            found.append(piece)
            start, prefix = end, "##"
        return found


class SentenceEncoder:
    """A loaded encoder. Calls may come from any thread."""

    def __init__(self, path: Path) -> None:
        """Raises ArtifactError when the file is no encoder."""
        self.path = path
        self._graph = OnnxGraph(path)
        about = self._graph.metadata
        if PIECES not in about or self._graph.inputs != ("ids",):
            raise ArtifactError(f"{path}: no sentence encoder (it has no {PIECES}, or takes more than `ids`)")
        self.pieces = WordPieces(about[PIECES].split("\n"))
        around = [int(number) for number in about.get(AROUND, "").split()]
        self._before, self._after = around[:1], around[1:]

    def __call__(self, text: str) -> Vector:
        """float32 [dimensions] of length 1; zeros where the text has no token."""
        return self.of(self.pieces(text))

    def of(self, ids: Sequence[int]) -> Vector:
        """The same from token ids."""
        kept = [*self._before, *ids[: TOKENS - 2], *self._after]
        # No token at all is told by the unknown one: a graph has no mean of nothing.
        return self._graph({"ids": np.array(kept or [self.pieces.unknown], dtype=np.int64)})

    def all(self, texts: Sequence[str]) -> Vector:
        """float32 [texts, dimensions]."""
        return np.stack([self(text) for text in texts])


def _plain(text: str) -> str:
    """Lower case, without accents; each ideograph a word of its own."""
    if text.isascii():
        return text.lower()
    bare = _MARKS.sub("", unicodedata.normalize("NFD", text.lower()))
    return _IDEOGRAPHS.sub(r" \1 ", unicodedata.normalize("NFC", bare))
