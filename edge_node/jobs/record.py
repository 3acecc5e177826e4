"""A job of this device: as submitted, as stored, and as the API shows it; the inputs and results of the outbox's
transactions; and the errors of device jobs, leaves of the tree in `router.errors`.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

import msgspec

from causeway_server.router.errors import CausewayError, InvalidRequest, QueueFull
from causeway_server.router.jobs.job import FINAL_STATES, JobState, JobView
from causeway_server.router.jobs.submission import Endpoint
from causeway_server.router.serving.webhooks import DueWebhook
from causeway_server.router.types import Prefer, Priority

WebhookStatus = Literal["", "pending", "delivered", "failed", "disabled"]
Lane = Literal["", "edge", "cloud"]
"""The place where the policy would run a job now; "" if that must be decided again."""


class EdgeJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job. Times are seconds of the device's own clock; those named `*_unix` are wall-clock seconds for display."""

    seq: int = 0  # order of acceptance
    id: str = ""
    owner: str  # the client: its API key's name, or its address
    key: str = ""  # digest of the caller's Idempotency-Key; "": none
    digest: str = ""  # digest of body and headers, compared under the same key
    priority: Priority
    endpoint: Endpoint
    model: str
    tags: tuple[str, ...] = ()  # tags of headers and API key; the body may have its own
    prefer: Prefer | None = None
    may_leave: bool  # whether the policy, at acceptance, allowed the job to leave the device
    lane: Lane
    target: str = ""  # cloud target to which the request may have been sent; from then on the job runs nowhere else
    state: JobState = JobState.QUEUED
    due: float
    deadline: float
    accepted_unix: float
    started_unix: float | None = None
    ended: float | None = None
    ended_unix: float | None = None
    attempts: int = 0  # number of failed runs
    lost: int = 0  # number of runs during which the daemon ended
    revived: int = 0  # number of times that the job was retried as a dead letter
    run: int = 0  # number of the last run; reports of earlier runs are ignored
    body_bytes: int = 0
    result_bytes: int = 0
    error: bytes = b""  # error, as JSON
    cache: str = ""
    decision: str = ""  # id of the last run's decision
    route: str = ""  # source of the answer: edge, cloud or cache
    webhook: str = ""  # URL of the webhook
    webhook_status: WebhookStatus = ""

    @property
    def cloud_key(self) -> str:
        """The Idempotency-Key that the cloud gets. A retried dead letter is a new job for the cloud."""
        return f"{self.id}.{self.revived}" if self.revived else self.id

    @property
    def stored_bytes(self) -> int:
        """Size of the job's request and result, in bytes."""
        return self.body_bytes + self.result_bytes

    @property
    def has_ended(self) -> bool:
        return self.state in FINAL_STATES


class JobAnswer(msgspec.Struct, frozen=True):
    """The answer of a run, as JSON, and its origin."""

    result: bytes
    cache: str
    route: str
    decision: str


class EdgeJobView(JobView, frozen=True, kw_only=True, omit_defaults=False):
    """The API's view of a job on a device: the fields of the gateway's view, and the decision."""

    route: str | None
    decision: str | None


def edge_job_view(job: EdgeJob, now: float, unix: float, result: bytes = b"") -> EdgeJobView:
    """Return the API's view of a job. `now` is the device's own time, `unix` the wall clock; `result` is JSON."""
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
    )


class OutboxFull(QueueFull, code="outbox_full"):
    """The device holds the maximum number of jobs, or of bytes of jobs."""


class JobNotDead(InvalidRequest, status=409, code="job_not_dead"):
    """The job is not a dead letter, so it cannot be retried."""


class JobNotEnded(InvalidRequest, status=409, code="job_not_ended"):
    """The job has not ended, so it can be cancelled but not purged."""


class JobDropped(CausewayError, status=503, code="job_dropped"):
    """A waiting bulk job was displaced by a newer job, because the outbox was full."""


class JobLost(CausewayError, code="daemon_lost"):
    """The daemon ended during each of many runs of the job."""


class Accepted(msgspec.Struct, frozen=True):
    """An accepted job. `known`: the same request was submitted before, with the same key."""

    job: EdgeJob
    known: bool = False


class Claimed(msgspec.Struct, frozen=True):
    job: EdgeJob
    body: bytes


class ReplyTo(msgspec.Struct, frozen=True):
    """Destination of a job's answer, for a sender that does not fetch it. `address`: its form is the protocol's.
    `is_new`: an earlier job with the same key is unrelated, and loses the key.
    """

    address: bytes
    is_new: bool = False


class DueReply(msgspec.Struct, frozen=True):
    """A job that has ended, whose answer must be sent. `due`: the device's own time, s."""

    job: EdgeJob
    result: bytes
    address: bytes
    due: float


class OutboxWebhook(DueWebhook, frozen=True, kw_only=True):
    """A webhook that must be sent. `attempts`: number of earlier attempts that got a response."""

    number: int


class ClientStats(msgspec.Struct, frozen=True):
    """The outbox's counts for one client; `OutboxStats` has the counts for all clients."""

    unfinished: int = 0
    bulk: int = 0
    bytes: int = 0
    bulk_bytes: int = 0


class OutboxStats(msgspec.Struct):
    """Counts of the outbox, updated in the thread of the file and read anywhere. Totals are since its start."""

    unfinished: int = 0
    bulk: int = 0  # unfinished bulk jobs
    bytes: int = 0  # bytes of requests and results
    bulk_bytes: int = 0  # bytes of unfinished bulk jobs
    empty: int = 0  # jobs that have ended and hold neither request nor result
    unreadable: int = 0  # jobs that are set aside because they cannot be read, see `schema`
    accepted: int = 0
    dropped: int = 0
    ended: Counter[str] = msgspec.field(default_factory=Counter)  # ended jobs by state
    replies_due: int = 0  # answers that must be sent
    replies_lost: int = 0  # answers that were deleted before they could be sent

    cancellations_due: int = 0  # cancellations that must be sent to the cloud
    webhooks_due: int = 0  # webhooks that must be sent
    webhooks: Counter[str] = msgspec.field(default_factory=Counter)  # webhooks that were delivered or given up
