"""Texts that nobody said and nobody labelled, near those that people said: fewer words, other words, two texts in one.

What such a text asks for is not always what its source asked for; a tutor has to say (`hints`). Dropped and swapped
words after Wei and Zou 2019 (EDA, arXiv 1901.11196); words come from a tutor's neighbourhoods after Jiao et al. 2019
(TinyBERT, arXiv 1909.10351), without their masked language model.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from ...function_calls.dataset import Row
from ...function_calls.intents import functions_for

THINNED, SWAPPED, SPLICED, CROSSED = 0.15, 0.3, 0.2, 0.2  # shares of the ways; the rest gets another beginning
LOST = 0.15  # of the words of a thinned text
OTHER = 0.25  # of the words of a swapped text that have neighbours
AGAIN = 0.3  # share of texts that are changed twice


class Paraphraser:
    """Draws changed texts of rows. `near` has, for words in lower case, others that may stand in their place."""

    def __init__(self, rows: Sequence[Row], near: Mapping[str, Sequence[str]], seed: int) -> None:
        self._random, self._near = random.Random(seed), near
        self._alike: dict[tuple[str, ...], list[str]] = defaultdict(list)
        self._beside: dict[str, list[str]] = defaultdict(list)
        self._after: dict[tuple[str, str], list[list[str]]] = defaultdict(list)
        for row in rows:
            self._alike[functions_for(row.source, row.intent)].append(row.text)
            self._beside[row.source].append(row.text)
            words = row.text.split()
            for at, word in enumerate(words[:-1]):
                self._after[row.source, word].append(words[at + 1 :])

    def __call__(self, row: Row) -> str:
        text = self._changed(row, row.text)
        return self._changed(row, text) if self._random.random() < AGAIN else text

    def _changed(self, row: Row, text: str) -> str:
        words, kind = text.split(), self._random.random()
        if kind < THINNED:
            made = [word for word in words if self._random.random() >= LOST]
        elif kind < THINNED + SWAPPED:
            made = [self._swapped(word) if self._random.random() < OTHER else word for word in words]
        elif kind < THINNED + SWAPPED + SPLICED:
            made = self._joined(words, self._random.choice(self._alike[functions_for(row.source, row.intent)]).split())
        elif kind < THINNED + SWAPPED + SPLICED + CROSSED:
            made = self._crossed(row.source, words)
        else:
            made = self._begun(words, self._random.choice(self._beside[row.source]).split())
        return " ".join(made) or text

    def _swapped(self, word: str) -> str:
        near = self._near.get(word.lower())
        if not near:
            return word
        other = self._random.choice(near)
        return other.capitalize() if word[:1].isupper() else other

    def _joined(self, head: list[str], tail: list[str]) -> list[str]:
        """The beginning of one and the end of another, cut at about the same share of their lengths."""
        cut = self._random.uniform(0.25, 0.75)
        return head[: round(cut * len(head))] + tail[round(cut * len(tail)) :]

    def _crossed(self, source: str, words: list[str]) -> list[str]:
        """From a word on as another text goes on after the same word: it often reads as if somebody had said it."""
        at = self._random.randrange(len(words))
        rests = self._after.get((source, words[at]))
        return words[: at + 1] + self._random.choice(rests) if rests else words

    def _begun(self, words: list[str], other: list[str]) -> list[str]:
        return other[: self._random.randint(1, 3)] + words[self._random.randint(0, min(2, len(words) - 1)) :]


def whole_words(pieces: Sequence[str]) -> list[str]:
    """Those of a tokenizer's pieces that are words of three letters and more by themselves, without accents."""
    return [piece for piece in pieces if len(piece) > 2 and piece.isascii() and piece.isalpha()]


def common_words(rows: Sequence[Row], least: int = 3) -> list[str]:
    """Words of three letters and more that occur `least` times, in lower case."""
    counts = Counter(word for row in rows for word in row.text.lower().split() if word.isalpha() and len(word) > 2)
    return sorted(word for word, count in counts.items() if count >= least)
