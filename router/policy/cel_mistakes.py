"""Explains why a condition is not valid CEL: habits from other languages by name, other errors in plain words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from .cel_source import METHODS, ExpressionError, Token

_WORDS: Mapping[str, str] = {
    "and": "write && instead of `{}`",
    "or": "write || instead of `{}`",
    "not": "write ! instead of `{}`, as in !request.stream or !(a in b)",
    "is": "write == instead of `{}`",
    "xor": "write != instead of `{}`",
    "if": "CEL has no `{}`: write condition ? a : b",
    "then": "CEL has no `{}`: write condition ? a : b",
    "else": "CEL has no `{}`: write condition ? a : b",
    "like": "CEL has no `{}`: write x.contains(y), x.startsWith(y) or x.matches(y)",
    "between": "CEL has no `{}`: write x >= a && x <= b",
}
_CONSTANTS: Mapping[str, str] = {
    "True": "write true instead of `True`",
    "False": "write false instead of `False`",
    "TRUE": "write true instead of `TRUE`",
    "FALSE": "write false instead of `FALSE`",
    "None": "CEL has no `None`: test with has(signal) whether a signal is known",
    "nil": "CEL has no `nil`: test with has(signal) whether a signal is known",
    "undefined": "CEL has no `undefined`: test with has(signal) whether a signal is known",
}
# Runs of adjacent signs that CEL does not have.
_SIGNS: Mapping[str, str] = {
    "=": "write == to compare",
    "===": "write == to compare",
    "!==": "write !=",
    "=<": "write <=",
    "=>": "write >=",
    "<>": "write !=",
    "<<": "write < to compare; CEL has no shift",
    ">>": "write > to compare; CEL has no shift",
    "<<=": "write <= to compare; CEL has no shift",
    ">>=": "write >= to compare; CEL has no shift",
    "&": "write && for `and`",
    "&&&": "write &&",
    "|": "write || for `or`",
    "|||": "write ||",
    "=~": "write x.matches(y) for a regular expression",
    "!~": "write !x.matches(y) for a regular expression",
    "~": "write x.matches(y) for a regular expression",
    ";": "remove it: a condition is one expression",
}
_SIGN_CHARACTERS = frozenset("=<>!&|~;")
_OPERATORS = frozenset({"==", "!=", "<", "<=", ">", ">=", "&&", "||"})
_UNEXPECTED = re.compile(r"(?:mismatched|extraneous) input '(?P<found>.*?)' expecting (?P<expected>.*)", re.DOTALL)
_UNKNOWN = re.compile(r"token recognition error at: '(?P<found>.*)'", re.DOTALL)
_MISSING = re.compile(r"missing (?P<missing>'.*?') at '(?P<found>.*)'", re.DOTALL)
_NO_CHOICE = re.compile(r"no viable alternative at input '(?P<found>.*)'", re.DOTALL)


def find_habit(tokens: Sequence[Token]) -> ExpressionError | None:
    """Find the first word or sign that another language has and CEL does not. `tokens` are those of `scan`."""
    at, field = 0, False  # field: the token follows a dot
    while at < len(tokens):
        token, end = tokens[at], max(_sign_run(tokens, at), at + 1)
        text = "".join(part.text for part in tokens[at:end])
        advice = ""
        if token.kind == "name" and not field:
            advice = _WORDS.get(text.lower(), "").format(text) or _CONSTANTS.get(text, "")
        elif token.kind == "sign" and text in _SIGNS:
            advice = f"`{text}` is no operator of CEL: {_SIGNS[text]}"
        if advice:
            return ExpressionError(advice, token.offset)
        if token.kind != "space":
            field = text == "."
        at = end
    return None


def _sign_run(tokens: Sequence[Token], at: int) -> int:
    """Return the index after the comparison and logic signs that stand together from `at`."""
    while at < len(tokens) and tokens[at].kind == "sign" and set(tokens[at].text) <= _SIGN_CHARACTERS:
        at += 1
    return at


def explain_syntax_error(message: str, tokens: Sequence[Token]) -> str:
    """Put the parser's message (ANTLR's words) into plain ones. An unknown message stays as it is."""
    message = message.removeprefix("Syntax error: ")
    if not any(token.kind != "space" for token in tokens):
        return "the condition is empty"
    if match := _UNEXPECTED.match(message):
        return _unexpected(match["found"], complete=match["expected"] == "<EOF>" or "'&&'" in match["expected"])
    if match := _UNKNOWN.match(message):
        found = match["found"].strip()
        return "a text has no closing quote" if found[:1] in ("'", '"') else f"unknown character `{found}`"
    if match := _MISSING.match(message):
        place = "at the end" if match["found"] == "<EOF>" else f"before `{match['found']}`"
        return f"{match['missing'].replace(chr(39), '`')} is missing {place}"
    if match := _NO_CHOICE.match(message):
        return f"`{match['found']}` is incomplete"
    return message


def _unexpected(found: str, *, complete: bool) -> str:
    """`complete`: what stands before is an expression, so an operator is missing; otherwise a value is."""
    if found == "<EOF>":
        return "the condition ends where a value is expected"
    if found in METHODS and complete:
        return f"`{found}` is a method: write x.{found}(y)"
    if found in (")", "]", "}") and complete:
        return f"`{found}` without an opening bracket"
    if complete:
        return f"unexpected `{found}`: put an operator such as && or || before it"
    return f"unexpected `{found}`" + (": a value is missing before it" if found in _OPERATORS else "")
