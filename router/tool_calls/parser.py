"""Parsing of tool calls in a model's plain text. These forms are calls if they name a tool of the request:

1. ``{"name": …, "arguments": {…}}``, ``{"name": …, "parameters": {…}}`` (Llama 3) and ``{"type": "function",
   "function": {…}}`` at the start of the answer, several of them one after another, also in a list
2. the same behind a mark, anywhere: ``<tool_call>`` (Hermes, Qwen), ``[TOOL_CALLS]`` (Mistral), ``<|python_tag|>``
   (Llama 3), ``<|tool_call|>`` and ``functools`` (Phi), and as a fenced block (Qwen Coder, Gemma)
3. ``[name(key=value), …]`` at the start of the answer or behind a mark (Llama 3.2 and 4, Gemma)
4. ``[TOOL_CALLS]name[ARGS]{…}`` (Mistral since 2025)
5. ``<function=name>…</function>`` (Qwen3-Coder, Llama 3.1), ``<start_function_call>call:name{…}`` (FunctionGemma), see
   `written_calls`

Every form is read for every model family, because models often mix them: Qwen2.5 Coder fences its calls though its
template asks for ``<tool_call>``. `schema` determines the form of a required call.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from functools import lru_cache
from typing import Final

from ..errors import StreamBroken
from ..types import Request, ToolCallDelta
from . import written_calls
from .schema import call_id

MARKS: Final = {
    "<tool_call>": "</tool_call>",
    "[TOOL_CALLS]": "",
    "<|python_tag|>": "",
    "<|python_start|>": "<|python_end|>",
    "<|tool_call|>": "<|/tool_call|>",
    "functools": "",
    "```json": "```",
    "```tool_code": "```",
    "```tool_call": "```",
    "```\n": "```",
    written_calls.FUNCTION: "</tool_call>",
    written_calls.GEMMA_CALL: "",
}
"""The marks before calls, each with the marks that may follow them."""

TEXT_MARKS: Final = frozenset(
    {*MARKS, *filter(None, MARKS.values()), *written_calls.ENDS.values(), written_calls.ESCAPE, "[ARGS]", "[CALL_ID]"}
)
"""Tokens that must reach the parser as text, although vocabularies list them as control tokens."""

_CONTROL: Final = ("<", "[")  # the first characters of marks that are not also text
_MARK_ENDS: Final = {**MARKS, "": "</tool_call>"}  # some models write only the closing mark
_BEGINNINGS: Final = frozenset(mark[:length] for mark in MARKS for length in range(1, len(mark)))
_MAX_MARK: Final = max(map(len, MARKS))
_MARK: Final = re.compile("|".join(map(re.escape, MARKS)))
_LEAD: Final = re.compile(r"(?P<visible>\s*)")
_NAME: Final = re.compile(r"[A-Za-z_][\w.-]*")
_TO_ARGUMENTS: Final = re.compile(r"(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")
_PERHAPS_TO_ARGUMENTS: Final = re.compile(r"(?:\[[A-Z_]*(?:\]\w*)?){0,2}\s*")
_NAME_WITHIN: Final = 192  # characters, including the text before the arguments

Result = tuple[str, tuple[ToolCallDelta, ...]]


class _State(Enum):
    BEGIN = auto()  # only white space so far, or since the last call; an object or a list may be calls
    HEAD = auto()  # after a mark, or at a bracket that may begin calls
    OBJECT = auto()  # inside a JSON object that may be a call
    WRITTEN = auto()  # inside a Python expression that may be calls, or after a mark of `written_calls`
    TEXT = auto()  # only a mark can begin a call from here on


class ToolCallParser:
    """Splits text, in pieces of any size, into text for the client and calls. Text is held back while it may still
    become a call. For a streamed request, a JSON call is returned in deltas as it is written, its name first; otherwise
    as one delta. The concatenated results do not depend on the pieces.
    """

    def __init__(self, request: Request, choice: int = 0, identity: str = "") -> None:
        """Create the parser of choice `choice`. `identity`: the request's id, for the ids of its calls."""
        disabled = request.tool_choice.mode == "none"
        self._tools = {} if disabled else {tool.name: tool for tool in request.tools}
        self._names = frozenset(self._tools)
        self._parallel = request.parallel_tool_calls
        self._streams = request.stream
        self._choice, self._identity = choice, identity
        self._state = _State.BEGIN
        self._held = ""  # undecided, outside an object
        self._lead = ""  # text before the undecided object or list; returned if it is not a call
        self._mark = ""  # the mark before the calls, "" for none
        self._in_list = False
        self._object = written_calls.ObjectScanner()
        self._written: written_calls.BracketScanner | written_calls.MarkupScanner = written_calls.MarkupScanner("")
        self._name = ""  # name of the call whose arguments are the object; "": the object is the call
        self._partial: _PartialCall | None = None  # the call that is returned in deltas
        self._calls = 0

    @property
    def called(self) -> bool:
        """Whether a call was found, so that the answer's finish_reason is `tool_calls`."""
        return self._calls > 0

    def feed(self, text: str) -> Result:
        """Add text; return the decided text and calls. Raise StreamBroken if a begun call's arguments are not JSON."""
        if not self._names:
            return text, ()
        out: list[str] = []
        calls: list[ToolCallDelta] = []
        text, self._held = self._held + text, ""
        while text:
            match self._state:
                case _State.BEGIN:
                    text = self._begin(text, out)
                case _State.HEAD:
                    text = self._head(text, out)
                case _State.OBJECT:
                    text = self._in_object(text, out, calls)
                case _State.WRITTEN:
                    text = self._in_written(text, out, calls)
                case _State.TEXT:
                    text = self._in_text(text, out)
        return "".join(out), tuple(calls)

    def finish(self, *, cut: bool = False) -> Result:
        """Return the held-back text, which did not become a call, at the end of the answer. `cut`: it reached its token
        limit: a JSON call whose arguments have begun is returned as far as it came, and text after a call's control
        token is not text. Raises StreamBroken if a partly returned call has no end otherwise.
        """
        held, self._held = self._held, ""
        calls: list[ToolCallDelta] = []
        if cut and self._state is _State.OBJECT and self._partial is None:
            self._begin_partial(calls)
        match self._state:
            case _State.OBJECT if self._partial is not None:
                if not cut:
                    self._partial.check()
            case _State.WRITTEN if self._mark in written_calls.ENDS and self._add_written(calls):
                pass  # some servers drop the end, which is a control token
            case _State.OBJECT | _State.WRITTEN | _State.HEAD if cut and self._mark[:1] in _CONTROL:
                held = ""
            case _State.OBJECT:
                held = self._lead + self._object.text
            case _State.WRITTEN:
                held = self._lead + self._written.text
            case _State.HEAD:
                held = self._lead + held
            case _State.BEGIN if self._calls:
                held = held[self._between(held).end() :]  # separators between calls are not text
        self._state = _State.TEXT
        return held, tuple(calls)

    # --- one method for each state: takes text, returns the rest, "" if it needs more --------------------------------

    def _begin(self, text: str, out: list[str]) -> str:
        lead = self._between(text) if self._calls else _matched(_LEAD, text)
        rest = text[lead.end() :]
        if not rest or rest in _BEGINNINGS or (self._calls and _MARK_ENDS[self._mark].startswith(rest)):
            self._held = text
            return ""
        mark = _MARK.match(rest)
        if mark is not None:
            self._enter_head(lead["visible"] + mark[0], mark[0])
            return rest[mark.end() :]
        if rest[0] in "{[":
            self._enter_head(lead["visible"], "" if self._mark in written_calls.ENDS else self._mark)
            return rest
        return self._to_text(lead["visible"], rest, out)

    def _head(self, text: str, out: list[str]) -> str:
        """Decide the form of the text after a mark: (1) an object, (2) a list of objects, (3) Python calls, (4) a name
        and an object, (5) markup.
        """
        if self._mark in written_calls.ENDS:  # (5)
            self._state, self._written = _State.WRITTEN, written_calls.MarkupScanner(written_calls.ENDS[self._mark])
            return text
        rest = text.lstrip()
        if self._mark and rest[:1] == "<":
            if rest.startswith(written_calls.FUNCTION):  # (5) behind <tool_call>
                self._mark = written_calls.FUNCTION
                self._lead += text[: len(text) - len(rest)] + self._mark
                return rest[len(self._mark) :] or self._head("", out)
            if written_calls.FUNCTION.startswith(rest):
                self._held = text
                return ""
        inner = rest[1:].lstrip() if rest[:1] == "[" else rest
        if not inner:
            self._held = text
            return ""
        if inner[0] == "{":  # (1), (2)
            self._in_list = self._in_list or inner is not rest
            self._enter_object(text[: len(text) - len(inner)], "")
            return inner
        name = _NAME.match(inner)
        if name is None or (inner is rest and not self._mark):
            return self._to_text(self._lead, text, out)
        behind = inner[name.end() :]
        if len(inner) < _NAME_WITHIN and _PERHAPS_TO_ARGUMENTS.fullmatch(behind):
            self._held = text
            return ""
        if name[0] not in self._names:
            return self._to_text(self._lead, text, out)
        if behind[0] == "(":  # (3)
            self._state, self._written = _State.WRITTEN, written_calls.BracketScanner()
            self._lead += text[: len(text) - len(rest)]
            return rest
        if inner is rest and (between := _TO_ARGUMENTS.match(behind)) is not None:  # (4)
            start = len(text) - len(behind) + between.end()
            self._enter_object(text[:start], name[0])
            return text[start:]
        return self._to_text(self._lead, text, out)

    def _in_object(self, text: str, out: list[str], calls: list[ToolCallDelta]) -> str:
        scanner = self._object
        if not scanner.decided:
            start = scanner.text + text
            verdict = written_calls.may_be_call(start)
            if verdict is False:
                return self._to_text(self._lead, start, out)
            scanner.decided = verdict is True
        rest = scanner.feed(text)
        if self._partial is not None:
            calls += self._partial.add(text if rest is None else text[: len(text) - len(rest)])
        elif self._streams and scanner.is_short:
            self._begin_partial(calls)
        if rest is None:
            return ""
        if self._partial is not None:
            self._partial.check()
            self._state, self._partial = _State.BEGIN, None
            return rest
        call = (self._name, scanner.text) if self._name else written_calls.read_json_call(scanner.text)
        if call is None or call[0] not in self._names or not written_calls.is_object(call[1]):
            return self._to_text(self._lead + scanner.text, rest, out)
        self._add_call(*call, calls)
        self._state = _State.BEGIN
        return rest

    def _in_written(self, text: str, out: list[str], calls: list[ToolCallDelta]) -> str:
        rest = self._written.feed(text)
        if rest is None and not self._written.too_long:
            return ""
        if self._written.too_long or not self._add_written(calls):
            return self._to_text(self._lead + self._written.text, rest or "", out)
        self._state = _State.BEGIN
        return rest or ""

    def _add_written(self, calls: list[ToolCallDelta]) -> bool:
        """Add calls written in Python or markup. Return False if the text is not, or not only, calls."""
        if self._mark in written_calls.ENDS:
            call = written_calls.read_markup_call(self._mark, self._written.text, self._tools)
            found = None if call is None else [call]
        else:
            found = written_calls.read_python_calls(self._written.text, self._names)
        for name, arguments in found or ():
            self._add_call(name, arguments, calls)
        return found is not None

    def _in_text(self, text: str, out: list[str]) -> str:
        mark = _MARK.search(text)
        if mark is not None:
            out.append(text[: mark.start()])
            self._enter_head(mark[0], mark[0])
            return text[mark.end() :]
        held = next((n for n in range(min(_MAX_MARK, len(text)), 0, -1) if text[-n:] in _BEGINNINGS), 0)
        out.append(text[: len(text) - held])
        self._held = text[len(text) - held :]
        return ""

    # --- from state to state -----------------------------------------------------------------------------------------

    def _to_text(self, lead: str, rest: str, out: list[str]) -> str:
        out.append(lead)
        self._state = _State.TEXT
        return rest

    def _enter_head(self, lead: str, mark: str) -> None:
        if mark != self._mark:
            self._in_list = False
        self._state, self._lead, self._mark = _State.HEAD, lead, mark

    def _enter_object(self, lead: str, name: str) -> None:
        self._state, self._name = _State.OBJECT, name
        self._lead += lead
        self._object = written_calls.ObjectScanner()
        self._object.decided = bool(self._mark) and not self._mark.startswith("```")

    def _between(self, text: str) -> re.Match[str]:
        return _matched(_between_calls(self._mark, self._in_list), text)

    # --- calls -------------------------------------------------------------------------------------------------------

    def _begin_partial(self, calls: list[ToolCallDelta]) -> None:
        """Return the beginning of an unfinished call, once its name is known and its arguments have begun."""
        text = self._object.text
        name, start = (self._name, 0) if self._name else written_calls.arguments_of(text) or ("", 0)
        if name in self._names:
            delta = self._delta(name, "")
            self._partial = _PartialCall(delta, shown=self._parallel or not delta.index)
            calls += self._partial.add(text[start:])

    def _add_call(self, name: str, arguments: str, calls: list[ToolCallDelta]) -> None:
        delta = self._delta(name, arguments)
        if self._parallel or not delta.index:
            calls.append(delta)

    def _delta(self, name: str, arguments: str) -> ToolCallDelta:
        index = self._calls
        self._calls += 1
        return ToolCallDelta(index, arguments, call_id(self._identity, self._choice, index), name)


