"""The life of one attempt as a table: its states, what can happen to it, and which state follows."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class AttemptState(StrEnum):
    PENDING = "pending"  # planned; no request was sent to the target
    WAITING = "waiting"  # request sent; no chunk has arrived
    HOLDING = "holding"  # first tokens are held back until their confidence is known
    COLLECTING = "collecting"  # confident enough, but the client does not stream: nothing was sent yet
    COMMITTED = "committed"  # the first byte was released to the client
    DONE = "done"
    FAILED = "failed"
    HANDED_OFF = "handed_off"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"


class AttemptEvent(StrEnum):
    START = "start"  # the request goes to the target
    HOLD = "hold"  # the first chunk arrived, and the plan has a handoff
    COLLECT = "collect"  # a chunk arrived that may be kept, and the client does not stream
    COMMIT = "commit"  # chunks are released to the client
    LOW_CONFIDENCE = "low_confidence"  # the confidence of the held tokens is below the handoff's threshold
    LAST_CHUNK = "last_chunk"  # the end of the answer is released to the client
    ERROR = "error"
    CANCEL = "cancel"  # the client disconnected, or the daemon stops
    DEADLINE = "deadline"


# An error, a client that disconnects, and the deadline can come at any moment before the end.
_INTERRUPTS: Mapping[AttemptEvent, AttemptState] = {
    AttemptEvent.ERROR: AttemptState.FAILED,
    AttemptEvent.CANCEL: AttemptState.CANCELLED,
    AttemptEvent.DEADLINE: AttemptState.TIMED_OUT,
}

# A missing key is an illegal transition: a bug of the caller, never of the target.
TABLE: Mapping[AttemptState, Mapping[AttemptEvent, AttemptState]] = {
    # ERROR before START: the breaker is open, or there is no engine.
    AttemptState.PENDING: {AttemptEvent.START: AttemptState.WAITING, **_INTERRUPTS},
    # Three ways on: hold back for confidence, collect for a client that does not stream, or straight to the client.
    AttemptState.WAITING: {
        AttemptEvent.HOLD: AttemptState.HOLDING,
        AttemptEvent.COLLECT: AttemptState.COLLECTING,
        AttemptEvent.COMMIT: AttemptState.COMMITTED,
        **_INTERRUPTS,
    },
    # The only state that may hand off: nothing has reached the client, and another target can answer.
    AttemptState.HOLDING: {
        AttemptEvent.LOW_CONFIDENCE: AttemptState.HANDED_OFF,
        AttemptEvent.COLLECT: AttemptState.COLLECTING,
        AttemptEvent.COMMIT: AttemptState.COMMITTED,
        **_INTERRUPTS,
    },
    # If an answer breaks while it is collected, the next target may still answer.
    AttemptState.COLLECTING: {AttemptEvent.COMMIT: AttemptState.COMMITTED, **_INTERRUPTS},
    # Bytes have reached the client: an error ends the answer, it never switches target. No LOW_CONFIDENCE here.
    AttemptState.COMMITTED: {AttemptEvent.LAST_CHUNK: AttemptState.DONE, **_INTERRUPTS},
    AttemptState.DONE: {},
    AttemptState.FAILED: {},
    AttemptState.HANDED_OFF: {},
    AttemptState.CANCELLED: {},
    AttemptState.TIMED_OUT: {},
}


class IllegalTransition(RuntimeError):
    """The caller fed an event that `TABLE` does not allow in this state."""
