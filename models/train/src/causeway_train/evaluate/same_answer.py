"""Labels that say which rows have the same answer, for training and measuring the semantic cache.

HWU64 and SNIPS: the same intent and the same slots. CLINC150 has no slots. Its intents that take no argument (`CLOSED`)
have one answer each; in all others the words that fewer than 8 % of the intent's rows have count as arguments, unless
HWU64 and SNIPS show them to be general (5 uses, fewer than a tenth of them in slots). Numbers and the protected words
always count as arguments. This is strict: another wording of an argument is another answer.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec

from causeway_server.models.semantic.protected import NEGATIONS, ORDERED, SCALES, words

from ..function_calls.dataset import Row

Part = Literal["train", "calibrate", "report"]
SOURCES = ("hwu64", "clinc150")  # of the streams; the judge's intents come from all sources
_RARE = 0.08
_LETTERS = re.compile(r"\w+")
CLOSED = frozenset(
    """
account_blocked application_status are_you_a_bot cancel change_accent credit_limit credit_score current_location
direct_deposit do_you_have_pets expiration_date find_phone flip_coin goodbye greeting how_old_are_you
improve_credit_score income jump_start last_maintenance lost_luggage maybe meaning_of_life next_holiday next_song no
oil_change_how oil_change_when order_checks payday pin_change pto_balance pto_request_status pto_used repeat
replacement_card_duration reset_settings rewards_balance rollover_401k sync_device thank_you tire_change tire_pressure
user_name w2 what_are_your_hobbies what_can_i_ask_you what_is_your_name what_song where_are_you_from
who_do_you_work_for who_made_you yes
""".split()
)
_LIGHT = frozenset(
    """
a an the please can could would you will me i my to for of is are do did be want need like tell let know give us hey hi
hello just if it that this in on at and with what how so really thank okay there have has am was when where why who
which should by from your
""".split()
)
_GENERAL_USES, _GENERAL_SLOT_SHARE = 5, 0.1
# At an end of a scale only in some uses.
_WEAK = frozenset(
    "set get make start good best new schedule book create give send show display most in with play like love".split()
)
_PROTECTED = (NEGATIONS | ORDERED).union(*(one | other for one, other in SCALES)) - _WEAK


class LabelledRow(msgspec.Struct, frozen=True):
    """A row with a label of its answer. Two rows of one source have the same answer if and only if the labels are
    equal.
    """

    row: Row
    words: tuple[str, ...]
    answer: tuple[object, ...]
    part: Part

    @property
    def intent(self) -> tuple[str, str]:
        return self.row.source, self.row.intent


def label(rows: Sequence[Row]) -> list[LabelledRow]:
    """Label the answers of rows of all sources. Of rows with equal text only the first is kept."""
    first: dict[tuple[str, str], Row] = {}
    for row in rows:
        first.setdefault((row.source, " ".join(_LETTERS.findall(row.text.lower()))), row)
    kept = [(row, found) for row in first.values() if (found := tuple(words(row.text)))]
    general = _general_words(rows)
    sizes = Counter((row.source, row.intent) for row, _ in kept)
    having = Counter((row.source, row.intent, word) for row, found in kept for word in set(found))

    def answer(row: Row, found: tuple[str, ...]) -> tuple[object, ...]:
        if row.source in ("hwu64", "snips2017"):
            return row.source, row.intent, tuple(sorted((name, value.lower()) for name, value in row.slots))
        if row.intent in CLOSED:
            return row.source, row.intent
        least = _RARE * sizes[row.source, row.intent]
        arguments = [
            word
            for word in found
            if word not in _LIGHT
            and (
                word in _PROTECTED
                or not word.isalpha()
                or (having[row.source, row.intent, word] < least and word not in general)
            )
        ]
        return row.source, row.intent, tuple(sorted(arguments))

    return [LabelledRow(row, found, answer(row, found), _part(row.text)) for row, found in kept]


def _general_words(rows: Sequence[Row]) -> frozenset[str]:
    """Return the words that the rows with slots use, but rarely in a slot."""
    uses: Counter[str] = Counter()
    in_slots: Counter[str] = Counter()
    for row in rows:
        if row.source in ("hwu64", "snips2017"):
            uses.update(words(row.text))
            in_slots.update([word for _, value in row.slots for word in words(value)])
    return frozenset(
        word for word, count in uses.items() if count >= _GENERAL_USES and in_slots[word] < _GENERAL_SLOT_SHARE * count
    )


def _part(text: str) -> Part:
    """Return the part that a row belongs to, by a hash of its text: 60 % training, 20 % choice of the threshold, 20 %
    reported figures.
    """
    digest = hashlib.sha256(f"semantic 2\0{' '.join(words(text))}".encode()).digest()
    share = int.from_bytes(digest[:4], "big") / 2**32
    return "train" if share < 0.6 else "calibrate" if share < 0.8 else "report"
