"""A stream's events that differ from one decoded before in nothing but their text.

Such an event is `before`, a JSON string, and `after`: comparing the two and decoding the string costs a fifth of
decoding the whole event. Nearly every token of a stream comes in one.
"""

from __future__ import annotations

from typing import Final

import msgspec

_KEYS: Final = (b'"content":', b'"text":')
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(str).decode


class EventTemplate:
    """`index`: of the choice whose text it is."""

    def __init__(self, before: bytes, after: bytes, index: int) -> None:
        self.index = index
        self._before = before
        self._after = after
        self._text = slice(len(before), -len(after))

    def text(self, event: bytes) -> str | None:
        """Return the text; None: the event has to be decoded."""
        if not event.startswith(self._before) or not event.endswith(self._after):
            return None
        try:
            return _decode(event[self._text])  # nothing, where the two overlap: no JSON
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None

    def framed(self) -> EventTemplate:
        """The same of the event as it is sent. (No JSON string holds the end of an event: newlines are escaped.)"""
        return EventTemplate(b"data: " + self._before, self._after + b"\n\n", self.index)

    def filled(self, text: str) -> bytes:
        return self._before + _encode(text) + self._after


def split_event(event: bytes, text: str, index: int) -> EventTemplate | None:
    """Split an event around its text. None: it cannot be found, or is escaped in another way than ours."""
    literal = _encode(text)
    for key in _KEYS:
        at = event.find(key)
        if at < 0:
            continue
        at += len(key)
        at += event[at:].startswith(b" ")
        if event.startswith(literal, at):
            return EventTemplate(event[:at], event[at + len(literal) :], index)
    return None
