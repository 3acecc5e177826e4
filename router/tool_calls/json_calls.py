"""Calls written as JSON: where an object ends, which object is a call, and where its arguments begin."""

from __future__ import annotations

import re
from typing import Final

import msgspec

_FIRST_KEYS: Final = frozenset({"name", "arguments", "parameters", "type", "function", "id"})
_FIRST_KEY: Final = re.compile(r'\{\s*"([^"\\]*)"')
_NO_KEY: Final = re.compile(r'\{\s*(?:[^"\s]|"[^"\\]*\\)')
_START: Final = 256  # characters
_ARGUMENTS: Final = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?(?:"id"\s*:\s*"[^"\\]*"\s*,\s*)?'
    r'"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_MARKS: Final = re.compile(r'["{}]')
_IN_STRING: Final = re.compile(r'["\\]')


class ObjectScanner:
    """Finds the end of a JSON object in pieces of text. Each character is scanned once."""

    def __init__(self) -> None:
        self.decided = False  # by its first key, the object may be a call
        self._pieces: list[str] = []
        self._depth = 0
        self._in_string = False
        self._escaped = False  # the last piece ended in a backslash
        self._before_last = 0  # characters before the last piece

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def is_short(self) -> bool:
        """Whether `arguments_of` may find more in it than it did before."""
        return self._before_last < _START

    def feed(self, text: str) -> str | None:
        """Return the text after the object, or None if the object has not ended yet."""
        at = 0
        self._before_last += len(self._pieces[-1]) if self._pieces else 0
        if self._escaped:
            self._escaped, at = False, 1
        while (mark := (_IN_STRING if self._in_string else _MARKS).search(text, at)) is not None:
            at = mark.end()
            character = mark[0]
            if character == "\\":
                at += 1
                self._escaped = at > len(text)
            elif character == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if character == "{" else -1
                if self._depth == 0:
                    self._pieces.append(text[:at])
                    return text[at:]
        self._pieces.append(text)
        return None


class _NamedCall(msgspec.Struct):
    name: str = ""
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


class _ToolObject(_NamedCall):
    function: _NamedCall | None = None


_DECODER = msgspec.json.Decoder(_ToolObject)
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])  # its numbers may be too large for a float


def read_call(text: str) -> tuple[str, str] | None:
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
    """Return whether the text is one JSON object."""
    try:
        _OBJECT.decode(text)
    except (ValueError, RecursionError):
        return False
    return True


def may_be_call(start: str) -> bool | None:
    """Return whether an object that starts like this may be a call, by its first key; None if more text is needed."""
    key = _FIRST_KEY.match(start, 0, _START)
    if key is not None:
        return key[1] in _FIRST_KEYS
    if len(start) >= _START or _NO_KEY.match(start):
        return False
    return None


def arguments_of(start: str) -> tuple[str, int] | None:
    """Return the name of a call that starts like this, and where its arguments begin; None if it does not say yet."""
    match = _ARGUMENTS.match(start, 0, _START)
    return None if match is None else (match["name"], match.end())