class _PartialCall:
    """A call whose arguments are returned while they are written. `shown`: False if the client must not see it."""

    def __init__(self, first: ToolCallDelta, *, shown: bool) -> None:
        self._first = first
        self._shown = shown
        self._begun = False
        self._ended = False
        self._arguments = written_calls.ObjectScanner()

    def add(self, text: str) -> list[ToolCallDelta]:
        if self._ended or not text:
            return []
        rest = self._arguments.feed(text)
        self._ended = rest is not None
        written = text[: len(text) - len(rest)] if rest else text
        first, self._begun = not self._begun, True
        if not self._shown:
            return []
        call = self._first
        return [ToolCallDelta(call.index, written, *((call.id, call.name) if first else ()))]

    def check(self) -> None:
        """Raise StreamBroken if the arguments are not a JSON object."""
        if not written_calls.is_object(self._arguments.text):
            name = self._first.name
            raise StreamBroken(
                f"The model's call of `{name}` is not valid JSON. Send the request again.", phase="stream"
            )


@lru_cache(maxsize=64)
def _between_calls(mark: str, in_list: bool) -> re.Pattern[str]:
    """Return the pattern of text after a call; its group `visible` is text if no further call follows."""
    closing = re.escape(_MARK_ENDS[mark])
    bracket = r"(?:\]\s*)?" if in_list else ""
    return re.compile(rf"\s*{bracket}(?:{closing}\s*)?(?P<visible>(?:[;,]\s*)?)")


def _matched(pattern: re.Pattern[str], text: str) -> re.Match[str]:
    match = pattern.match(text)
    assert match is not None  # the patterns match the empty string
    return match
