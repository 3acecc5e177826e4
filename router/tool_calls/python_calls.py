"""Calls written as Python, as Llama 3.2, Llama 4 and Gemma do: ``[lamp(on=True), fan(speed=2)]``."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Set as AbstractSet
from typing import Final

_MAX_CHARACTERS: Final = 64 * 1024
_MARKS: Final = re.compile(r"""["'()\[\]{}]""")
_IN_STRING: Final = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}
_NAMES: Final[dict[str, bool | None]] = {"true": True, "false": False, "null": None}

Value = dict[str, "Value"] | list["Value"] | str | int | float | bool | None


class BracketScanner:
    """Finds the end of a bracketed Python expression in pieces of text. Each character is scanned once.

    `too_long`: the expression is longer than any list of calls; nothing more should be fed.
    """

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._characters = 0
        self._depth = 0
        self._quote = ""
        self._escaped = False

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def too_long(self) -> bool:
        return self._characters > _MAX_CHARACTERS

    def feed(self, text: str) -> str | None:
        """Return the text after the expression, or None if it has not ended yet."""
        at = 0
        if self._escaped:
            self._escaped, at = False, 1
        while (mark := (_IN_STRING[self._quote] if self._quote else _MARKS).search(text, at)) is not None:
            at = mark.end()
            character = mark[0]
            if character == "\\":
                at += 1
                self._escaped = at > len(text)
            elif character in "\"'":
                self._quote = "" if self._quote else character
            else:
                self._depth += 1 if character in "([{" else -1
                if self._depth == 0:
                    self._add(text[:at])
                    return text[at:]
        self._add(text)
        return None

    def _add(self, text: str) -> None:
        self._pieces.append(text)
        self._characters += len(text)


def read_calls(text: str, names: AbstractSet[str]) -> list[tuple[str, str]] | None:
    """Return name and arguments (JSON text) of each call; None if not all of it is calls of `names`."""
    try:
        body = ast.parse(text.strip(), mode="eval").body
        return [_call(node, names) for node in (body.elts if isinstance(body, ast.List) else [body])] or None
    except (ValueError, SyntaxError, RecursionError, MemoryError):  # the last two: nested too deeply for the parser
        return None


def _call(node: ast.expr, names: AbstractSet[str]) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        raise ValueError
    name = ast.unparse(node.func)
    if name not in names:
        raise ValueError
    values = {str(keyword.arg): _value(keyword.value) for keyword in node.keywords}
    arguments = json.dumps(values, ensure_ascii=False, allow_nan=False)
    arguments.encode()  # half of a surrogate pair is no text
    return name, arguments


def _value(node: ast.expr) -> Value:
    match node:
        case ast.Constant(value=str() | bool() | int() | float() | None as value):
            return value
        case ast.List() | ast.Tuple():
            return [_value(item) for item in node.elts]
        case ast.Dict():
            return {_key(key): _value(item) for key, item in zip(node.keys, node.values, strict=True)}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
    raise ValueError


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError
