"""A job, for gateway and device: its state table, its view in the API, and plain requests that become jobs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum
from typing import Final

import msgspec

from ..errors import CausewayError, JobCancelled, error_classes
from ..openai.answer import error_fields


class JobState(StrEnum):
    """State of a job, as in the API."""

    QUEUED = "queued"
    WAITING = "waiting"  # it waits for its next attempt
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    DEAD = "dead"  # its attempts are used up; an operator may retry or purge it
    CANCELLED = "cancelled"
    EXPIRED = "expired"  # its deadline passed


class JobEvent(StrEnum):
    """An event that changes a job's state."""

    CLAIM = "claim"
    RELEASE = "release"  # it returns to its queue: its worker drains or is lost, or its tenant is over a limit
    POSTPONE = "postpone"
    PROMOTE = "promote"
    SUCCEED = "succeed"
    FAIL = "fail"
    EXHAUST = "exhaust"
    CANCEL = "cancel"
    EXPIRE = "expire"
    REVIVE = "revive"


class IllegalJobTransition(RuntimeError):
    """The table has no such transition, which is a bug of the caller."""


_STOPPED: Final = {JobEvent.CANCEL: JobState.CANCELLED, JobEvent.EXPIRE: JobState.EXPIRED}
TRANSITIONS: Final[dict[JobState, dict[JobEvent, JobState]]] = {
    JobState.QUEUED: {JobEvent.CLAIM: JobState.RUNNING, **_STOPPED},
    JobState.WAITING: {JobEvent.PROMOTE: JobState.QUEUED, **_STOPPED},
    JobState.RUNNING: {
        JobEvent.RELEASE: JobState.QUEUED,
        JobEvent.POSTPONE: JobState.WAITING,
        JobEvent.SUCCEED: JobState.SUCCEEDED,
        JobEvent.FAIL: JobState.FAILED,
        # This also needs no report of a worker: a job that kills each worker that runs it must end.
        JobEvent.EXHAUST: JobState.DEAD,
        **_STOPPED,
    },
    JobState.DEAD: {JobEvent.REVIVE: JobState.QUEUED},
    JobState.SUCCEEDED: {},
    JobState.FAILED: {},
    JobState.CANCELLED: {},
    JobState.EXPIRED: {},
}

FINAL_STATES: Final = frozenset(
    {JobState.SUCCEEDED, JobState.FAILED, JobState.DEAD, JobState.CANCELLED, JobState.EXPIRED}
)
"""The final states. An operator may still retry a dead job."""


def next_state(state: JobState, event: JobEvent) -> JobState:
    """Return the next state. Raises IllegalJobTransition."""
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise IllegalJobTransition(f"The event {event.value} is not allowed in the state {state.value}.") from None


class JobView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """The body of `GET /v1/jobs/{id}`. Times are unix seconds; `error` is the inner object of an error."""

    id: str
    object: str = "job"
    status: str
    model: str
    priority: str
    endpoint: str
    created_at: int
    started_at: int | None
    finished_at: int | None
    deadline_at: int
    not_before_at: int | None
    attempts: int
    cache: str | None
    error: msgspec.Raw
    result: msgspec.Raw
    webhook: str | None
    webhook_status: str | None


class WebhookSecrets(msgspec.Struct):
    """The body of `/v1/webhooks/secret`. `previous` also signs for a time after a rotation."""

    secret: str
    previous: str | None
    object: str = "webhook.secret"


def encode_job_error(error: CausewayError) -> bytes:
    """Return the inner object of OpenAI's error as JSON."""
    return msgspec.json.encode(error_fields(error))


_MAX_WAIT_S = 300.0
_WAIT = re.compile(r'wait\s*=\s*"?([0-9]{1,6})"?', re.IGNORECASE)


def wait_of(headers: Iterable[str]) -> float | None:
    """Return the seconds after which a plain request becomes a job; None if it never does. `Prefer: respond-async` (RFC
    7240) requests this; without `wait` the time is 0. Other preferences are ignored, as the RFC requires.
    """
    preferences = [part.strip() for header in headers for part in header.split(",")]
    if not any(part.partition(";")[0].strip().lower() == "respond-async" for part in preferences):
        return None
    waits = [float(match[1]) for part in preferences if (match := _WAIT.fullmatch(part))]
    return min(waits[0], _MAX_WAIT_S) if waits else 0.0


class JobFailed(CausewayError):
    """The job ended without an answer while its client waited. Code and message are those of the job's error."""

    def __init__(self, state: str, error: bytes) -> None:
        """Create the error. `error`: the stored error object, JSON; empty for a job that was cancelled."""
        found = msgspec.json.decode(error, type=_StoredError) if error else _StoredError()
        super().__init__(found.message or f"The job was {state}.", param=found.param)
        kind = error_classes().get(found.code, CausewayError)
        self.status = kind.status  # type: ignore[misc]
        self.type = found.type  # type: ignore[misc]
        self.code = found.code  # type: ignore[misc]


class _StoredError(msgspec.Struct, frozen=True):
    message: str = ""
    type: str = "server_error"
    code: str = JobCancelled.code
    param: str | None = None
