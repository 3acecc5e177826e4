"""A job of this device: as submitted, as stored, and as the API shows it; what the transactions of the outbox take and
return; and the errors that only jobs of a device have, leaves of the tree in `router.errors`.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

import msgspec

from causeway_server.router.errors import CausewayError, InvalidRequest, QueueFull
from causeway_server.router.jobs.job import FINAL_STATES, JobState, JobView, LateParts, RevisionOutcome
from causeway_server.router.jobs.submission import Endpoint, Priority
from causeway_server.router.serving.webhooks import DueWebhook
from causeway_server.router.types import PartRecord, Prefer

WebhookStatus = Literal["", "pending", "delivered", "failed", "disabled"]
Lane = Literal["", "edge", "cloud"]
"""Where the policy would run a job now; "": it must be decided anew."""


class EdgeJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job. Times are seconds of the device's own clock, those named `*_unix` wall-clock seconds for people."""

    seq: int = 0  # order of acceptance
    id: str = ""
    owner: str  # the client: its API key's name, or its address
    key: str = ""  # digest of the caller's Idempotency-Key; "": none
    digest: str = ""  # of body and headers, compared under the same key
    priority: Priority
    endpoint: Endpoint
    model: str
    tags: tuple[str, ...] = ()  # of headers and API key; the body may have its own
    prefer: Prefer | None = None
    may_leave: bool  # the policy at acceptance allowed it to leave the device
    lane: Lane
    target: str = ""  # of the cloud, once the request may have been sent there: it runs nowhere else
    state: JobState = JobState.QUEUED
    due: float
    deadline: float
    accepted_unix: float
    started_unix: float | None = None
    ended: float | None = None
    ended_unix: float | None = None
    attempts: int = 0  # runs that failed
    lost: int = 0  # runs during which the daemon ended
    revived: int = 0  # times that it was a dead letter and was retried
    run: int = 0  # number of the last run: an older one reports in vain
    body_bytes: int = 0
    result_bytes: int = 0
    error: bytes = b""  # JSON
    cache: str = ""
    decision: str = ""  # id of the last run's
    route: str = ""  # where the answer came from
    revise_within_s: float = 0.0  # from the start of a run, its answer may be revised; 0: it is not
    revision: int = 0  # of the answer
    late: LateParts | None = None  # what the answer may still be revised for; the request is kept as long
    late_error: bytes = b""  # JSON: why no further revision came
    webhook: str = ""  # URL
    webhook_status: WebhookStatus = ""

    @property
    def cloud_key(self) -> str:
        """The cloud's Idempotency-Key: a retried dead letter is another job there."""
        return f"{self.id}.{self.revived}" if self.revived else self.id

    @property
    def stored_bytes(self) -> int:
        """Bytes of its request and its result."""
        return self.body_bytes + self.result_bytes

    @property
    def has_ended(self) -> bool:
        return self.state in FINAL_STATES


class JobAnswer(msgspec.Struct, frozen=True):
    """The answer of a run, JSON, and how it was made. `parts`: those that the target got as text."""

    result: bytes
    cache: str
    route: str
    decision: str
    parts: tuple[PartRecord, ...] = ()

    @property
    def notes(self) -> dict[str, object]:
        """What the record of the job says of it."""
        return {"cache": self.cache, "route": self.route, "decision": self.decision}


class EdgeJobView(JobView, frozen=True, kw_only=True, omit_defaults=False):
    """The view of a job on a device: the gateway's, and how it was decided."""

    route: str | None
    decision: str | None


def edge_job_view(job: EdgeJob, now: float, unix: float, result: bytes = b"") -> EdgeJobView:
    """Return what the API shows. `now` is the device's own time, `unix` the wall clock; `result` is JSON."""
    return EdgeJobView(
        id=job.id,
        status=job.state.value,
        model=job.model,
        priority=job.priority,
        endpoint=job.endpoint,
        created_at=int(job.accepted_unix),
        started_at=None if job.started_unix is None else int(job.started_unix),
        finished_at=None if job.ended_unix is None else int(job.ended_unix),
        deadline_at=int(unix + job.deadline - now),
        not_before_at=int(unix + job.due - now) if job.due > now and not job.has_ended else None,
        attempts=job.attempts + (1 if job.state is JobState.SUCCEEDED else 0),
        cache=job.cache or None,
        route=job.route or None,
        decision=job.decision or None,
        error=msgspec.Raw(job.error or b"null"),
        result=msgspec.Raw(result or b"null"),
        webhook=job.webhook or None,
        webhook_status=job.webhook_status or None,
        revision=job.revision,
        late_parts=() if job.late is None else job.late.kinds,
        late_error=msgspec.Raw(job.late_error or b"null"),
    )


class OutboxFull(QueueFull, code="outbox_full"):
    """The device holds as many jobs, or as many bytes of them, as it may."""


class JobNotDead(InvalidRequest, status=409, code="job_not_dead"):
    """Only a dead letter can be retried."""


class JobNotEnded(InvalidRequest, status=409, code="job_not_ended"):
    """A job that has not ended is cancelled, not purged."""


class JobDropped(CausewayError, status=503, code="job_dropped"):
    """A bulk job that waited gave way to a newer job, because the outbox was full."""


class JobLost(CausewayError, code="daemon_lost"):
    """The daemon ended during each of many runs of the job."""


class Accepted(msgspec.Struct, frozen=True):
    """`known`: the same request came before, with the same key."""

    job: EdgeJob
    known: bool = False


class Claimed(msgspec.Struct, frozen=True):
    job: EdgeJob
    body: bytes


class ReplyTo(msgspec.Struct, frozen=True):
    """Where the answer of a job is sent, for a sender that does not fetch it.

    `address`: the sender's matter. `is_new`: an earlier job with the same key was another one, and loses the key.
    """

    address: bytes
    is_new: bool = False


class DueReply(msgspec.Struct, frozen=True):
    """A job that has ended, whose answer is to be sent. `due`: the device's own time, s."""

    job: EdgeJob
    result: bytes
    address: bytes
    due: float


class OutboxWebhook(DueWebhook, frozen=True, kw_only=True):
    """A webhook that is to be sent. `attempts`: made before, and answered."""

    number: int


class ClientStats(msgspec.Struct, frozen=True):
    """What the outbox holds of one client, as `OutboxStats` has it of all."""

    unfinished: int = 0
    bulk: int = 0
    bytes: int = 0
    bulk_bytes: int = 0


class OutboxStats(msgspec.Struct):
    """Counted in the thread of the file, read anywhere. Totals are since the start of the daemon."""

    unfinished: int = 0
    bulk: int = 0  # of the unfinished
    bytes: int = 0  # of requests and results
    bulk_bytes: int = 0  # of unfinished bulk jobs
    empty: int = 0  # jobs that have ended and hold neither request nor result
    unreadable: int = 0  # jobs that are set aside, see `schema`
    accepted: int = 0
    dropped: int = 0
    ended: Counter[str] = msgspec.field(default_factory=Counter)  # by state
    revisions: Counter[RevisionOutcome] = msgspec.field(default_factory=Counter)  # of answers, made or not
    replies_due: int = 0  # answers that are to be sent
    replies_lost: int = 0  # answers that were deleted before they could be sent

    cancellations_due: int = 0  # that the cloud is to be told of
    webhooks_due: int = 0  # webhooks that are to be sent
    webhooks: Counter[str] = msgspec.field(default_factory=Counter)  # that were sent, or are not any more
