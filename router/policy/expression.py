"""Compilation of a policy's conditions, CEL over the signals of `signals.py`, when the policy is activated. This module
makes the checks that CEL's binding does not make at compile time: each signal, function and bound name exists, the
result is a bool, types fit (`request.tags == "private"` would silently be false), and a compared text can occur.
Invalid CEL is explained: operators of other languages are named, other errors are put into plain words. Language
definition: https://github.com/google/cel-spec

`a || b` is true if either side is true, even if a signal of the other side is absent: a condition fails only if its
result depends on an absent signal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from .cel_library import cel
from .cel_source import METHODS, ExpressionError, Token, conditions, needed_signals, rewrite, scan, text_at
from .signals import SIGNALS, Expression, SignalSpec, SignalValues, Value

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
# Runs of adjacent operator signs that CEL does not have.
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
    """Find the first word or sign of another language that CEL does not have. `tokens`: the result of `scan`."""
    at, field = 0, False  # field: the token follows a dot
    while at < len(tokens):
        token, end = tokens[at], max(_sign_run(tokens, at), at + 1)
        text = "".join(part.text for part in tokens[at:end])
        advice = ""
        if token.kind == "name" and not field:
            advice = _WORDS.get(text.lower(), "").format(text) or _CONSTANTS.get(text, "")
        elif token.kind == "sign" and text in _SIGNS:
            advice = f"`{text}` is not an operator of CEL: {_SIGNS[text]}"
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
    """Put the message of the parser (ANTLR) into plain words. An unknown message is kept."""
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
    """Explain an unexpected token. `complete`: behind an expression, so an operator is missing, else a value."""
    if found == "<EOF>":
        return "the condition ends where a value is expected"
    if found in METHODS and complete:
        return f"`{found}` is a method: write x.{found}(y)"
    if found in (")", "]", "}") and complete:
        return f"`{found}` without an opening bracket"
    if complete:
        return f"unexpected `{found}`: put an operator such as && or || before it"
    return f"unexpected `{found}`" + (": a value is missing before it" if found in _OPERATORS else "")


TAGS: Final = "request.tags"
_COMPARISONS: Final = frozenset({"==", "!=", "in", "<", "<=", ">", ">="})
_NOTHING: Final = cel.Context({})


def fold_tag_literals(tokens: list[Token]) -> list[Token]:
    """Return the tokens of a condition with literals for tags in lower case, because tags are compared without case.
    These are all texts of an operand that names `request.tags`, except texts compared with another signal.
    """
    folded: dict[int, str] = {}
    for condition in conditions(tokens):
        if any(token.signal is not None and token.signal.name == TAGS for token in condition):
            for at, token in enumerate(condition):
                if token.kind == "string" and not _is_of_another_signal(condition, at):
                    folded[token.offset] = _folded(token.text, is_pattern=_is_pattern(condition, at))
    return [msgspec.structs.replace(token, text=folded.get(token.offset, token.text)) for token in tokens]


def changed_tag_literals(source: str) -> list[tuple[str, str]]:
    """Return the literals for tags with upper case in a valid condition, and the lower-case form of each. Regular
    expressions are left out, where upper case is often a character class.
    """
    tokens, _, _ = rewrite(scan(source))
    pairs = enumerate(zip(tokens, fold_tag_literals(tokens), strict=True))
    return [
        (token.text, folded.text)
        for at, (token, folded) in pairs
        if token.text != folded.text and not _is_pattern(tokens, at)
    ]


def _folded(literal: str, *, is_pattern: bool) -> str:
    """Return a literal as tags are compared. The case of a pattern's letters has a meaning (`\\D`)."""
    value = cel.compile(literal).execute(_NOTHING)
    if not isinstance(value, str) or value == value.casefold():
        return literal
    # JSON and CEL have the same escapes, and both take characters beyond ASCII as they are.
    return json.dumps(f"(?i){value}" if is_pattern else value.casefold(), ensure_ascii=False)


def _is_of_another_signal(tokens: list[Token], at: int) -> bool:
    """Return whether the text at `at` is compared, by itself or in a list, with a signal whose case matters."""
    first = last = at
    while text_at(tokens, first - 1) == "," and tokens[first - 2].kind == "string":
        first -= 2
    while text_at(tokens, last + 1) == "," and tokens[min(last + 2, len(tokens) - 1)].kind == "string":
        last += 2
    if text_at(tokens, first - 1) == "[" and text_at(tokens, last + 1) == "]":
        first, last = first - 1, last + 1
    beside = []
    if text_at(tokens, first - 1) in _COMPARISONS:
        beside.append(first - 2)
    if text_at(tokens, last + 1) in _COMPARISONS:
        beside.append(last + 2)
    if text_at(tokens, first - 1) == "(" and text_at(tokens, first - 3) == ".":
        beside.append(first - 4)  # a method's argument
    signals = [tokens[one].signal for one in beside if 0 <= one < len(tokens)]
    return any(signal is not None and signal.name != TAGS for signal in signals)


