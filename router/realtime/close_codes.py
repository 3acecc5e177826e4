"""Why the server closes a session's WebSocket. Codes from 4000 on are free for applications (RFC 6455, 7.4.2)."""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class CloseCode(IntEnum):
    """The close codes of a session, besides those of the protocol itself (1002, 1007, 1009)."""

    GOING_AWAY = 1001
    NOT_TEXT = 1003
    TOO_SLOW = 1008
    TOKEN_REFUSED = 4401
    UNKNOWN_SESSION = 4404
    IDLE = 4408
    TAKEN_OVER = 4409
    EVENTS_LOST = 4410


MEANING: Final = {
    CloseCode.GOING_AWAY: "the server shuts down; connect again",
    CloseCode.NOT_TEXT: "a binary frame; events are JSON in text frames",
    CloseCode.TOO_SLOW: "the client read nothing for too long; the session can be resumed",
    CloseCode.TOKEN_REFUSED: "the token has expired or was revoked; resume the session with another one",
    CloseCode.UNKNOWN_SESSION: "the session to resume does not exist here, has ended, or is another client's",
    CloseCode.IDLE: "nothing happened in the session for too long; it has ended",
    CloseCode.TAKEN_OVER: "another connection resumed the session",
    CloseCode.EVENTS_LOST: "events after the given number are no longer kept, or were never sent",
}
"""The meaning of each code, for the pages."""
