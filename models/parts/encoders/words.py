"""Choice among several transcripts, by a trigram model of the words that people say to the assistant.

If a speech model is unsure, the right transcript is often among its ten likeliest without being the first. Counts are
smoothed after Witten and Bell (1991): the rarer a context is, the more weight a shorter context has.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from causeway_server.router.parts.reading import spoken_form

_WEIGHT = 0.3  # of this model's log probability beside that of the speech model
_PER_WORD = 1.0  # for each word, since every word makes a text less probable
START, END = "<s>", "</s>"
_UNSEEN_WORDS = 20_000


class WordCounts(msgspec.Struct, frozen=True):
    """The counts of words and word sequences (joined by spaces) in texts of a language (ISO 639-1)."""

    language: str
    unigrams: dict[str, int]
    bigrams: dict[str, int]
    trigrams: dict[str, int]


class _Context:
    """The words that follow a context: their total count, and the number of different words."""

    def __init__(self, counts: dict[str, int]) -> None:
        self.counts = counts
        self.total: dict[str, int] = defaultdict(int)
        self.different: dict[str, int] = defaultdict(int)
        for words, count in counts.items():
            before = words.rpartition(" ")[0]
            self.total[before] += count
            self.different[before] += 1

    def probability(self, before: str, word: str, shorter: float) -> float:
        """Return the probability of `word` after `before`. `shorter`: its probability after a shorter context."""
        total, different = self.total.get(before, 0), self.different.get(before, 0)
        if not total:
            return shorter
        return (self.counts.get(f"{before} {word}", 0) + different * shorter) / (total + different)


class WordModel:
    """Chooses the likeliest of several transcripts."""

    def __init__(self, counts: WordCounts) -> None:
        self.language = counts.language
        self._unigrams = counts.unigrams
        self._all = sum(counts.unigrams.values()) + 0.5 * (len(counts.unigrams) + _UNSEEN_WORDS)
        self._bigrams = _Context(counts.bigrams)
        self._trigrams = _Context(counts.trigrams)

    @classmethod
    def read(cls, path: Path) -> WordModel:
        """Read a file of counts."""
        return cls(msgspec.json.decode(path.read_bytes(), type=WordCounts))

    def best(self, transcripts: Sequence[tuple[str, float]]) -> tuple[int, float]:
        """Return the index of the likeliest transcript, and its probability among those that differ in words; each has
        the natural log of the speech model's probability.
        """
        spoken = [spoken_form(text, self.language) for text, _ in transcripts]
        scores = [self._score(text, heard) for text, (_, heard) in zip(spoken, transcripts, strict=True)]
        best = max(range(len(scores)), key=lambda at: (scores[at], -at))
        likeliest = dict(sorted(zip(spoken, scores, strict=True), key=lambda one: one[1]))  # of each text
        return best, 1.0 / sum(math.exp(score - scores[best]) for score in likeliest.values())

    def log_probability(self, words: Sequence[str]) -> float:
        """Return the natural log of the probability of these words and the end after them."""
        padded = [START, START, *words, END]
        return sum(math.log(self._probability(*padded[at - 2 : at + 1])) for at in range(2, len(padded)))

    def _score(self, text: str, heard: float) -> float:
        words = text.split()
        return heard + _WEIGHT * self.log_probability(words) + _PER_WORD * len(words)

    def _probability(self, first: str, second: str, word: str) -> float:
        alone = (self._unigrams.get(word, 0) + 0.5) / self._all
        after_one = self._bigrams.probability(second, word, alone)
        return self._trigrams.probability(f"{first} {second}", word, after_one)