def _is_pattern(tokens: list[Token], at: int) -> bool:
    return text_at(tokens, at - 2) == "matches"


MAX_LENGTH = 2000


def compile_expression(source: str, more: Mapping[str, SignalSpec] = {}) -> Expression:
    """Compile and check a condition. Raises ExpressionError, with the offset in the source where it is known.

    Args:
        more: Signals that it may name beside those of policies.
    """
    if len(source) > MAX_LENGTH:
        raise ExpressionError(f"the expression is longer than {MAX_LENGTH} characters")
    tokens = scan(source)
    try:
        _compile(source)  # the original first, so that the binding's message points into the written text
        flat, signals, presences = rewrite(tokens, more)
    except ExpressionError as error:
        habit = find_habit(tokens)
        if habit is None:
            raise
        raise habit from error
    flat = fold_tag_literals(flat)
    program = _compile(" ".join(token.text for token in flat))
    for condition in conditions(flat):
        _check(condition, source[condition[0].offset : condition[-1].end])
    return Expression(source, program, signals, presences, needed_signals(flat))


def is_constant(expression: Expression) -> bool | None:
    """Return the result of a condition without signals; None if it names a signal."""
    if expression.signals:
        return None
    result = expression.evaluate(SignalValues({}))
    return result if isinstance(result, bool) else None


def _compile(source: str) -> cel.Program:
    """Compile the expression. Raises ExpressionError, with a plain explanation."""
    try:
        return cel.compile(source)
    except Exception as error:
        lines = str(error).splitlines()
        message = lines[0].partition("ERROR: <input>:")[2] or lines[0]
        line, _, rest = message.partition(":")
        column, _, explanation = rest.partition(": ")
        offset = int(column) - 1 if line == "1" and column.isdigit() else None
        explanation = explain_syntax_error(explanation or message, scan(source))
        raise ExpressionError(f"the expression is not valid CEL: {explanation}", offset) from error


def _check(condition: list[Token], written: str) -> None:
    """Run one operand of `&&`, `||`, `?:` on sample values, so that no short circuit hides a type error."""
    program = _compile(" ".join(token.text for token in condition))
    named = [token.signal for token in condition if token.signal is not None and token.signal.name not in SIGNALS]
    for values in _SAMPLES if not named else [_sample_values(each, named) for each in (_LOW, _HIGH)]:
        try:
            result = program.execute(values.context)
        except (IndexError, ZeroDivisionError, OverflowError, KeyError):
            continue  # depends on the values, not on the types
        except TypeError as error:
            raise ExpressionError(
                f"`{written}` mixes types: {_types(condition)}CEL does not mix int, double and text in one operation; "
                "write 1.0 for a double, double(x) to convert",
                condition[0].offset,
            ) from error
        except Exception as error:
            message = str(error).partition(". Check")[0].partition("\n")[0]
            raise ExpressionError(f"`{written}`: {message}", condition[0].offset) from error
        if not isinstance(result, bool):
            raise ExpressionError(
                f"`{written}` is {_type_name(result)}, not true or false: compare it with something",
                condition[0].offset,
            )


def _types(condition: list[Token]) -> str:
    named = {token.signal.name: token.signal.type for token in condition if token.signal is not None}
    return "".join(f"{name} is {_ARTICLES[kind]}, " for name, kind in named.items())


def _type_name(result: object) -> str:
    return {int: "a number", float: "a number", str: "text", list: "a list"}.get(type(result), type(result).__name__)


_ARTICLES = {"int": "an int", "double": "a double", "bool": "a bool", "string": "text", "list": "a list of text"}
_LOW: dict[str, Value] = {"int": 1, "double": 0.5, "bool": False, "string": "a", "list": ["a"]}
_HIGH: dict[str, Value] = {"int": 20000, "double": 2000.5, "bool": True, "string": "zz", "list": ["a", "zz"]}


def _sample_values(values: dict[str, Value], of_clouds: Sequence[SignalSpec] = ()) -> SignalValues:
    specs = (*SIGNALS.values(), *of_clouds)
    presences: dict[str, Value] = {spec.presence_variable: True for spec in specs}
    return SignalValues({spec.variable: values[spec.type] for spec in specs} | presences)


_SAMPLES = (_sample_values(_LOW), _sample_values(_HIGH))
