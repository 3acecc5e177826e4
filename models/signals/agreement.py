"""Comparison of two answers: by the choice, the number or the words that they have, or by their embeddings."""

from __future__ import annotations

import re
import string
from collections import Counter

import numpy as np

from .pair import Encode

F1_RIGHT = 0.5  # word overlap from which a text counts as the reference
SIMILAR = 0.8  # cosine of the encoder's vectors from which two free texts agree
MIN_CHOICES = 2
CHOICE = re.compile(r"^[^\S\n]*\(?([A-H])[.):]\s", re.MULTILINE)
_BARE_LETTER = re.compile(r"^\W*([A-H])(?:[.):,]|\s*$)")  # "B. below", but not "A good way"
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation, " "))
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_BOXED = re.compile(r"\\boxed\{[^\d}-]*(-?\d[\d,]*(?:\.\d+)?)")


def answers_agree(question: str, small: str, large: str, encode: Encode) -> bool:
    """Return whether two answers agree by their texts; by the letters of choices, if listed and both begin with one."""
    letters = CHOICE.findall(question)
    chosen = [found[1] for text in (small, large) if (found := _BARE_LETTER.match(text)) and found[1] in letters]
    if len(letters) >= MIN_CHOICES and len(chosen) == 2:
        return chosen[0] == chosen[1]
    return texts_agree(small, large, encode)


def texts_agree(small: str, large: str, encode: Encode | None) -> bool:
    """Compare two texts: (1) by number if both consist of little else, (2) by their words, (3) by embedding."""
    if _is_number(large):  # (1)
        return last_number(small) == last_number(large) is not None
    if same_text(small, large):  # (2)
        return True
    return encode is not None and float(np.dot(encode(small), encode(large))) >= SIMILAR  # (3)


def same_text(text: str, reference: str) -> bool:
    """Return whether a text is the reference, contains it, or shares enough of its words, as in SQuAD."""
    words, wanted = _words(text), _words(reference)
    if not words or not wanted:
        return words == wanted
    if f" {' '.join(wanted)} " in f" {' '.join(words)} ":
        return True
    common = sum((Counter(words) & Counter(wanted)).values())
    return 2 * common / (len(words) + len(wanted)) >= F1_RIGHT


def last_number(text: str) -> float | None:
    r"""Return the number in ``\boxed{}``, as mathematical answers have it, or else the last one of a text."""
    found = _BOXED.findall(text) or _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def _is_number(text: str) -> bool:
    return last_number(text) is not None and not any(word.isalpha() and len(word) > 3 for word in _words(text))


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()
