"""More utterances from the ones there are: other values in the slots, other casing, punctuation and politeness."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from ...function_calls.call import slot_spans
from ...function_calls.dataset import Row
from .invented_values import ValueInventor, alike

SUBSTITUTE = 0.75  # share of rows
INVENT = 0.8  # of what its slot says is new in a value
REGIONS = ("state", "country")  # closed lists: a sentence does not tell one from the other, nor from a city
RELOCATE = 0.5  # share of the places that become one of another kind
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
        self._alike = alike(self._words)
        self._beginnings = [key for key, group in self._alike.items() if len(group) > 3] or list(self._alike)
        # Half the draws follow how often a value occurs, half give every value the same chance.
        self._frequent = dict(values)
        self._distinct = {key: sorted(set(found)) for key, found in values.items()}
        self._names = ValueInventor(values, self._words, seed)

    def variant(self, row: Row) -> Row:
        if row.slots and self._random.random() < SUBSTITUTE:
            row = self._substituted(row)
        return self._dressed(row)

    def nonsense(self, words: int) -> str:
        """That many known words in no order. One time in three some come back, one time in three many begin alike:
        after those, the word or piece before is not enough to tell what follows.
        """
        kind = self._random.random()
        if kind < 0.33:
            groups = self._random.choices(self._beginnings, k=2)
            return " ".join(self._random.choice(self._alike[self._random.choice(groups)]) for _ in range(words))
        few = words // 2 if kind < 0.67 else words
        known = self._random.sample(self._words, min(max(few, 2), len(self._words)))
        return " ".join(self._random.choices(known, k=words) if few < words else known)

    def _substituted(self, row: Row) -> Row:
        places = slot_spans(row)
        if places is None:
            return row
        text, slots, at = "", [], 0
        regions = [slot for _, _, slot in places if slot in ("city", *REGIONS)]
        for start, end, given in places:
            slot = self._relocated(row, given, regions)
            value = self._value(row, slot, row.text[start:end], keep=slot == given)
            text += row.text[at:start] + value
            slots.append((slot, value))
            at = end
        changed = msgspec.structs.replace(row, text=text + row.text[at:], slots=tuple(slots))
        # A new value may hide another ("one" inside "one more"): keep the row only if it still reads back the same.
        read = slot_spans(changed)
        same = read is not None and [(changed.text[a:b], s) for a, b, s in read] == [(v, s) for s, v in slots]
        return changed if same else row

    def _relocated(self, row: Row, slot: str, regions: Sequence[str]) -> str:
        """Now and then another kind of place: "rain in Rome", "rain in Peru" and "rain in Ohio" are one sentence, so
        that which of them it is must be known from the name. What follows a city stays a state or a country.
        """
        if slot not in regions or regions.count(slot) > 1 or len(regions) > 2 or self._random.random() >= RELOCATE:
            return slot
        kinds = REGIONS if len(regions) == 2 else ("city", *REGIONS)
        known = [kind for kind in kinds if (row.source, kind) in self._distinct]
        return self._random.choice(known) if known and (len(regions) == 1 or slot in REGIONS) else slot

    def _value(self, row: Row, slot: str, value: str, *, keep: bool = True) -> str:
        draw = self._random.random
        if keep and draw() < 0.2:
            return value
        if slot in REGIONS:
            return self._random.choice(self._distinct[row.source, slot])
        if draw() < INVENT * self._names.novelty(row.source, slot):
            return self._names.invented(row.source, slot, value)
        pool = self._frequent if draw() < 0.5 else self._distinct
        return self._random.choice(pool[row.source, slot])

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
        return dressed if slot_spans(dressed) is not None else row
