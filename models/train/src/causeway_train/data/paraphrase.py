"""Unlabelled texts derived from rows: fewer words, other words, two texts spliced.

Such a text does not always ask for its row's function, so the function teacher labels it (function_distillation.py).
Word deletion and replacement after Wei and Zou 2019 (EDA, arXiv 1901.11196); replacements come from the teacher's
embedding neighbourhoods after Jiao et al. 2019 (TinyBERT, arXiv 1909.10351), without their masked language model.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from ..function_calls.dataset import Row
from ..function_calls.intents import functions_for

# Share of each operation; the rest gets the beginning of another text.
DELETION, REPLACEMENT, SPLICE, CROSSOVER = 0.15, 0.3, 0.2, 0.2
DELETED = 0.15  # share of the words that a deletion removes
REPLACED = 0.25  # share of the words with neighbours that a replacement changes
CHANGED_TWICE = 0.3  # share of texts that two operations are applied to


class Paraphraser:
    """Draws changed texts of rows. `near` maps words in lower case to possible replacements."""

    def __init__(self, rows: Sequence[Row], near: Mapping[str, Sequence[str]], seed: int) -> None:
        self._random, self._near = random.Random(seed), near
        self._by_function: dict[tuple[str, ...], list[str]] = defaultdict(list)
        self._by_source: dict[str, list[str]] = defaultdict(list)
        self._continuations: dict[tuple[str, str], list[list[str]]] = defaultdict(list)
        for row in rows:
            self._by_function[functions_for(row.source, row.intent)].append(row.text)
            self._by_source[row.source].append(row.text)
            words = row.text.split()
            for index, word in enumerate(words[:-1]):
                self._continuations[row.source, word].append(words[index + 1 :])

    def __call__(self, row: Row) -> str:
        """Return one changed text of `row`."""
        text = self._change(row, row.text)
        return self._change(row, text) if self._random.random() < CHANGED_TWICE else text

    def _change(self, row: Row, text: str) -> str:
        words, kind = text.split(), self._random.random()
        if kind < DELETION:
            made = [word for word in words if self._random.random() >= DELETED]
        elif kind < DELETION + REPLACEMENT:
            made = [self._replace(word) if self._random.random() < REPLACED else word for word in words]
        elif kind < DELETION + REPLACEMENT + SPLICE:
            made = self._splice(
                words, self._random.choice(self._by_function[functions_for(row.source, row.intent)]).split()
            )
        elif kind < DELETION + REPLACEMENT + SPLICE + CROSSOVER:
            made = self._cross(row.source, words)
        else:
            made = self._new_beginning(words, self._random.choice(self._by_source[row.source]).split())
        return " ".join(made) or text

    def _replace(self, word: str) -> str:
        near = self._near.get(word.lower())
        if not near:
            return word
        other = self._random.choice(near)
        return other.capitalize() if word[:1].isupper() else other

    def _splice(self, head: list[str], tail: list[str]) -> list[str]:
        """Join the beginning of one text and the end of another, cut at the same share of their lengths."""
        cut = self._random.uniform(0.25, 0.75)
        return head[: round(cut * len(head))] + tail[round(cut * len(tail)) :]

    def _cross(self, source: str, words: list[str]) -> list[str]:
        """Continue a text as another text continues after the same word; the result often reads naturally."""
        index = self._random.randrange(len(words))
        continuations = self._continuations.get((source, words[index]))
        return words[: index + 1] + self._random.choice(continuations) if continuations else words

    def _new_beginning(self, words: list[str], other: list[str]) -> list[str]:
        return other[: self._random.randint(1, 3)] + words[self._random.randint(0, min(2, len(words) - 1)) :]


def whole_words(pieces: Sequence[str]) -> list[str]:
    """Return a tokenizer's pieces that are whole ASCII words of at least three letters."""
    return [piece for piece in pieces if len(piece) > 2 and piece.isascii() and piece.isalpha()]


def common_words(rows: Sequence[Row], least: int = 3) -> list[str]:
    """Return the words of at least three letters that occur at least `least` times, in lower case."""
    counts = Counter(word for row in rows for word in row.text.lower().split() if word.isalpha() and len(word) > 2)
    return sorted(word for word, count in counts.items() if count >= least)
