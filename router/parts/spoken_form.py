"""The spoken form of a transcript: the words as they are said, without capitals and punctuation.

A model that learned from commands in this form (`transcripts: spoken` in its manifest) misreads "Wake me up at 6:30
a.m.!", which a speech model writes.
"""

from __future__ import annotations

import re
import unicodedata

_DOTTED = re.compile(r"\b(?:[^\W\d_]\.\s?){2,}")  # a.m., U.S.A., J. K.
_SIGNS = {"%": " percent", "&": " and ", "+": " plus "}
_SIGN = re.compile("[" + "".join(map(re.escape, _SIGNS)) + "]")
_KEPT = "'.,:"  # within words and numbers: don't, 3.5, 6:30
_OUTSIDE = re.compile(r"(?<![^\W\d_])'|'(?![^\W\d_])|(?<!\d)[.,:]|[.,:](?!\d)")


def spoken_form(text: str) -> str:
    """Return the words in lower case, with single spaces; the text itself if it has no words."""
    lower = text.lower().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
    joined = _DOTTED.sub(lambda match: re.sub(r"[.\s]", "", match[0]) + " ", lower)
    named = _SIGN.sub(lambda match: _SIGNS[match[0]], joined)
    plain = "".join(" " if _is_mark(character) else character for character in named)
    return " ".join(_OUTSIDE.sub(" ", plain).split()) or text


def _is_mark(character: str) -> bool:
    return character not in _KEPT and unicodedata.category(character)[0] in "PSC"
