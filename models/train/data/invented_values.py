"""Names that nobody has heard of, and other numbers in times: values to train on that cannot be learnt by heart.

Nine in ten of the titles, artists and places that people say are ones the training rows do not hold. A network that has
memorised the ones they do hold reads new ones badly; one that never sees the same name twice has to read the sentence.
How often a slot brings something new is estimated from its own rows: the share of values that occur once (Good 1953,
Biometrika 40, after Turing).
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

# Slots that take any name at all: here a model must learn to copy, not to recognise.
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
STRUCTURE = 60  # the commonest words of names ("the", "of", "in"), which hold a title together
MADE_UP = 0.3  # share of new words that are no words
ECHO = (
    0.25  # share of reworded names in which a word comes back, or one that begins like it ("Cup of Coffee, Cup of Tea")
)


class ValueInventor:
    """Invents values like those of the rows it was given."""

    def __init__(self, values: Mapping[tuple[str, str], Sequence[str]], words: Sequence[str], seed: int) -> None:
        """`values`: of each (source, slot), every time it occurs; `words`: any at all."""
        self._random = random.Random(seed)
        self._novelty = {key: _novelty(found) for key, found in values.items()}
        self._distinct = {key: sorted(set(found)) for key, found in values.items()}
        names = sorted({v for (_, slot), found in values.items() if slot in OPEN_SLOTS for v in found})
        self._names = names or ["it"]
        counts = Counter(word.lower() for name in names for word in name.split())
        self._structure = {word for word, _ in counts.most_common(STRUCTURE)}
        plain = {word.strip(".,?!:;'\"").lower() for word in words}
        # A town must not be invented that is a country, nor a title that is a time.
        said = {
            word.lower()
            for (_, slot), found in values.items()
            if slot not in OPEN_SLOTS
            for v in found
            for word in v.split()
        }
        self._words = sorted({*counts, *(word for word in plain if word.isalpha())} - self._structure - said) or ["it"]
        self._alike = alike(self._words)

    def novelty(self, source: str, slot: str) -> float:
        """Probability that the slot's next value is one that the rows do not hold."""
        return self._novelty.get((source, slot), 0.0)

    def invented(self, source: str, slot: str, value: str) -> str:
        """Something else in the place of `value`: a name where the slot takes names, else other numbers."""
        if slot not in OPEN_SLOTS:
            return self._renumbered(value)
        like = self._random.choice(self._distinct[source, slot])
        kind = self._random.random()
        if kind < 0.5:
            made = self._reworded(like)
        elif kind < 0.75:
            made = self._spliced(like, self._random.choice(self._names))
        else:
            made = self._cased(" ".join(self._word() for _ in range(self._random.choice((1, 1, 2, 2, 3, 4)))), like)
        return (made.lower() if source == "hwu64" else made) or value

    def _reworded(self, name: str) -> str:
        words = name.split()
        free = [at for at, word in enumerate(words) if word.lower() not in self._structure] or [0]
        for at in self._random.sample(free, self._random.randint(1, len(free))):
            words[at] = self._cased(self._word(), words[at])
        if self._random.random() < ECHO:
            heard = self._random.choice(words)
            echo = (
                heard
                if self._random.random() < 0.3
                else self._random.choice(self._alike.get(beginning(heard), [heard]))
            )
            place = self._random.randint(0, len(words))
            words.insert(place, self._cased(echo, heard if place else words[0]))
        elif self._random.random() < 0.15:
            words.insert(self._random.randint(0, len(words)), self._cased(self._word(), words[0]))
        return " ".join(words)

    def _spliced(self, one: str, other: str) -> str:
        head, tail = one.split(), other.split()
        joined = head[: self._random.randint(1, len(head))] + tail[self._random.randrange(len(tail)) :]
        return " ".join(joined[:9])

    def _word(self) -> str:
        draw = self._random
        if draw.random() >= MADE_UP:
            return draw.choice(self._words)
        head, tail = draw.choice(self._words), draw.choice(self._words)
        return head[: draw.randint(1, 4)] + tail[-draw.randint(2, 5) :]

    def _cased(self, words: str, like: str) -> str:
        if like[:1].isupper():
            return " ".join(word[:1].upper() + word[1:] for word in words.split())
        return words

    def _renumbered(self, value: str) -> str:
        digits = re.sub(r"\d", lambda digit: str(self._random.randint(0, 9)), value)
        return " ".join(self._counted(word) for word in digits.split(" "))

    def _counted(self, word: str) -> str:
        for known, series in _SERIES:
            if word.lower() in known:
                other = self._random.choice(series)
                return other.capitalize() if word[:1].isupper() else other
        return word


def beginning(word: str) -> str:
    return word[:2].lower()


def alike(words: Iterable[str]) -> dict[str, list[str]]:
    """Words by how they begin: a tokenizer cuts the same piece off them, so that copying one can slip into another."""
    found: dict[str, list[str]] = {}
    for word in words:
        found.setdefault(beginning(word), []).append(word)
    return found


def _novelty(values: Sequence[str]) -> float:
    counts = Counter(value.lower() for value in values)
    return sum(count == 1 for count in counts.values()) / len(values)
