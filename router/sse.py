"""Server-sent events, encoded and parsed. Source: https://html.spec.whatwg.org/multipage/server-sent-events.html"""

from __future__ import annotations

from typing import Final

import msgspec

from .errors import CloudUnreadable

MAX_EVENT_BYTES: Final = 8 * 1024 * 1024
_BOM: Final = b"\xef\xbb\xbf"


class Event(msgspec.Struct, frozen=True):
    """One event. Several data lines are joined by newlines; `type` is empty for a plain message."""

    data: bytes
    type: bytes = b""
    id: bytes = b""


def event(data: bytes) -> bytes:
    """Encode `data` as one event. Each line of it becomes a data line."""
    if b"\n" in data or b"\r" in data:
        data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").replace(b"\n", b"\ndata: ")
    return b"data: " + data + b"\n\n"


class SSEParser:
    """Parses bytes, in pieces of any size, to events. Raises CloudUnreadable for an event above `max_event_bytes`."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_bytes = max_event_bytes
        self._started = False  # False while the first bytes may be a byte order mark
        self._skip_newline = False  # the last byte was CR: a following LF belongs to it
        self._partial: list[bytes] = []  # pieces of the unfinished line
        self._size = 0  # bytes held for the unfinished event
        self._data: list[bytes] = []
        self._type = b""
        self._id = b""

    @property
    def pending(self) -> bool:
        """Whether an unfinished event is buffered. At the end of a stream it means that the stream was cut."""
        return self._size > 0

    @property
    def idle(self) -> bool:
        """Whether the next byte begins an event, so that the bytes of whole events may pass this parser by."""
        return self._started and not self._size and not self._skip_newline

    def feed(self, data: bytes) -> list[Event]:
        """Return the events that these bytes complete. Raises CloudUnreadable for an event that is too large."""
        data = self._normalize_newlines(data if self._started else self._strip_bom(data))
        events: list[Event] = []
        # Pieces of a line are joined only at its end, so a long line that arrives slowly costs linear time.
        *lines, rest = data.split(b"\n")
        if lines and self._partial:
            lines[0] = self._complete_line(lines[0])
        for line in lines:
            self._parse_line(line, events)
        if rest:
            self._count_bytes(rest)
            self._partial.append(rest)
        return events

    def _complete_line(self, end: bytes) -> bytes:
        start = b"".join(self._partial)
        self._partial.clear()
        self._size -= len(start)  # counted again as a line
        return start + end

    def _parse_line(self, line: bytes, events: list[Event]) -> None:
        if line.startswith(b"data: "):  # nearly every line
            self._count_bytes(line)
            self._data.append(line[6:])
        elif not line:
            self._dispatch(events)
        else:
            self._parse_field(line)

    def _parse_field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")  # a comment has no name
        value = value.removeprefix(b" ")
        if name == b"data":
            self._count_bytes(line)
            self._data.append(value)
        elif name == b"event":
            self._count_bytes(line)
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

    def _count_bytes(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._size > self._max_bytes:
            raise CloudUnreadable(f"The target sent an event of more than {self._max_bytes} bytes.", phase="stream")

    def _normalize_newlines(self, data: bytes) -> bytes:
        if self._skip_newline and data:
            self._skip_newline = False
            data = data.removeprefix(b"\n")
        if b"\r" in data:
            self._skip_newline = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        return data

    def _strip_bom(self, data: bytes) -> bytes:
        held = b"".join([*self._partial, data])
        self._partial.clear()
        self._size = 0
        if len(held) < len(_BOM) and _BOM.startswith(held):
            # It may still become a byte order mark; keep it as the start of a line.
            self._partial = [held] if held else []
            self._size = len(held)
            return b""
        self._started = True
        return held.removeprefix(_BOM)
