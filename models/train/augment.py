"""More utterances from the ones there are: other values in the slots, other casing, punctuation and politeness."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable

import msgspec

from ..answer import spans
from ..dataset import Row

# Slots that take any name at all: here a model must learn to copy, not to recognise.
_NAMES = (
    "playlist artist object_name entity_name track album movie_name restaurant_name city poi geographic_poi "
    "served_dish "
    "artist_name song_name podcast_name audiobook_name list_name event_name person playlist_name game_name radio_name "
    "place_name playlist_owner party_size_description business_name"
)
OPEN_SLOTS = frozenset(_NAMES.split())
SUBSTITUTE, INVENT = 0.5, 0.06
_BEFORE = ("please ", "hey ", "ok ", "can you ", "could you please ", "hi, ", "now ")
_AFTER = (" please", ".", "?", " now", " thanks", "!", " .", " ?")


class Augmenter:
    """Draws variants of rows. Values come only from the rows it was given: never from held-back ones."""

    def __init__(self, rows: Iterable[Row], seed: int) -> None:
        self._random = random.Random(seed)
        values: dict[tuple[str, str], list[str]] = defaultdict(list)
        words: set[str] = set()
        for row in rows:
            words.update(row.text.split())
            for slot, value in row.slots:
                values[row.source, slot].append(value)
        self._words = sorted(words)
        # Half the draws follow how often a value occurs, half give every value the same chance.
        self._frequent = dict(values)
        self._distinct = {key: sorted(set(found)) for key, found in values.items()}
        self._names = sorted({v for (_, slot), found in values.items() if slot in OPEN_SLOTS for v in found})

    def variant(self, row: Row) -> Row:
        if row.slots and self._random.random() < SUBSTITUTE:
            row = self._substituted(row)
        return self._dressed(row)

    def nonsense(self, words: int) -> str:
        """That many different known words, in no order."""
        return " ".join(self._random.sample(self._words, min(words, len(self._words))))

    def _substituted(self, row: Row) -> Row:
        places = spans(row)
        if places is None:
            return row
        text, slots, at = "", [], 0
        for start, end, slot in places:
            value = self._value(row, slot, row.text[start:end])
            text += row.text[at:start] + value
            slots.append((slot, value))
            at = end
        changed = msgspec.structs.replace(row, text=text + row.text[at:], slots=tuple(slots))
        # A new value may hide another ("one" inside "one more"): keep the row only if it still reads back the same.
        read = spans(changed)
        same = read is not None and [(changed.text[a:b], s) for a, b, s in read] == [(v, s) for s, v in slots]
        return changed if same else row

    def _value(self, row: Row, slot: str, value: str) -> str:
        draw = self._random.random
        if draw() < 0.3:
            return value
        if slot in OPEN_SLOTS and draw() < INVENT:
            return self._invented(row.source)
        pool = self._frequent if draw() < 0.5 else self._distinct
        return self._random.choice(pool[row.source, slot])

    def _invented(self, source: str) -> str:
        if self._random.random() < 0.5:
            name = self._random.choice(self._names)
        else:
            name = " ".join(self._random.choices(self._words, k=self._random.randint(1, 4))).strip(".,?!")
        return (name.lower() if source == "hwu64" else name) or "it"

    def _dressed(self, row: Row) -> Row:
        """Sometimes a capital, a full stop, a please; never inside a slot's value."""
        draw = self._random.random
        text, values = row.text, [value for _, value in row.slots]
        if draw() < 0.06 and not any(text.startswith(value) for value in values):
            text = text[:1].upper() + text[1:]
        if draw() < 0.05:
            text = self._random.choice(_BEFORE) + text
        if draw() < 0.08 and text[-1:].isalnum():
            text += self._random.choice(_AFTER)
        dressed = msgspec.structs.replace(row, text=text)
        return dressed if spans(dressed) is not None else row
