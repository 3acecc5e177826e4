"""Calls in the notations of models, JSON, Python and markup: the end of a call, its name, its arguments.

- JSON: ``{"name": "lamp", "arguments": {"on": true}}``, see `parser` for its variants.
- Python, as Llama 3.2, Llama 4 and Gemma write: ``[lamp(on=True), fan(speed=2)]``.
- Qwen3-Coder: ``<function=lamp>``, a ``<parameter=on>true</parameter>`` for each argument, ``</function>``; the type of
  an argument is that of the tool's schema. Llama 3.1 puts the JSON of all arguments between the same tags.
- FunctionGemma: ``<start_function_call>call:lamp{on:true,room:<escape>hall<escape>}<end_function_call>``.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Final

import msgspec

from ..types import Tool

FUNCTION: Final = "<function="
GEMMA_CALL: Final = "<start_function_call>"
ESCAPE: Final = "<escape>"
ENDS: Final = {FUNCTION: "</function>", GEMMA_CALL: "<end_function_call>"}
"""The mark that ends a call in markup, by the mark before it."""

_MAX_CHARACTERS: Final = 64 * 1024
_MAX_DEPTH: Final = 32
_LITERALS: Final[dict[str, bool | None]] = {"true": True, "false": False, "null": None, "none": None}
_JSON_MARKS: Final = re.compile(r'["{}]')
_PYTHON_MARKS: Final = re.compile(r"""["'()\[\]{}]""")
_IN_STRING: Final = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}
_FIRST_KEYS: Final = frozenset({"name", "arguments", "parameters", "type", "function", "id"})
_FIRST_KEY: Final = re.compile(r'\{\s*"([^"\\]*)"')
_NO_KEY: Final = re.compile(r'\{\s*(?:[^"\s]|"[^"\\]*\\)')
_START: Final = 256  # characters
_ARGUMENTS: Final = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?(?:"id"\s*:\s*"[^"\\]*"\s*,\s*)?'
    r'"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_PARAMETER: Final = re.compile(r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_GEMMA_HEAD: Final = re.compile(r"\s*call:([\w.-]+)\s*(?=\{)")
_GEMMA_KEY: Final = re.compile(r"\s*([\w.-]+)\s*:")
_GEMMA_COMMA: Final = re.compile(",")
_GEMMA_WORD: Final = re.compile(r"[^,{}\[\]<]+")

Value = dict[str, "Value"] | list["Value"] | str | int | float | bool | None


# --- where a call ends -----------------------------------------------------------------------------------------------


