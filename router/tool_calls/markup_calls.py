"""Calls written as markup instead of JSON.

- Qwen3-Coder: ``<function=lamp>``, a ``<parameter=on>true</parameter>`` for each argument, ``</function>``; the type of
  an argument is that of the tool's schema. Llama 3.1 puts the JSON of all arguments between the same tags.
- FunctionGemma: ``<start_function_call>call:lamp{on:true,room:<escape>hall<escape>}<end_function_call>``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Final

from ..types import Tool

FUNCTION: Final = "<function="
GEMMA_CALL: Final = "<start_function_call>"
ESCAPE: Final = "<escape>"
ENDS: Final = {FUNCTION: "</function>", GEMMA_CALL: "<end_function_call>"}
"""What such a call stands behind → what ends it."""

_MAX_CHARACTERS: Final = 64 * 1024
_MAX_DEPTH: Final = 32
_PARAMETER: Final = re.compile(r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_LITERALS: Final[dict[str, bool | None]] = {"true": True, "false": False, "null": None, "none": None}
_GEMMA_HEAD: Final = re.compile(r"\s*call:([\w.-]+)\s*(?=\{)")
_GEMMA_KEY: Final = re.compile(r"\s*([\w.-]+)\s*:")
_GEMMA_WORD: Final = re.compile(r"[^,{}\[\]<]+")

Value = dict[str, "Value"] | list["Value"] | str | int | float | bool | None


class MarkupScanner:
    """Finds the end of a call in pieces of text.

    `too_long`: it is longer than any call; nothing more should be fed.
    """

    def __init__(self, end: str) -> None:
        self._end = end
        self._pieces: list[str] = []
        self._characters = 0
        self._tail = ""  # of the last pieces: the beginning of the end may be in it

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def too_long(self) -> bool:
        return self._characters > _MAX_CHARACTERS

    def feed(self, text: str) -> str | None:
        """Return the text after the call, or None if it has not ended yet."""
        window = self._tail + text
        found = window.find(self._end)
        used = len(text) if found < 0 else found + len(self._end) - len(self._tail)
        self._pieces.append(text[:used])
        self._characters += used
        self._tail = window[1 - len(self._end) :]
        return None if found < 0 else text[used:]


def read_call(mark: str, text: str, tools: Mapping[str, Tool]) -> tuple[str, str] | None:
    """Return name and arguments (JSON text) of the call behind `mark`; None if it is none of one of `tools`."""
    text = text.removesuffix(ENDS[mark])
    try:
        name, values = _read_function(text, tools) if mark == FUNCTION else _read_gemma(text)
        if name not in tools:
            return None
        arguments = json.dumps(values, ensure_ascii=False, allow_nan=False)
        arguments.encode()  # half of a surrogate pair is no text
    except (ValueError, RecursionError):
        return None
    return name, arguments


def _read_function(text: str, tools: Mapping[str, Tool]) -> tuple[str, Value]:
    """Raises ValueError."""
    name, closed, body = text.partition(">")
    name = name.strip().strip("\"'")
    if not closed or name not in tools:
        raise ValueError
    if body.lstrip().startswith("{"):
        return name, _object(body)
    types, values, at = _types(tools[name]), dict[str, Value](), 0
    while (found := _PARAMETER.match(body, at)) is not None:
        values[found[1]] = _typed(found[2], types.get(found[1], "string"))
        at = found.end()
    if body[at:].strip():
        raise ValueError
    return name, values


def _object(text: str) -> dict[str, Value]:
    """Raises ValueError."""
    value = json.loads(text, parse_constant=_refuse)
    if not isinstance(value, dict):
        raise ValueError
    return value


def _refuse(constant: str) -> Value:
    """NaN and infinities are no JSON."""
    raise ValueError(constant)


def _types(tool: Tool) -> dict[str, object]:
    """Return the type of each argument as the schema has it; an argument without one may be anything."""
    try:
        properties = json.loads(tool.parameters)["properties"]
        return {name: found.get("type", "") for name, found in properties.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def _typed(text: str, kind: object) -> Value:
    if kind == "string":
        return text
    word = text.strip()
    if word.lower() in _LITERALS:
        return _LITERALS[word.lower()]
    try:
        value: Value = json.loads(word, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text
    return value


def _read_gemma(text: str) -> tuple[str, Value]:
    """Raises ValueError."""
    head = _GEMMA_HEAD.match(text)
    if head is None:
        raise ValueError
    values, end = _gemma_value(text, head.end(), 0)
    if text[end:].strip():
        raise ValueError
    return head[1], values


def _gemma_value(text: str, at: int, depth: int) -> tuple[Value, int]:
    """Return the value at a position, and where it ends. Raises ValueError."""
    while text[at : at + 1].isspace():
        at += 1
    if depth > _MAX_DEPTH:
        raise ValueError
    if text.startswith(ESCAPE, at):
        end = text.index(ESCAPE, at + len(ESCAPE))
        return text[at + len(ESCAPE) : end], end + len(ESCAPE)
    if text[at : at + 1] == "{":
        values: dict[str, Value] = {}
        for start in (ends := _Items(text, at + 1, "}")):
            key = _GEMMA_KEY.match(text, start)
            if key is None:
                raise ValueError
            values[key[1]], ends.at = _gemma_value(text, key.end(), depth + 1)
        return values, ends.at
    if text[at : at + 1] == "[":
        items: list[Value] = []
        for start in (ends := _Items(text, at + 1, "]")):
            item, ends.at = _gemma_value(text, start, depth + 1)
            items.append(item)
        return items, ends.at
    word = _GEMMA_WORD.match(text, at)
    if word is None:
        raise ValueError
    return _typed(word[0].strip(), ""), word.end()


class _Items:
    """Yields where each item of a list begins; `at` is set to where it ends, and is behind the bracket at last."""

    def __init__(self, text: str, at: int, closing: str) -> None:
        self.at = at
        self._text = text
        self._closing = closing
        self._first = True

    def __iter__(self) -> _Items:
        return self

    def __next__(self) -> int:
        while self._text[self.at : self.at + 1].isspace():
            self.at += 1
        following = self._text[self.at : self.at + 1]
        if following == self._closing:
            self.at += 1
            raise StopIteration
        if not self._first:
            if following != ",":
                raise ValueError
            self.at += 1
        self._first = False
        return self.at
