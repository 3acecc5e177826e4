"""A job's life as a table. A missing key is an illegal move. The Lua scripts are given this very table."""

from __future__ import annotations

from enum import Enum
from typing import Final


class State(str, Enum):
    QUEUED = "queued"
    WAITING = "waiting"  # for its next attempt
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    DEAD = "dead"  # its attempts are used up: a person may retry or purge it
    CANCELLED = "cancelled"
    EXPIRED = "expired"  # its deadline passed


class Event(str, Enum):
    CLAIM = "claim"
    RELEASE = "release"  # a draining worker gives it back
    POSTPONE = "postpone"
    PROMOTE = "promote"
    SUCCEED = "succeed"
    FAIL = "fail"
    EXHAUST = "exhaust"
    CANCEL = "cancel"
    EXPIRE = "expire"
    REVIVE = "revive"


class IllegalMove(RuntimeError):
    """A fault of ours: the table has no such row."""


TABLE: Final[dict[State, dict[Event, State]]] = {
    State.QUEUED: {
        Event.CLAIM: State.RUNNING,
        Event.CANCEL: State.CANCELLED,
        Event.EXPIRE: State.EXPIRED,
    },
    State.WAITING: {
        Event.PROMOTE: State.QUEUED,
        Event.CANCEL: State.CANCELLED,
        Event.EXPIRE: State.EXPIRED,
    },
    State.RUNNING: {
        Event.CLAIM: State.RUNNING,  # its worker died: another takes it over, with a new fence
        Event.RELEASE: State.QUEUED,
        Event.POSTPONE: State.WAITING,
        Event.SUCCEED: State.SUCCEEDED,
        Event.FAIL: State.FAILED,
        # Also without a report: a job that kills each worker that claims it must end somewhere.
        Event.EXHAUST: State.DEAD,
        Event.CANCEL: State.CANCELLED,
        Event.EXPIRE: State.EXPIRED,
    },
    State.DEAD: {Event.REVIVE: State.QUEUED},
    State.SUCCEEDED: {},
    State.FAILED: {},
    State.CANCELLED: {},
    State.EXPIRED: {},
}

ENDED: Final = frozenset({State.SUCCEEDED, State.FAILED, State.DEAD, State.CANCELLED, State.EXPIRED})
"""The caller's job is over. Of these only `dead` can live again, by an operator's hand."""


def after(state: State, event: Event) -> State:
    """Raises IllegalMove."""
    try:
        return TABLE[state][event]
    except KeyError:
        raise IllegalMove(f"{event.value} in {state.value}") from None


def lua_table() -> str:
    """The table as Lua: `TABLE[state][event]` is the next state or nil; `ENDED[state]` is true or nil."""
    rows = [
        f"{state.value}={{{','.join(f'{event.value}={to.value!r}' for event, to in row.items())}}}"
        for state, row in TABLE.items()
    ]
    ended = ",".join(f"{state.value}=true" for state in sorted(ENDED))
    return f"local TABLE = {{{','.join(rows)}}}\nlocal ENDED = {{{ended}}}\n"