class _Scanner:
    """The pieces of a text so far. `too_long`: the text is longer than any call, so feed it no more."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._characters = 0

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def too_long(self) -> bool:
        return self._characters > _MAX_CHARACTERS

    def _add(self, text: str) -> None:
        self._pieces.append(text)
        self._characters += len(text)


class BracketScanner(_Scanner):
    """Finds the end of a bracketed Python expression in pieces of text. `marks`: pattern of brackets and quotes."""

    def __init__(self, marks: re.Pattern[str] = _PYTHON_MARKS) -> None:
        super().__init__()
        self._marks = marks
        self._depth = 0
        self._quote = ""
        self._escaped = False  # the last piece ended in a backslash

    def feed(self, text: str) -> str | None:
        """Return the text after the expression, or None if it has not ended yet."""
        at = 0
        if self._escaped:
            self._escaped, at = False, 1
        while (mark := (_IN_STRING[self._quote] if self._quote else self._marks).search(text, at)) is not None:
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


class ObjectScanner(BracketScanner):
    """A scanner that finds the end of a JSON object in pieces of text. Each character is scanned once."""

    def __init__(self) -> None:
        super().__init__(_JSON_MARKS)
        self.decided = False  # whether the first key has shown that the object may be a call

    @property
    def is_short(self) -> bool:
        """Return whether `arguments_of` should be called again after the last piece."""
        return self._characters - len(self._pieces[-1] if self._pieces else "") < _START


class MarkupScanner(_Scanner):
    """A scanner that finds the end of a call in markup in pieces of text."""

    def __init__(self, end: str) -> None:
        super().__init__()
        self._end = end
        self._tail = ""  # end of the last pieces, which may contain the beginning of the end mark

    def feed(self, text: str) -> str | None:
        """Return the text after the call, or None if it has not ended yet."""
        window = self._tail + text
        found = window.find(self._end)
        used = len(text) if found < 0 else found + len(self._end) - len(self._tail)
        self._add(text[:used])
        self._tail = window[1 - len(self._end) :]
        return None if found < 0 else text[used:]


def _as_json(values: Value) -> str:
    """Return arguments as JSON text. Raises ValueError if they have no JSON form (half a surrogate pair)."""
    arguments = json.dumps(values, ensure_ascii=False, allow_nan=False)
    arguments.encode()
    return arguments


# --- JSON ------------------------------------------------------------------------------------------------------------


class _NamedCall(msgspec.Struct):
    name: str = ""
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


class _ToolObject(_NamedCall):
    function: _NamedCall | None = None


_DECODER = msgspec.json.Decoder(_ToolObject)
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])  # raw, since numbers may be too large for a float


def read_json_call(text: str) -> tuple[str, str] | None:
    """Return the name and the arguments as JSON text; None if the object is not a call."""
    try:
        decoded = _DECODER.decode(text)
        call = decoded.function or decoded
        raw = bytes(call.arguments) or bytes(call.parameters) or b"{}"
        if raw.startswith(b'"'):  # JSON in a JSON string, as in OpenAI's API
            raw = msgspec.json.decode(raw, type=str).encode()
        if raw == b"null":
            return call.name, "{}"
        _OBJECT.decode(raw)
    except (ValueError, RecursionError):
        return None
    return call.name, raw.decode()


def is_object(text: str) -> bool:
    try:
        _OBJECT.decode(text)
    except (ValueError, RecursionError):
        return False
    return True


def may_be_call(start: str) -> bool | None:
    """Return whether an object may be a call, judged by its first key; None if more text is needed."""
    key = _FIRST_KEY.match(start, 0, _START)
    if key is not None:
        return key[1] in _FIRST_KEYS
    if len(start) >= _START or _NO_KEY.match(start):
        return False
    return None


def arguments_of(start: str) -> tuple[str, int] | None:
    """Return the name of a call with this beginning, and the start of its arguments; None if more text is needed."""
    match = _ARGUMENTS.match(start, 0, _START)
    return None if match is None else (match["name"], match.end())


# --- Python -----------------------------------------------------------------------------------------------------------


def read_python_calls(text: str, names: AbstractSet[str]) -> list[tuple[str, str]] | None:
    """Return name and arguments (JSON text) of each call; None if the text is not only calls of `names`."""
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
    return name, _as_json(values)


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
        case ast.Name(id=("true" | "false" | "null") as name):
            return _LITERALS[name]
    raise ValueError


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError


# --- markup -----------------------------------------------------------------------------------------------------------


def read_markup_call(mark: str, text: str, tools: Mapping[str, Tool]) -> tuple[str, str] | None:
    """Return name and arguments (JSON text) of the call after `mark`; None if it is not a call of one of `tools`."""
    text = text.removesuffix(ENDS[mark])
    try:
        name, values = _read_function(text, tools) if mark == FUNCTION else _read_gemma(text)
        if name not in tools:
            return None
        return name, _as_json(values)
    except (ValueError, RecursionError):
        return None


def _read_function(text: str, tools: Mapping[str, Tool]) -> tuple[str, Value]:
    """Return the name and the arguments of a Qwen call. Raises ValueError."""
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
    """Return the JSON object of a text. Raises ValueError."""
    value = json.loads(text, parse_constant=_refuse)
    if not isinstance(value, dict):
        raise ValueError
    return value


def _refuse(constant: str) -> Value:
    """Refuse NaN and infinities, which are not JSON. Raises ValueError."""
    raise ValueError(constant)


def _types(tool: Tool) -> dict[str, object]:
    """Return the type of each argument by the schema; an argument without a type may have any."""
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
    """Return the name and the arguments of a FunctionGemma call. Raises ValueError."""
    head = _matched(_GEMMA_HEAD, text, 0)
    values, end = _gemma_value(text, head.end(), 0)
    if text[end:].strip():
        raise ValueError
    return head[1], values


def _gemma_value(text: str, at: int, depth: int) -> tuple[Value, int]:
    """Return the value at a position, and its end. Raises ValueError."""
    at = _behind_space(text, at)
    if depth > _MAX_DEPTH:
        raise ValueError
    if text.startswith(ESCAPE, at):
        end = text.index(ESCAPE, at + len(ESCAPE))
        return text[at + len(ESCAPE) : end], end + len(ESCAPE)
    closing = {"{": "}", "[": "]"}.get(text[at : at + 1])
    if closing is None:
        word = _matched(_GEMMA_WORD, text, at)
        return _typed(word[0].strip(), ""), word.end()
    entries: list[tuple[str, Value]] = []  # those of a list have no keys
    at = _behind_space(text, at + 1)
    while text[at : at + 1] != closing:
        if entries:
            at = _matched(_GEMMA_COMMA, text, at).end()
        key = ""
        if closing == "}":
            found = _matched(_GEMMA_KEY, text, at)
            key, at = found[1], found.end()
        value, at = _gemma_value(text, at, depth + 1)
        entries.append((key, value))
        at = _behind_space(text, at)
    return (dict(entries) if closing == "}" else [value for _, value in entries]), at + 1


def _behind_space(text: str, at: int) -> int:
    while text[at : at + 1].isspace():
        at += 1
    return at


def _matched(pattern: re.Pattern[str], text: str, at: int) -> re.Match[str]:
    """Return the match of a pattern at a position. Raises ValueError."""
    match = pattern.match(text, at)
    if match is None:
        raise ValueError
    return match
