"""Finds tool calls in a model's plain text. These forms are calls if they name a tool of the request:

1. ``{"name": …, "arguments": {…}}`` at the start of the answer (our own models), several of them one after another
2. ``{"name": …, "parameters": {…}}`` and ``{"type": "function", "function": {…}}`` likewise (Llama 3)
3. ``<tool_call>{…}</tool_call>`` anywhere (Hermes, Qwen)
"""

from __future__ import annotations

import re
from enum import Enum, auto
from hashlib import blake2b
from typing import Final

import msgspec

from ..types import Request, ToolCallDelta

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
_LEAD: Final = re.compile(r"(?P<visible>\s*)")
_BETWEEN: Final = re.compile(r"\s*(?:</tool_call>\s*)?(?P<visible>(?:[;,]\s*)?)")
_FIRST_KEYS: Final = frozenset({"name", "arguments", "parameters", "type", "function", "id"})
_FIRST_KEY: Final = re.compile(r'\{\s*"([^"\\]*)"')
_NO_KEY: Final = re.compile(r'\{\s*(?:[^"\s]|"[^"\\]*\\)')
_FIRST_KEY_WITHIN: Final = 256  # characters
_MARKS: Final = re.compile(r'["{}]')
_IN_STRING: Final = re.compile(r'["\\]')

Result = tuple[str, tuple[ToolCallDelta, ...]]


class _State(Enum):
    BEGIN = auto()  # only white space so far, or since the last call: an object may be a call
    TAG = auto()  # after <tool_call>
    OBJECT = auto()  # inside an object that may be a call
    TEXT = auto()  # only a tag can start a call from here on


class ToolCallParser:
    """Splits text, in pieces of any size, into text for the client and calls.

    Text is held back while it may still become a call. A call is returned whole, as one delta. The concatenated results
    do not depend on how the text is cut into pieces.
    """

    def __init__(self, request: Request, choice: int = 0) -> None:
        """`choice`: which of the answer's choices is parsed."""
        disabled = request.tool_choice.mode == "none"
        self._names = frozenset[str]() if disabled else frozenset(tool.name for tool in request.tools)
        self._turn = len(request.messages)
        self._choice = choice
        self._state = _State.BEGIN
        self._held = ""  # undecided, outside an object
        self._lead = ""  # text before the undecided tag or object; returned if it is not a call
        self._object = _ObjectScanner()
        self._tagged = False
        self._calls = 0

    @property
    def called(self) -> bool:
        """Whether a call was found; the answer's finish_reason is then `tool_calls`."""
        return self._calls > 0

    def feed(self, text: str) -> Result:
        """Add text and return what is decided."""
        if not self._names:
            return text, ()
        out: list[str] = []
        calls: list[ToolCallDelta] = []
        text, self._held = self._held + text, ""
        while text:
            match self._state:
                case _State.BEGIN:
                    text = self._begin(text, out)
                case _State.TAG:
                    text = self._tag(text, out)
                case _State.OBJECT:
                    text = self._in_object(text, out, calls)
                case _State.TEXT:
                    text = self._in_text(text, out)
        return "".join(out), tuple(calls)

    def finish(self) -> Result:
        """Return the text that was held back, at the end of the answer: it did not become a call."""
        held, self._held = self._held, ""
        if self._state is _State.OBJECT:
            held = self._lead + self._object.text
        elif self._state is _State.TAG:
            held = self._lead + held
        elif self._state is _State.BEGIN and self._calls:
            held = held[_lead(_BETWEEN, held).end() :]  # separators between calls are not text
        self._state = _State.TEXT
        return held, ()

    def _begin(self, text: str, out: list[str]) -> str:
        lead = _lead(_BETWEEN if self._calls else _LEAD, text)
        rest = text[lead.end() :]
        if not rest or OPEN.startswith(rest) or (self._calls and CLOSE.startswith(rest)):
            self._held = text
            return ""
        if rest.startswith("{"):
            self._enter_object(lead["visible"], tagged=False)
            return rest
        if rest.startswith(OPEN):
            self._enter_tag(lead["visible"])
            return rest[len(OPEN) :]
        out.append(lead["visible"])
        self._state = _State.TEXT
        return rest

    def _tag(self, text: str, out: list[str]) -> str:
        rest = text.lstrip()
        if not rest:
            self._held = text
            return ""
        if rest.startswith("{"):
            self._enter_object(self._lead + text[: len(text) - len(rest)], tagged=True)
            return rest
        out.append(self._lead)
        self._state = _State.TEXT
        return text

    def _in_object(self, text: str, out: list[str], calls: list[ToolCallDelta]) -> str:
        if not self._tagged and not self._object.decided:
            start = self._object.text + text
            verdict = _may_be_call(start)
            if verdict is False:
                out.append(self._lead)
                self._state = _State.TEXT
                return start
            self._object.decided = verdict is True
        rest = self._object.feed(text)
        if rest is None:
            return ""
        call = self._call(self._object.text)
        if call is None:
            out.append(self._lead + self._object.text)
            self._state = _State.TEXT
        else:
            calls.append(call)
            self._state = _State.BEGIN
        return rest

    def _in_text(self, text: str, out: list[str]) -> str:
        at = text.find(OPEN)
        if at >= 0:
            out.append(text[:at])
            self._enter_tag("")
            return text[at + len(OPEN) :]
        cut = text.rfind("<")
        if cut >= 0 and OPEN.startswith(text[cut:]):
            out.append(text[:cut])
            self._held = text[cut:]
        else:
            out.append(text)
        return ""

    def _enter_tag(self, before: str) -> None:
        self._state = _State.TAG
        self._lead = before + OPEN

    def _enter_object(self, lead: str, *, tagged: bool) -> None:
        self._state = _State.OBJECT
        self._lead = lead
        self._tagged = tagged
        self._object = _ObjectScanner()

    def _call(self, text: str) -> ToolCallDelta | None:
        found = _read(text)
        if found is None or found[0] not in self._names:
            return None
        name, arguments = found
        index = self._calls
        self._calls += 1
        # The same call in another choice or another turn needs another id, without randomness: router is pure.
        seed = f"{self._turn}\0{self._choice}\0{index}\0{name}\0{arguments}".encode()
        identity = blake2b(seed, digest_size=12).hexdigest()
        return ToolCallDelta(index, arguments, f"call_{identity}", name)


