"""The table of a job's life, for gateway and device. A missing key is an illegal transition."""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class JobState(StrEnum):
    """State of a job, as in the API."""

    QUEUED = "queued"
    WAITING = "waiting"  # for its next attempt
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    DEAD = "dead"  # its attempts are used up: an operator may retry or purge it
    CANCELLED = "cancelled"
    EXPIRED = "expired"  # its deadline passed


class JobEvent(StrEnum):
    """What changes a job's state."""

    CLAIM = "claim"
    RELEASE = "release"  # to its queue: its worker drains or is lost, or its tenant is over a limit
    POSTPONE = "postpone"
    PROMOTE = "promote"
    SUCCEED = "succeed"
    FAIL = "fail"
    EXHAUST = "exhaust"
    CANCEL = "cancel"
    EXPIRE = "expire"
    REVIVE = "revive"
    REVISE = "revise"  # a late part was read: the answer is made anew


class IllegalJobTransition(RuntimeError):
    """A bug: the table has no such row."""


TRANSITIONS: Final[dict[JobState, dict[JobEvent, JobState]]] = {
    JobState.QUEUED: {
        JobEvent.CLAIM: JobState.RUNNING,
        JobEvent.CANCEL: JobState.CANCELLED,
        JobEvent.EXPIRE: JobState.EXPIRED,
    },
    JobState.WAITING: {
        JobEvent.PROMOTE: JobState.QUEUED,
        JobEvent.CANCEL: JobState.CANCELLED,
        JobEvent.EXPIRE: JobState.EXPIRED,
    },
    JobState.RUNNING: {
        JobEvent.RELEASE: JobState.QUEUED,
        JobEvent.POSTPONE: JobState.WAITING,
        JobEvent.SUCCEED: JobState.SUCCEEDED,
        JobEvent.FAIL: JobState.FAILED,
        # Also without a report of a worker: a job that kills each worker that runs it must end.
        JobEvent.EXHAUST: JobState.DEAD,
        JobEvent.CANCEL: JobState.CANCELLED,
        JobEvent.EXPIRE: JobState.EXPIRED,
    },
    JobState.DEAD: {JobEvent.REVIVE: JobState.QUEUED},
    JobState.SUCCEEDED: {JobEvent.REVISE: JobState.SUCCEEDED},
    JobState.FAILED: {},
    JobState.CANCELLED: {},
    JobState.EXPIRED: {},
}

FINAL_STATES: Final = frozenset(
    {JobState.SUCCEEDED, JobState.FAILED, JobState.DEAD, JobState.CANCELLED, JobState.EXPIRED}
)
"""The job is over. An operator may still retry a dead one."""


def next_state(state: JobState, event: JobEvent) -> JobState:
    """Return the next state. Raises IllegalJobTransition."""
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise IllegalJobTransition(f"{event.value} in {state.value}") from None
