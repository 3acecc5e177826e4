"""A job, for gateway and device: its state table, its view in the API, and plain requests that become jobs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Final, Literal

import msgspec

from ..errors import CausewayError, DeadlineExceeded, JobCancelled, error_classes
from ..openai.answer import error_fields
from ..types import Modality, PartRecord


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
    REVISE = "revise"  # a late part was read, so the answer is revised


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
    JobState.SUCCEEDED: {JobEvent.REVISE: JobState.SUCCEEDED},
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
    """The body of `GET /v1/jobs/{id}`. Times are unix seconds; `error` is the inner object of an error.

    `revision`: the number of the answer's revision in `result`. `late_parts`: the kinds of parts that may still revise
    it. `late_error`: the reason why no further revision came.
    """

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
    revision: int
    late_parts: tuple[Modality, ...]
    late_error: msgspec.Raw


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


REVISED: Final = "job.revised"
"""The event that carries a revised answer."""
NOT_REVISED: Final = "job.not_revised"
"""The event that tells that no further revision follows, with the reason."""
MAX_LATE: Final = 16
"""Maximum answers of a process that wait for late parts at once; each holds its request in memory."""
RevisionOutcome = Literal["made", "too_late", "failed", "cancelled", "no_room"]
"""The results of a revision. In this order: it was made; the part was not read in time, or the job's deadline passed;
the part could not be read, or the run failed; the job was cancelled; too many answers were waiting for late parts.
"""


class RevisionDropped(CausewayError, code="revision_dropped"):
    """A late part will not revise the answer, which stays as it is."""

    def __init__(self, message: str, outcome: RevisionOutcome = "failed") -> None:
        super().__init__(message)
        self.outcome = outcome


def no_room() -> RevisionDropped:
    """Return the error for an answer that cannot wait for its late parts."""
    return RevisionDropped(f"{MAX_LATE} other answers already wait for late parts.", "no_room")


def outcome_of(error: CausewayError) -> RevisionOutcome:
    """Return the outcome of an answer's revisions that this error ended."""
    if isinstance(error, RevisionDropped):
        return error.outcome
    if isinstance(error, DeadlineExceeded):
        return "too_late"
    return "cancelled" if isinstance(error, JobCancelled) else "failed"


class ReadingLimits(msgspec.Struct, frozen=True):
    """The limits of reading late parts. `by`: end, monotonic seconds. `absent`: kinds that are not waited for."""

    by: float
    absent: tuple[Modality, ...] = ()


class PendingRevision(msgspec.Struct, frozen=True):
    """A revision that may follow an answer. `kinds`: the kinds of the late parts that are being read. `until`:
    the end of reading, s. `target`: the cloud target that may already have received the next revision's request, and is
    then the only one that may make it.
    """

    kinds: tuple[Modality, ...]
    until: float
    target: str = ""


def late_kinds(parts: Iterable[PartRecord]) -> tuple[Modality, ...]:
    """Return the kinds of parts that the answer lacks and that may still be read."""
    return tuple(sorted({part.modality for part in parts if part.status in ("timeout", "skipped") and not part.soft}))


def check_read(parts: Sequence[PartRecord], kind: Modality) -> None:
    """Raise RevisionDropped unless all parts of this kind were read."""
    statuses = {part.status for part in parts if part.modality == kind}
    if "failed" in statuses or not statuses:
        raise RevisionDropped(f"`{kind}`: the part could not be read.")
    if statuses != {"ok"}:
        raise RevisionDropped(f"`{kind}`: the part was not read in time.", "too_late")


def check_revised(parts: Iterable[PartRecord], kinds: Iterable[Modality]) -> None:
    """Raise RevisionDropped unless the answer contains all parts of these kinds, which had been read before."""
    kinds = set(kinds)
    if any(part.modality in kinds and part.status != "ok" for part in parts):
        raise RevisionDropped("The content of a late part is no longer known.")


def revision_id(job: str, revision: int) -> str:
    """Return the id of a job's revision, which its event has and which is its Idempotency-Key upstream."""
    return f"{job}.r{revision}" if revision else job