class _ObjectScanner:
    """Finds the end of a JSON object in pieces of text. Each character is scanned once."""

    def __init__(self) -> None:
        self.decided = False  # by its first key, the object may be a call
        self._pieces: list[str] = []
        self._depth = 0
        self._in_string = False
        self._escaped = False  # the last piece ended in a backslash

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def feed(self, text: str) -> str | None:
        """Return the text after the object, or None if the object has not ended yet."""
        at = 0
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


def _read(text: str) -> tuple[str, str] | None:
    """Return the name and the arguments as JSON text; None if the object is not a call."""
    try:
        decoded = _DECODER.decode(text)
        call = decoded.function or decoded
        raw = bytes(call.arguments) or bytes(call.parameters) or b"{}"
        if raw.startswith(b'"'):  # JSON in a JSON string, as in OpenAI's API
            raw = msgspec.json.decode(raw, type=str).encode()
        if not isinstance(msgspec.json.decode(raw), dict):
            return (call.name, "{}") if raw == b"null" else None
    except (ValueError, RecursionError):
        return None
    return call.name, raw.decode()


def _may_be_call(start: str) -> bool | None:
    """Return whether an object that starts like this may be a call, by its first key; None if more text is needed."""
    key = _FIRST_KEY.match(start, 0, _FIRST_KEY_WITHIN)
    if key is not None:
        return key[1] in _FIRST_KEYS
    if len(start) >= _FIRST_KEY_WITHIN or _NO_KEY.match(start):
        return False
    return None


def _lead(pattern: re.Pattern[str], text: str) -> re.Match[str]:
    match = pattern.match(text)
    assert match is not None  # both patterns match the empty string
    return match
