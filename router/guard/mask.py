"""Placeholders such as `<EMAIL_1>` in place of values in a request, and the values again in its answer.

Equal requests get equal placeholders, so a conversation keeps its prefix. A placeholder that the request contains
already is not used. In JSON (arguments of calls, answers in JSON) `<` may be written `\\u003c`, and a value is escaped.
What a model changes, such as `<email_1>`, stays as it is; logprobs keep the placeholders.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

import msgspec

from ..types import Chunk, Request, ToolCallDelta
from .classes import GuardClass
from .facts import Detector
from .texts import with_texts

_LITERAL: Final = re.compile(r"<[A-Z]{2,10}_\d{1,7}>")
# A whole placeholder, or the start of one at the end of the text.
_PLAIN: Final = re.compile(r"(<[A-Z]{2,10}_\d{1,7}>)|(<[A-Z]{0,10}(?:_\d{0,7})?\Z)")
_OPEN, _CLOSE = r"(?:<|\\u003[cC])", r"(?:>|\\u003[eE])"
_ESCAPE: Final = r"\\(?:u(?:0(?:0(?:3)?)?)?)?\Z"
_JSON: Final = re.compile(
    rf"\\\\|({_OPEN}[A-Z]{{2,10}}_\d{{1,7}}{_CLOSE})|({_OPEN}[A-Z]{{0,10}}(?:_\d{{0,7}})?(?:\Z|{_ESCAPE})|{_ESCAPE})"
)


class Masked(NamedTuple):
    """A request with placeholders, and their values."""

    request: Request
    values: dict[str, str]


def mask(request: Request, classes: Collection[str], detector: Detector) -> Masked:
    """Return the request with a placeholder for each value of these classes. Raises like `Detector.find`."""
    taken: set[str] = set()

    def see(text: str) -> str:
        if "<" in text:
            taken.update(_LITERAL.findall(text))
        return text

    with_texts(request, see)
    placeholders: dict[tuple[GuardClass, str], str] = {}
    counts: dict[GuardClass, int] = {}

    def placeholder(kind: GuardClass, value: str) -> str:
        known = placeholders.get((kind, value))
        while known is None:
            counts[kind] = counts.get(kind, 0) + 1
            candidate = f"<{kind.upper()}_{counts[kind]}>"
            if candidate not in taken:
                known = placeholders[kind, value] = candidate
        return known

    def change(text: str) -> str:
        if not text:
            return text
        pieces, at = [], 0
        for start, end, kind in detector.find(text):
            if kind in classes:
                pieces += [text[at:start], placeholder(kind, text[start:end])]
                at = end
        return "".join((*pieces, text[at:])) if pieces else text

    masked = with_texts(request, change)
    return Masked(masked, {name: value for (_, value), name in placeholders.items()})


class Restorer:
    """Replaces placeholders by their `values` in the chunks of one answer, also those that chunks cut. `is_json`:
    whether the answer's text is JSON.
    """

    def __init__(self, values: dict[str, str], *, is_json: bool = False) -> None:
        self._values = values
        self._is_json = is_json
        self._held: dict[tuple[int, str, int], str] = {}  # starts of placeholders, by choice, field and call

    def chunk(self, chunk: Chunk) -> Chunk:
        """Return a chunk with values; it may hold back the start of a placeholder until the choice ends."""
        index, ends = chunk.index, chunk.finish_reason is not None
        calls = tuple([self._delta(index, call) for call in chunk.tool_calls]) if chunk.tool_calls else ()
        texts = {
            field: self._text((index, field, 0), text, is_json=self._is_json and field == "text")
            for field in ("text", "reasoning", "refusal")
            if (text := getattr(chunk, field)) is not None
        }
        restored = msgspec.structs.replace(chunk, tool_calls=calls, **texts)
        if chunk.stop:
            restored = msgspec.structs.replace(restored, stop=self._values.get(chunk.stop, chunk.stop))
        return self._with_held(restored) if ends and self._held else restored

    def end(self) -> tuple[Chunk, ...]:
        """Return what is still held back, at the end of an answer that broke off."""
        indices = sorted({index for index, _, _ in self._held})
        return tuple(self._with_held(Chunk(index=index)) for index in indices)

    def _delta(self, index: int, call: ToolCallDelta) -> ToolCallDelta:
        arguments = self._text((index, "arguments", call.index), call.arguments, is_json=True)
        return call if arguments == call.arguments else msgspec.structs.replace(call, arguments=arguments)

    def _text(self, key: tuple[int, str, int], text: str, *, is_json: bool) -> str:
        held = self._held.pop(key, "") if self._held else ""
        if not text and not held:
            return text
        text = held + text
        if "<" not in text and (not is_json or "\\" not in text):
            return text
        pieces: list[str] = []
        at = 0
        for match in (_JSON if is_json else _PLAIN).finditer(text):
            if match[2] is not None:
                self._held[key] = text[match.start() :]
                return "".join((*pieces, text[at : match.start()]))
            if match[1] is not None and (value := self._value(match[1], is_json=is_json)) is not None:
                pieces += [text[at : match.start()], value]
                at = match.end()
        return "".join((*pieces, text[at:])) if pieces else text

    def _value(self, written: str, *, is_json: bool) -> str | None:
        if not is_json:
            return self._values.get(written)
        name = re.sub(r"\\u003[cC]", "<", re.sub(r"\\u003[eE]", ">", written))
        value = self._values.get(name)
        return None if value is None else json.dumps(value, ensure_ascii=False)[1:-1]

    def _with_held(self, chunk: Chunk) -> Chunk:
        """Return a choice's last chunk with what was held back of it: it was not a placeholder."""
        for key in [key for key in self._held if key[0] == chunk.index]:
            _, field, call = key
            held = self._held.pop(key)
            if field == "arguments":
                calls = chunk.tool_calls
                at = next((number for number, one in enumerate(calls) if one.index == call), -1)
                if at < 0:
                    calls = (*calls, ToolCallDelta(call, held))
                else:
                    longer = msgspec.structs.replace(calls[at], arguments=calls[at].arguments + held)
                    calls = (*calls[:at], longer, *calls[at + 1 :])
                chunk = msgspec.structs.replace(chunk, tool_calls=calls)
            else:
                chunk = msgspec.structs.replace(chunk, **{field: (getattr(chunk, field) or "") + held})
        return chunk


def restorer_of(masked: Masked) -> Restorer:
    """Return the restorer of the answer to a masked request."""
    form = masked.request.response_format
    return Restorer(masked.values, is_json=form is not None and form.kind != "text")


def restored_whole(chunks: Sequence[Chunk], restorer: Restorer) -> tuple[Chunk, ...]:
    """Return a whole answer with values."""
    return (*(restorer.chunk(chunk) for chunk in chunks), *restorer.end())
