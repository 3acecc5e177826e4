"""Structural features of a prompt: its length and the kinds of its content."""

from __future__ import annotations

import math
import re

CHARACTERS = 8192  # structural features see the first characters of a longer prompt
CHOICE_LINE = re.compile(r"^[^\S\n]*\(?[A-H1-8][.):]\s", re.MULTILINE)
_NUMBER = re.compile(r"\d+")
_WORD = re.compile(r"[^\W\d_]+")
_QUESTION_WORD = re.compile(r"\b(?:how (?:many|much)|total|calculate|sum|percent|average|each)\b", re.IGNORECASE)
_CODE = re.compile(r"[{}<>=;\\_^]|def |```")

STRUCTURE = 11  # features
LENGTH_INPUT, CHOICES_INPUT = 0, 5  # of these: the logarithm of the length, and whether the prompt has choices


def structure(text: str) -> tuple[float, ...]:
    """Return structural features of a prompt: its length and the kinds of its content."""
    text = text[:CHARACTERS]
    words, numbers = _WORD.findall(text), _NUMBER.findall(text)
    capitals = sum(word[0].isupper() for word in words)
    return (
        math.log1p(len(text)),
        math.log1p(len(words)),
        math.log1p(len(numbers)),
        math.log1p(text.count("\n")),
        math.log1p(len(CHOICE_LINE.findall(text))),
        float(has_choices(text)),
        float("?" in text),
        float(bool(_QUESTION_WORD.search(text))),
        float(bool(_CODE.search(text))),
        capitals / max(1, len(words)),
        sum(map(len, words)) / max(1, len(words)),
    )


def has_choices(text: str) -> bool:
    """Return whether a prompt lists the answers to choose from."""
    return len(CHOICE_LINE.findall(text[:CHARACTERS])) >= 2
