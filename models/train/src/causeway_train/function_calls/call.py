"""The form of an answer: one function call as compact JSON: `{"name":"alarm_set","arguments":{"time":"six am"}}`.

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
    """The comparison of one answer with its row's expected call."""

    valid: bool  # the answer is a function call
    intent: bool  # the answer calls a right function
    exact: bool  # the answer calls a right function with every argument right


def expected_call(row: Row) -> FunctionCall:
    """Return the call that answers `row`: the first function of its intent, its arguments in the order of the text."""
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
    return FunctionCall(name=functions_for(row.source, row.intent)[0], arguments=arguments)


def slot_spans(row: Row) -> tuple[tuple[int, int, str], ...] | None:
    """Locate every slot's value in the text.

    Returns:
        (start, end, slot) in text order; None when a value cannot be located.
    """
    spans: list[tuple[int, int, str]] = []
    for slot, value in row.slots:
        start = _locate(row.text, value, spans)
        if start is None:
            return None
        spans.append((start, start + len(value), slot))
    return tuple(sorted(spans))


def in_text_order(row: Row) -> tuple[tuple[str, str], ...]:
    """Return the row's slots in the order of the text, or as labelled when a value cannot be located."""
    spans = slot_spans(row)
    if spans is None:
        return row.slots
    return tuple((slot, row.text[start:end]) for start, end, slot in spans)


def parse_call(text: str) -> FunctionCall | None:
    """Return the call in an answer, or None when the answer is not a call."""
    try:
        return msgspec.json.decode(text.encode(), type=FunctionCall)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return None


def score_answer(text: str, row: Row) -> Score:
    """Score an answer. Rows without slot labels (CLINC150, BANKING77) are exact when the function is right."""
    call = parse_call(text)
    if call is None:
        return Score(valid=False, intent=False, exact=False)
    intent = call.name in functions_for(row.source, row.intent)
    labelled = row.source in ("hwu64", "snips2017", "") or bool(row.slots)
    exact = intent and (not labelled or call.arguments == expected_call(row).arguments)
    return Score(valid=True, intent=intent, exact=exact)


def _locate(text: str, value: str, taken: list[tuple[int, int, str]]) -> int | None:
    """Find `value` in `text`, preferably on word boundaries, never overlapping another slot."""
    if not value:
        return None
    starts: list[int] = []
    at = text.find(value)
    while at >= 0:
        if not any(start < at + len(value) and at < end for start, end, _ in taken):
            starts.append(at)
        at = text.find(value, at + 1)
    whole_words = [at for at in starts if not _cuts_word(text, at, at + len(value))]
    return next(iter(whole_words or starts), None)


def _cuts_word(text: str, start: int, end: int) -> bool:
    before = start > 0 and text[start - 1].isalnum() and text[start].isalnum()
    after = end < len(text) and text[end].isalnum() and text[end - 1].isalnum()
    return before or after
