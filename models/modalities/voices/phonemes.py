"""Text → sentences → clauses, and the phonemes of clauses → the ids that a Piper voice reads.

As Piper does it (github.com/OHF-Voice/piper1-gpl, src/piper/phonemize_espeak.py and phoneme_ids.py): espeak-ng writes
a clause in IPA, the clause's punctuation follows, each code point of the decomposed form is a symbol, and a pad stands
after every symbol.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence

import msgspec

from .files import END, PAD, START, VoiceSettings

MAX_SENTENCE = 300
"""Characters that are spoken in one go: what bounds a voice's memory, and how long a cancelled one goes on."""
_SENTENCE_END = re.compile(r"""[.!?…]+["')\]»”’]*\s+|[。！？]+["')\]»”’]*|\n+|$""")
_CLAUSE_END = re.compile(r"(?<=[,;:])\s+|(?<=[，、；：])")
_MARKS = {mark: mark for mark in ".?!,;:"} | dict(zip("。？！，、；：…", ".?!,,;:.", strict=True))
_PAUSES = (",", ";", ":")
_CLOSING = "\"')]»”’ "
_LANGUAGE = re.compile(r"\([^)]*\)")  # espeak-ng tells where it changes to another language


class Clause(msgspec.Struct, frozen=True):
    """Words, and the punctuation after them: one of ``. ? ! , ; :``, or none."""

    words: str
    mark: str


def split_sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text; one that is longer than `MAX_SENTENCE` is cut where it breathes."""
    start = 0
    for end in _SENTENCE_END.finditer(text):
        rest = " ".join(text[start : end.end()].split())
        start = end.end()
        while len(rest) > MAX_SENTENCE:
            head = rest[:MAX_SENTENCE]
            at = max(head.rfind(mark) for mark in (", ", "; ", ": ")) + 1
            at = at or head.rfind(" ") + 1 or MAX_SENTENCE
            yield rest[:at].strip()
            rest = rest[at:].strip()
        if rest:
            yield rest


def split_clauses(sentence: str) -> Iterator[Clause]:
    """Yield the clauses of a sentence; those without a letter, digit or sign that has a name are left out."""
    for piece in _CLAUSE_END.split(sentence):
        words = piece.strip().rstrip(_CLOSING)
        if any(unicodedata.category(character)[0] in "LNS" for character in words):
            yield Clause(words, _MARKS.get(words[-1], ""))


def phoneme_ids(spoken: Sequence[tuple[str, str]], settings: VoiceSettings) -> tuple[int, ...]:
    """Return the ids of a sentence: a start, each symbol and a pad after it, an end; () if nothing of it is known.

    Args:
        spoken: each clause in IPA as espeak-ng writes it, and its punctuation.
    """
    known = settings.phoneme_id_map
    pad = known[PAD]
    ids = [*known[START], *pad]
    has_sound = False
    for ipa, mark in spoken:
        text = " ".join(_LANGUAGE.sub("", ipa).split()) + mark + (" " if mark in _PAUSES else "")
        for symbol in _symbols(unicodedata.normalize("NFD", text), settings):
            if symbol in known and symbol not in (PAD, START, END):
                ids += [*known[symbol], *pad]
                has_sound = has_sound or symbol.isalpha()
    return (*ids, *known[END]) if has_sound else ()


def _symbols(text: str, settings: VoiceSettings) -> Iterator[str]:
    """Yield the symbols of a text: its code points, or those groups of them that the voice knows as one."""
    groups = sorted(("".join(one) for one in settings.vowel_clusters or ()), key=len, reverse=True)
    at = 0
    while at < len(text):
        symbol = next((group for group in groups if group and text.startswith(group, at)), text[at])
        yield symbol
        at += len(symbol)
