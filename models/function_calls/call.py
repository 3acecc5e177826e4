"""An answer is one function call as compact JSON: `{"name":"alarm_set","arguments":{"time":"six am"}}`.

An argument that occurs more than once is a list, in the order of the text.
"""

from __future__ import annotations

import msgspec

from .dataset import Row
from .intents import argument_name, functions_for


class FunctionCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: dict[str, str | list[str]] = {}


class Score(msgspec.Struct, frozen=True):
    """One answer against its row; `exact` is intent and every argument."""

    valid: bool
    intent: bool
    exact: bool


def expected_call(row: Row, name: str | None = None) -> FunctionCall:
    """The call that answers `row`, arguments in the order of the text."""
    arguments: dict[str, str | list[str]] = {}
    for slot, value in in_text_order(row):
        key = argument_name(slot)
        known = arguments.get(key)
        if known is None:
            arguments[key] = value
        elif isinstance(known, list):
            known.append(value)
        else:
            arguments[key] = [known, value]
    return FunctionCall(name=name or functions_for(row.source, row.intent)[0], arguments=arguments)


def slot_spans(row: Row) -> tuple[tuple[int, int, str], ...] | None:
    """(start, end, slot) of every slot's value in the text, in text order; None where they cannot be told apart."""
    found: list[tuple[int, int, str]] = []
    for slot, value in row.slots:
        at = _free_place(row.text, value, found)
        if at is None:
            return None
        found.append((at, at + len(value), slot))
    return tuple(sorted(found))


def in_text_order(row: Row) -> tuple[tuple[str, str], ...]:
    places = slot_spans(row)
    if places is None:
        return row.slots
    return tuple((slot, row.text[start:end]) for start, end, slot in places)


def parse_call(text: str) -> FunctionCall | None:
    """The call in an answer, or None when it is not one."""
    try:
        return msgspec.json.decode(text.encode(), type=FunctionCall)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return None


def score_answer(text: str, row: Row) -> Score:
    """Rows without slot labels (CLINC150, BANKING77) are exact when the function is right."""
    call = parse_call(text)
    if call is None:
        return Score(valid=False, intent=False, exact=False)
    intent = call.name in functions_for(row.source, row.intent)
    labelled = row.source in ("hwu64", "snips2017", "") or bool(row.slots)
    exact = intent and (not labelled or call.arguments == expected_call(row).arguments)
    return Score(valid=True, intent=intent, exact=exact)


def _free_place(text: str, value: str, taken: list[tuple[int, int, str]]) -> int | None:
    """Where `value` stands in `text`: on word boundaries if it can, never over another slot."""
    if not value:
        return None
    places: list[int] = []
    at = text.find(value)
    while at >= 0:
        if not any(start < at + len(value) and at < end for start, end, _ in taken):
            places.append(at)
        at = text.find(value, at + 1)
    whole = [at for at in places if not _inside_word(text, at, at + len(value))]
    return next(iter(whole or places), None)


def _inside_word(text: str, start: int, end: int) -> bool:
    before = start > 0 and text[start - 1].isalnum() and text[start].isalnum()
    after = end < len(text) and text[end].isalnum() and text[end - 1].isalnum()
    return before or after
