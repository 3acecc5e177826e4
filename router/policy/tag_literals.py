"""Tags are compared without case: the texts that a condition compares with `request.tags` are folded, as tags are."""

from __future__ import annotations

import json
from typing import Final

import cel
import msgspec

from .cel_source import Token, conditions, rewrite, scan

TAGS: Final = "request.tags"
_COMPARISONS: Final = frozenset({"==", "!=", "in", "<", "<=", ">", ">="})
_NOTHING: Final = cel.Context({})


def fold_tag_literals(tokens: list[Token]) -> list[Token]:
    """Return the tokens of a condition with its literals about tags folded.

    These are all texts of an operand that names `request.tags`, but for those that stand beside another signal.
    """
    folded: dict[int, str] = {}
    for condition in conditions(tokens):
        if any(token.signal is not None and token.signal.name == TAGS for token in condition):
            for at, token in enumerate(condition):
                if token.kind == "string" and not _is_of_another_signal(condition, at):
                    folded[token.offset] = _folded(token.text, is_pattern=_is_pattern(condition, at))
    return [msgspec.structs.replace(token, text=folded.get(token.offset, token.text)) for token in tokens]


def changed_tag_literals(source: str) -> list[tuple[str, str]]:
    """Return the literals about tags of a valid condition that have upper case, and what each is compared as.

    Patterns are left out: their case makes no difference, and is often that of a class.
    """
    tokens, _, _ = rewrite(scan(source))
    pairs = enumerate(zip(tokens, fold_tag_literals(tokens), strict=True))
    return [
        (token.text, folded.text)
        for at, (token, folded) in pairs
        if token.text != folded.text and not _is_pattern(tokens, at)
    ]


def _folded(literal: str, *, is_pattern: bool) -> str:
    """Return a literal as tags are compared with it. The case of a pattern's letters has a meaning (`\\D`)."""
    value = cel.compile(literal).execute(_NOTHING)
    if not isinstance(value, str) or value == value.casefold():
        return literal
    # JSON's escapes are CEL's, and a character beyond ASCII stands for itself in both.
    return json.dumps(f"(?i){value}" if is_pattern else value.casefold(), ensure_ascii=False)


def _is_of_another_signal(tokens: list[Token], at: int) -> bool:
    """Whether the text at `at` is compared with a signal that keeps its case, or with a list beside one."""
    first = last = at
    while _text(tokens, first - 1) == "," and tokens[first - 2].kind == "string":
        first -= 2
    while _text(tokens, last + 1) == "," and tokens[min(last + 2, len(tokens) - 1)].kind == "string":
        last += 2
    if _text(tokens, first - 1) == "[" and _text(tokens, last + 1) == "]":
        first, last = first - 1, last + 1
    beside = []
    if _text(tokens, first - 1) in _COMPARISONS:
        beside.append(first - 2)
    if _text(tokens, last + 1) in _COMPARISONS:
        beside.append(last + 2)
    if _text(tokens, first - 1) == "(" and _text(tokens, first - 3) == ".":
        beside.append(first - 4)  # a method's argument
    signals = [tokens[one].signal for one in beside if 0 <= one < len(tokens)]
    return any(signal is not None and signal.name != TAGS for signal in signals)


def _is_pattern(tokens: list[Token], at: int) -> bool:
    return _text(tokens, at - 2) == "matches"


def _text(tokens: list[Token], at: int) -> str:
    return tokens[at].text if 0 <= at < len(tokens) else ""
