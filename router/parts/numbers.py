"""Numbers of transcripts as they are said in English: commands that models learn from contain words, not digits."""

from __future__ import annotations

import re

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_ORDINALS = {"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth"}
_ORDINALS |= {"twelve": "twelfth"}
_NUMBER = re.compile(
    r"(?<![\w.,:])(?P<whole>\d{1,4})(?:[:.](?P<part>\d{1,2}))?(?P<ordinal>st|nd|rd|th)?(?=\s?(?P<half>[ap]m)\b|\b)(?![.,:]?\d)"
)


def spell_numbers(text: str) -> str:
    """Return a text in lower case with its numbers of up to four digits, times and ordinals in words. A number that
    begins with a zero is a code: each digit is a word.
    """
    return _NUMBER.sub(_spell, text)


def _spell(match: re.Match[str]) -> str:
    whole, part = int(match["whole"]), match["part"]
    space = " " if match["half"] and not match.string[match.end()].isspace() else ""
    if part is None:
        is_code = match["whole"][0] == "0" and not (match["ordinal"] or match["half"])
        words = " ".join(_ONES[int(digit)] for digit in match["whole"]) if is_code else _words(whole)
        return _ordinal(words) if match["ordinal"] else words + space
    if ":" in match[0] or match["half"]:
        minutes = {0: "", **{at: f" oh {_ONES[at]}" for at in range(1, 10)}}.get(int(part), f" {_words(int(part))}")
        return _words(whole) + minutes + space
    return " ".join([_words(whole), "point", *(_ONES[int(digit)] for digit in part)])


def _words(number: int) -> str:
    if number < 20:
        return _ONES[number]
    if number < 100:
        tens, ones = _TENS[number // 10 - 2], number % 10
        return f"{tens} {_ONES[ones]}" if ones else tens
    if number < 1000 or number % 1000 == 0 or 2000 < number < 2010:
        unit, name = (100, "hundred") if number < 1000 else (1000, "thousand")
        rest = number % unit
        return f"{_words(number // unit)} {name}" + (f" and {_words(rest)}" if rest else "")
    hundreds, rest = divmod(number, 100)  # a year
    return f"{_words(hundreds)} {_words(rest) if rest > 9 else f'oh {_ONES[rest]}' if rest else 'hundred'}"


def _ordinal(words: str) -> str:
    before, _, last = words.rpartition(" ")
    last = _ORDINALS.get(last) or (f"{last[:-1]}ieth" if last.endswith("y") else f"{last}th")
    return f"{before} {last}".strip()
