"""Augmentation of rows: other values in the slots, other casing, punctuation and politeness."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from ..function_calls.call import slot_spans
from ..function_calls.dataset import Row
from .invented_values import ValueInventor, group_by_prefix

SUBSTITUTE = 0.75  # share of rows whose values are replaced
INVENT = 0.8  # factor on the slot's novelty: how often a replaced value is an invented one
REGIONS = ("state", "country")  # closed lists: the sentence alone does not separate them, nor from a city
RELOCATE = 0.5  # share of place values that are replaced by a place of another kind
_BEFORE = ("please ", "hey ", "ok ", "can you ", "could you please ", "hi, ", "now ")
_AFTER = (" please", ".", "?", " now", " thanks", "!", " .", " ?")


class Augmenter:
    """Draws variants of rows. Values come only from `rows`, so pass training rows, never held-back ones."""

    def __init__(self, rows: Iterable[Row], seed: int) -> None:
        self._random = random.Random(seed)
        values: dict[tuple[str, str], list[str]] = defaultdict(list)
        words: set[str] = set()
        for row in rows:
            words.update(row.text.split())
            for slot, value in row.slots:
                values[row.source, slot].append(value)
        self._words = sorted(words)
        self._by_prefix = group_by_prefix(self._words)
        self._prefixes = [key for key, group in self._by_prefix.items() if len(group) > 3] or list(self._by_prefix)
        # Half of the draws follow the frequency of values, half give every value the same chance.
        self._frequent = dict(values)
        self._distinct = {key: sorted(set(found)) for key, found in values.items()}
        self._inventor = ValueInventor(values, self._words, seed)

    def variant(self, row: Row) -> Row:
        """Return a variant of `row` with the same intent and correct labels."""
        if row.slots and self._random.random() < SUBSTITUTE:
            row = self._substitute_values(row)
        return self._restyle(row)

    def random_words(self, words: int) -> str:
        """Return `words` known words in random order.

        One text in three repeats words, one in three has many words with the same prefix: there, the previous word or
        token does not determine the next one.
        """
        kind = self._random.random()
        if kind < 0.33:
            groups = self._random.choices(self._prefixes, k=2)
            return " ".join(self._random.choice(self._by_prefix[self._random.choice(groups)]) for _ in range(words))
        distinct = words // 2 if kind < 0.67 else words
        drawn = self._random.sample(self._words, min(max(distinct, 2), len(self._words)))
        return " ".join(self._random.choices(drawn, k=words) if distinct < words else drawn)

    def _substitute_values(self, row: Row) -> Row:
        found = slot_spans(row)
        if found is None:
            return row
        text, slots, done = "", [], 0
        regions = [slot for _, _, slot in found if slot in ("city", *REGIONS)]
        for start, end, original in found:
            slot = self._place_slot(row, original, regions)
            value = self._value(row, slot, row.text[start:end], keep=slot == original)
            text += row.text[done:start] + value
            slots.append((slot, value))
            done = end
        changed = msgspec.structs.replace(row, text=text + row.text[done:], slots=tuple(slots))
        # A new value may contain another ("one" in "one more"): use the row only if the same values are found in it.
        again = slot_spans(changed)
        same = again is not None and [(changed.text[a:b], s) for a, b, s in again] == [(v, s) for s, v in slots]
        return changed if same else row

    def _place_slot(self, row: Row, slot: str, regions: Sequence[str]) -> str:
        """Sometimes replace a place by another kind of place.

        "rain in Rome", "rain in Peru" and "rain in Ohio" are one sentence: the network must learn the kind of place
        from its name. After a city, the second place remains a state or a country.
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
        if draw() < INVENT * self._inventor.novelty(row.source, slot):
            return self._inventor.invent(row.source, slot, value)
        pool = self._frequent if draw() < 0.5 else self._distinct
        return self._random.choice(pool[row.source, slot])

    def _restyle(self, row: Row) -> Row:
        """Sometimes add a capital, a full stop or a "please", never inside a slot's value."""
        draw = self._random.random
        text, values = row.text, [value for _, value in row.slots]
        if draw() < 0.06 and not any(text.startswith(value) for value in values):
            text = text[:1].upper() + text[1:]
        if draw() < 0.05:
            text = self._random.choice(_BEFORE) + text
        if draw() < 0.08 and text[-1:].isalnum():
            text += self._random.choice(_AFTER)
        restyled = msgspec.structs.replace(row, text=text)
        return restyled if slot_spans(restyled) is not None else row
