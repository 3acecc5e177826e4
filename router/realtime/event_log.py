"""The events that a session sends to its client, numbered and as frames, and the codes that close a connection.

Unsent events are never dropped: a producer waits while there are many (`unsent_bytes`). The newest sent events, at most
`replay_bytes`, are kept so that a cut connection can resume.
"""

from __future__ import annotations

import struct
from collections import deque
from enum import IntEnum
from typing import Final

import msgspec

from ..documents.data import table_of
from ..errors import CausewayError, InvalidRequest
from ..openai.answer import error_fields

_encode = msgspec.json.Encoder().encode


class EventsLost(InvalidRequest, status=410, code="events_lost"):
    """The session cannot be resumed after the given event."""


class EventLog:
    """Events by number, from 1: the sent ones, of which `replay_bytes` are kept, and then the unsent ones."""

    def __init__(self, replay_bytes: int) -> None:
        self._replay_bytes = replay_bytes
        self._sent: deque[bytes] = deque()
        self._sent_bytes = 0
        self._unsent: deque[bytes] = deque()
        self.unsent_bytes = 0
        self.last = 0
        """The number of the newest event."""

    def append(self, kind: str, fields: dict[str, object]) -> None:
        """Add an event of this type."""
        self.last += 1
        data = _encode({"type": kind, "event_id": f"event_{self.last}", "sequence_number": self.last, **fields})
        self._unsent.append(data)
        self.unsent_bytes += len(data)

    def take(self) -> bytes | None:
        """Return the next event to send, which then counts as sent; None if there is none."""
        if not self._unsent:
            return None
        data = self._unsent.popleft()
        self.unsent_bytes -= len(data)
        self._sent.append(data)
        self._sent_bytes += len(data)
        while self._sent_bytes > self._replay_bytes:
            self._sent_bytes -= len(self._sent.popleft())
        return data

    def rewind(self, after: int) -> None:
        """Make all events after number `after`, the client's last, unsent again; drop earlier ones. Raises EventsLost
        if some are no longer kept, or there is no such event.
        """
        newest_sent = self.last - len(self._unsent)
        oldest_sent = newest_sent - len(self._sent)
        if not oldest_sent <= after <= newest_sent:
            raise EventsLost(
                f"The session can be resumed after an event from {oldest_sent} to {newest_sent}, not after {after}. "
                "Start a new session.",
                param="after",
            )
        while newest_sent > after:
            data = self._sent.pop()
            self._unsent.appendleft(data)
            self.unsent_bytes += len(data)
            newest_sent -= 1
        self._sent.clear()
        self._sent_bytes = 0


def encode_refusal(error: CausewayError) -> bytes:
    """Encode the only event of a connection that is refused a session."""
    return _encode({"type": "error", "event_id": "event_0", "error": {**error_fields(error), "event_id": None}})


class CloseCode(IntEnum):
    """The close codes of a session beside the protocol's; from 4000 on they are free (RFC 6455, 7.4.2)."""

    GOING_AWAY = 1001
    NOT_TEXT = 1003
    TOO_SLOW = 1008
    TOKEN_REFUSED = 4401
    UNKNOWN_SESSION = 4404
    IDLE = 4408
    TAKEN_OVER = 4409
    EVENTS_LOST = 4410


MEANING: Final = table_of(__package__, "close_codes.json", dict[CloseCode, str])
"""The meaning of each code, for the pages."""


_TEXT = 0x81  # final frame, text


def text_frame(payload: bytes) -> bytes:
    """Return the frame of a text message, not compressed and not masked (RFC 6455, 5.2). Each event is one frame."""
    size = len(payload)
    if size < 126:
        return bytes((_TEXT, size)) + payload
    if size < 1 << 16:
        return struct.pack("!BBH", _TEXT, 126, size) + payload
    return struct.pack("!BBQ", _TEXT, 127, size) + payload
