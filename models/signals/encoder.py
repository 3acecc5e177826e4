"""The sentence encoder: text -> a unit vector, by one ONNX graph over token ids, with the word pieces in its metadata.

Two kinds of file have the same interface. The shipped one is a static table (Tulkens and van Dongen 2024, Model2Vec):
the mean of its tokens' rows, int8, tens of microseconds. A transformer (all-MiniLM-L6-v2, converted by
`causeway-train convert-bert`) takes milliseconds, for a device that can afford it.

Metadata keys: `causeway.pieces` (word pieces, one per line) and `causeway.around` (ids that a transformer needs before
and after the text).
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

PIECES_KEY, SPECIAL_IDS_KEY = "causeway.pieces", "causeway.around"
TOKENS = 256  # the first tokens of a long text
CHARACTERS = 4096  # a longer text is cut there first
UNKNOWN = "[UNK]"
_MAX_WORD = 100  # characters; a longer one is unknown
_WORD = re.compile(r"[^\W_]+|[^\w\s]|_")
_ACCENTS = re.compile(r"[\u0300-\u036f]")
_IDEOGRAPHS = re.compile(r"([\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff])")

Vector = NDArray[np.float32]


class WordPieces:
    """BERT's uncased tokenizer (Devlin et al. 2018, arXiv 1810.04805): lower case, no accents, longest piece first."""

    def __init__(self, pieces: Sequence[str]) -> None:
        """Index `pieces` by position. Raises ArtifactError without a piece for unknown words."""
        self.listed = tuple(pieces)
        self._ids = {piece: number for number, piece in enumerate(pieces)}
        if UNKNOWN not in self._ids:
            raise ArtifactError(f"the word pieces have no piece {UNKNOWN}")
        self.unknown = self._ids[UNKNOWN]

    def __call__(self, text: str) -> list[int]:
        """Return the ids of the first `CHARACTERS` characters of `text`."""
        ids: list[int] = []
        for word in _WORD.findall(_normalized(text[:CHARACTERS])):
            whole = self._ids.get(word)
            ids += self._split(word) if whole is None else (whole,)
        return ids

    def _split(self, word: str) -> list[int]:
        """Split a word that is not a piece; the whole word is unknown if any part of it is."""
        if len(word) > _MAX_WORD:
            return [self.unknown]
        ids: list[int] = []
        start, prefix = 0, ""
        while start < len(word):
            end = len(word)
            while (piece := self._ids.get(prefix + word[start:end])) is None:
                end -= 1
                if end == start:
                    return [self.unknown]
            ids.append(piece)
            start, prefix = end, "##"
        return ids


class SentenceEncoder:
    """A loaded encoder. Calls may come from any thread."""

    def __init__(self, path: Path) -> None:
        """Load `path`. Raises ArtifactError: the file is not a sentence encoder."""
        self.path = path
        self._graph = OnnxGraph(path)
        metadata = self._graph.metadata
        if PIECES_KEY not in metadata or self._graph.inputs != ("ids",):
            raise ArtifactError(
                f"{path} is not a sentence encoder (it has no {PIECES_KEY}, or takes more inputs than `ids`)"
            )
        self.pieces = WordPieces(metadata[PIECES_KEY].split("\n"))
        special = [int(number) for number in metadata.get(SPECIAL_IDS_KEY, "").split()]
        self._before, self._after = special[:1], special[1:]

    def __call__(self, text: str) -> Vector:
        """Return a float32 [dimensions] unit vector; zeros for a text without tokens."""
        return self.encode_ids(self.pieces(text))

    def encode_ids(self, ids: Sequence[int]) -> Vector:
        """Encode token ids; the result is the same as for their text."""
        kept = [*self._before, *ids[: TOKENS - 2], *self._after]
        # The graph cannot average zero tokens: the unknown token stands for an empty text.
        return self._graph({"ids": np.array(kept or [self.pieces.unknown], dtype=np.int64)})


def _normalized(text: str) -> str:
    """Return the text in lower case, without accents, and with spaces around ideographs, each of which is a word."""
    if text.isascii():
        return text.lower()
    bare = _ACCENTS.sub("", unicodedata.normalize("NFD", text.lower()))
    return _IDEOGRAPHS.sub(r" \1 ", unicodedata.normalize("NFC", bare))
