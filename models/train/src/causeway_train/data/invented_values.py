"""Invented slot values: unseen names, and times with other numbers, so that values cannot be memorised.

Nine in ten of the titles, artists and places in real requests do not occur in the training rows. A network that has
memorised the known ones fails on new ones; a network that never sees the same name twice has to use the sentence. The
probability of a new value is estimated for each slot from its rows: the share of values that occur once (Good 1953,
Biometrika 40, after Turing).
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

# Slots that take any name: here a model must learn to copy, not to recognise.
_NAMES = (
    "playlist artist object_name entity_name track album movie_name restaurant_name city poi geographic_poi "
    "served_dish "
    "artist_name song_name podcast_name audiobook_name list_name event_name person playlist_name game_name radio_name "
    "place_name playlist_owner party_size_description business_name"
)
OPEN_SLOTS = frozenset(_NAMES.split())
_NUMBERS = (
    "one two three four five six seven eight nine ten eleven twelve thirteen fifteen twenty thirty forty fifty".split()
)
_MONTHS = "january february march april may june july august september october november december".split()
_DAYS = "monday tuesday wednesday thursday friday saturday sunday".split()
_SERIES = tuple((frozenset(words), words) for words in (_NUMBERS, _MONTHS, _DAYS))
STRUCTURE = 60  # most frequent words of names ("the", "of", "in"), which stay in a reworded title
MADE_UP = 0.3  # share of new words that are not real words
REPETITION = 0.25  # share of reworded names that repeat a word or its prefix "Cup of Coffee, Cup of Tea"


class ValueInventor:
    """Invents values similar to those of the training rows."""

    def __init__(self, values: Mapping[tuple[str, str], Sequence[str]], words: Sequence[str], seed: int) -> None:
        """`values`: all occurrences by (source, slot); `words`: any known words."""
        self._random = random.Random(seed)
        self._novelty = {key: _novelty(found) for key, found in values.items()}
        self._distinct = {key: sorted(set(found)) for key, found in values.items()}
        names = sorted({v for (_, slot), found in values.items() if slot in OPEN_SLOTS for v in found})
        self._names = names or ["it"]
        counts = Counter(word.lower() for name in names for word in name.split())
        self._structure = {word for word, _ in counts.most_common(STRUCTURE)}
        plain = {word.strip(".,?!:;'\"").lower() for word in words}
        # Words of closed slots are excluded: an invented town must not be a country, nor a title a time.
        closed = {
            word.lower()
            for (_, slot), found in values.items()
            if slot not in OPEN_SLOTS
            for v in found
            for word in v.split()
        }
        self._words = sorted({*counts, *(word for word in plain if word.isalpha())} - self._structure - closed) or [
            "it"
        ]
        self._by_prefix = group_by_prefix(self._words)

    def novelty(self, source: str, slot: str) -> float:
        """Return the probability (0..1) that the slot's next value does not occur in the rows."""
        return self._novelty.get((source, slot), 0.0)

    def invent(self, source: str, slot: str, value: str) -> str:
        """Return a replacement for `value`: a new name in an open slot, else the same text with other numbers."""
        if slot not in OPEN_SLOTS:
            return self._renumber(value)
        like = self._random.choice(self._distinct[source, slot])
        kind = self._random.random()
        if kind < 0.5:
            made = self._reword(like)
        elif kind < 0.75:
            made = self._splice(like, self._random.choice(self._names))
        else:
            made = self._match_case(
                " ".join(self._word() for _ in range(self._random.choice((1, 1, 2, 2, 3, 4)))), like
            )
        return (made.lower() if source == "hwu64" else made) or value

    def _reword(self, name: str) -> str:
        words = name.split()
        replaceable = [i for i, word in enumerate(words) if word.lower() not in self._structure] or [0]
        for index in self._random.sample(replaceable, self._random.randint(1, len(replaceable))):
            words[index] = self._match_case(self._word(), words[index])
        if self._random.random() < REPETITION:
            word = self._random.choice(words)
            exact = self._random.random() < 0.3
            repeated = word if exact else self._random.choice(self._by_prefix.get(prefix(word), [word]))
            position = self._random.randint(0, len(words))
            words.insert(position, self._match_case(repeated, word if position else words[0]))
        elif self._random.random() < 0.15:
            words.insert(self._random.randint(0, len(words)), self._match_case(self._word(), words[0]))
        return " ".join(words)

    def _splice(self, one: str, other: str) -> str:
        head, tail = one.split(), other.split()
        joined = head[: self._random.randint(1, len(head))] + tail[self._random.randrange(len(tail)) :]
        return " ".join(joined[:9])

    def _word(self) -> str:
        draw = self._random
        if draw.random() >= MADE_UP:
            return draw.choice(self._words)
        head, tail = draw.choice(self._words), draw.choice(self._words)
        return head[: draw.randint(1, 4)] + tail[-draw.randint(2, 5) :]

    def _match_case(self, words: str, like: str) -> str:
        if like[:1].isupper():
            return " ".join(word[:1].upper() + word[1:] for word in words.split())
        return words

    def _renumber(self, value: str) -> str:
        digits = re.sub(r"\d", lambda digit: str(self._random.randint(0, 9)), value)
        return " ".join(self._replace_number(word) for word in digits.split(" "))

    def _replace_number(self, word: str) -> str:
        for members, series in _SERIES:
            if word.lower() in members:
                other = self._random.choice(series)
                return other.capitalize() if word[:1].isupper() else other
        return word


def prefix(word: str) -> str:
    """Return the first two letters, in lower case."""
    return word[:2].lower()


def group_by_prefix(words: Iterable[str]) -> dict[str, list[str]]:
    """Group words by their first letters. Words of a group often share their first token, so a network that copies one
    may continue with another.
    """
    groups: dict[str, list[str]] = {}
    for word in words:
        groups.setdefault(prefix(word), []).append(word)
    return groups


def _novelty(values: Sequence[str]) -> float:
    counts = Counter(value.lower() for value in values)
    return sum(count == 1 for count in counts.values()) / len(values)
