"""Server-sent events, both ways. Source: https://html.spec.whatwg.org/multipage/server-sent-events.html"""

from __future__ import annotations

from typing import Final

import msgspec

from .errors import CloudFailed

MAX_EVENT_BYTES: Final = 8 * 1024 * 1024
_BOM: Final = b"\xef\xbb\xbf"


class Event(msgspec.Struct, frozen=True):
    """One dispatched event; several data lines are joined by newlines. `type` is empty for a plain message."""

    data: bytes
    type: bytes = b""
    id: bytes = b""


def event(data: bytes) -> bytes:
    """`data` as one event; line breaks in it become data lines of their own."""
    if b"\n" in data or b"\r" in data:
        data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").replace(b"\n", b"\ndata: ")
    return b"data: " + data + b"\n\n"


class SSEParser:
    """Bytes in any pieces → events. An event that never ends is bounded by `max_event_bytes`."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_bytes = max_event_bytes
        self._started = False  # the first bytes may be a byte order mark
        self._skip_newline = False  # the last byte was CR: a LF that comes next belongs to it
        self._partial: list[bytes] = []  # of the unfinished line
        self._size = 0  # bytes held for the unfinished event
        self._data: list[bytes] = []
        self._type = b""
        self._id = b""

    @property
    def pending(self) -> bool:
        """Bytes are held that make no whole event: at the end of a stream, it was cut."""
        return self._size > 0

    def feed(self, data: bytes) -> list[Event]:
        """The events that these bytes complete. Raises CloudFailed when one grows beyond the bound."""
        data = self._newlines(data if self._started else self._without_mark(data))
        events: list[Event] = []
        # Lines are only put together when one ends: a long one that drips in stays linear.
        *lines, rest = data.split(b"\n")
        if lines and self._partial:
            lines[0] = self._completed(lines[0])
        for line in lines:
            self._line(line, events)
        if rest:
            self._hold(rest)
            self._partial.append(rest)
        return events

    def _completed(self, end: bytes) -> bytes:
        start = b"".join(self._partial)
        self._partial.clear()
        self._size -= len(start)  # counted again as a line
        return start + end

    def _line(self, line: bytes, events: list[Event]) -> None:
        if line.startswith(b"data: "):  # nearly every line
            self._hold(line)
            self._data.append(line[6:])
        elif not line:
            self._dispatch(events)
        else:
            self._field(line)

    def _field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")  # a comment has no name
        value = value.removeprefix(b" ")
        if name == b"data":
            self._hold(line)
            self._data.append(value)
        elif name == b"event":
            self._hold(line)
            self._type = value
        elif name == b"id" and b"\0" not in value:
            self._id = value[: self._max_bytes]

    def _dispatch(self, events: list[Event]) -> None:
        if self._data:
            data = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
            events.append(Event(data, self._type, self._id))
            self._data.clear()
        self._type = b""
        self._size = 0

    def _hold(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._size > self._max_bytes:
            raise CloudFailed(f"The target sent an event of more than {self._max_bytes} bytes.", phase="stream")

    def _newlines(self, data: bytes) -> bytes:
        if self._skip_newline and data:
            self._skip_newline = False
            data = data.removeprefix(b"\n")
        if b"\r" in data:
            self._skip_newline = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        return data

    def _without_mark(self, data: bytes) -> bytes:
        held = b"".join([*self._partial, data])
        self._partial.clear()
        self._size = 0
        if len(held) < len(_BOM) and _BOM.startswith(held):
            # Not known yet whether it is a mark; kept as the start of a line.
            self._partial = [held] if held else []
            self._size = len(held)
            return b""
        self._started = True
        return held.removeprefix(_BOM)
