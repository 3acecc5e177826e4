"""The record of a job: as submitted, as stored, and as the API shows it."""

from __future__ import annotations

import hashlib
from typing import Final, Literal

import msgspec

from causeway_server.router.errors import RecordUnreadable
from causeway_server.router.jobs.job import FINAL_STATES, JobState, JobView
from causeway_server.router.jobs.submission import Endpoint
from causeway_server.router.types import Priority

WebhookStatus = Literal["", "pending", "delivered", "failed", "disabled"]
_BYTES: Final = ("body", "error")


class NewJob(msgspec.Struct, frozen=True, kw_only=True):
    """A checked job, ready to be accepted."""

    id: str
    owner: str  # `tenant/device`
    tier: str
    priority: Priority
    endpoint: Endpoint
    body: bytes  # an OpenAI request
    deadline_ms: int  # Unix milliseconds
    tokens: float = 0.0  # estimate of the tokens of request and answers, which its tenant's turn costs
    webhook: str = ""
    idempotency: str = ""  # digest of the caller's Idempotency-Key; "" for none
    digest: str = ""  # digest of body and headers, compared under the same key
    batch: str = ""  # id of the batch to whose lines it belongs
    line: int = 0  # number of the line in the batch, from 1
    offset: int = 0  # offset of the batch's next line in its input file, bytes
    custom_id: str = ""  # `custom_id` of the batch's line
    tags: tuple[str, ...] = ()  # tags from the headers; the body may have its own
    traceparent: str = ""  # traceparent of the span that submits it
    user: str = ""  # digest of the request's `user`, by which its jobs can be erased
    token_id: str = ""  # id of the signed token that submits it; "" for a static token or none
    token_issued: float = 0.0  # Unix seconds
    not_before: int = 0  # start of the earliest run, Unix milliseconds; 0: it is queued at once
    ttl_ms: int = 0  # time to live after its end; 0: the configured one


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A job in Redis. Times are Unix milliseconds."""

    id: str
    owner: str
    tier: str
    priority: Priority
    endpoint: Endpoint
    body: bytes = b""  # only a claim reads it; it is deleted at the end, unless the job is a dead letter
    state: JobState
    created: int
    deadline: int
    started: int | None = None
    finished: int | None = None
    attempts: int = 0
    postponed: int = 0
    fence: int = 0
    error: bytes = b""  # error as JSON
    webhook: str = ""
    webhook_status: WebhookStatus = ""
    batch: str = ""
    tags: str = ""  # tags, separated by commas
    traceparent: str = ""
    token_id: str = ""
    token_issued: float = 0.0  # Unix seconds
    cache: str = ""  # outcome of the shared cache for the answer
    not_before: int = 0  # start of the earliest run; 0: it was queued at once
    followed: int = 0  # 1 if a client follows its events; only set by a claim

    @property
    def begun(self) -> int:
        """Return the start of the latest run, or of the job itself, in Unix milliseconds."""
        return self.created if self.started is None else self.started

    @property
    def ended(self) -> bool:
        """Whether the job is in a final state."""
        return self.state in FINAL_STATES

    @property
    def tag_list(self) -> tuple[str, ...]:
        """Tags in `tags`, as a tuple."""
        return tuple(self.tags.split(",")) if self.tags else ()


LISTED_FIELDS: Final = tuple(name for name in JobRecord.__struct_fields__ if name != "body")
"""All fields except the request, which may be large and which only a worker needs."""


def parse_record(fields: dict[str, bytes]) -> JobRecord:
    """Parse a Redis hash. Raises RecordUnreadable."""
    try:
        plain = {name: value.decode() for name, value in fields.items() if name not in _BYTES}
        record = msgspec.convert(plain, JobRecord, strict=False)
    except (msgspec.ValidationError, UnicodeDecodeError) as error:
        reason = str(error) if isinstance(error, msgspec.ValidationError) else "it is not UTF-8"
        raise RecordUnreadable(f"The job's record is damaged or of another version: {reason}") from None
    return msgspec.structs.replace(record, **{name: fields[name] for name in _BYTES if name in fields})


def tenant_of(owner: str) -> str:
    """Return the tenant of an owner, which is `tenant/device`."""
    return owner.partition("/")[0]


def user_digest(tenant: str, user: str) -> str:
    """Return the digest of the request's `user` for the job's record; "" if there is none."""
    return hashlib.sha256(f"{tenant}\0{user}".encode()).hexdigest()[:32] if user else ""


def encode_bill(bill: RunBill | None) -> bytes:
    """Return the bill in the form that scripts expect; empty if nothing is billed."""
    return b"" if bill is None else msgspec.json.encode(bill)


class RunBill(msgspec.Struct, frozen=True):
    """Amounts that a run adds to its tenant's usage."""

    tenant: str
    amounts: dict[str, int]  # amounts by field
    release: str  # reservation to give back; "" for none


def job_view(record: JobRecord, result: bytes = b"") -> JobView:
    """Return the API's view of a record. `result` is JSON."""
    return JobView(
        id=record.id,
        status=record.state.value,
        model=record.tier,
        priority=record.priority,
        endpoint=record.endpoint,
        created_at=record.created // 1000,
        started_at=None if record.started is None else record.started // 1000,
        finished_at=None if record.finished is None else record.finished // 1000,
        deadline_at=record.deadline // 1000,
        not_before_at=record.not_before // 1000 if record.not_before and not record.ended else None,
        attempts=record.attempts,
        cache=record.cache or None,
        error=msgspec.Raw(record.error or b"null"),
        result=msgspec.Raw(result or b"null"),
        webhook=record.webhook or None,
        webhook_status=record.webhook_status or None,
    )


class AcceptedJob(msgspec.Struct, frozen=True):
    """Result of `accept`."""

    id: str
    known: bool  # whether it was accepted before, under the same idempotency key


class ExpiredJob(msgspec.Struct, frozen=True):
    """A job whose deadline passed while it was not running."""

    id: str
    owner: str
    tier: str


class ClaimedJobs(msgspec.Struct, frozen=True):
    """Result of `claim`."""

    records: tuple[JobRecord, ...]
    unreadable: tuple[str, ...] = ()  # jobs whose records this version cannot read, which are now dead letters
    expired: tuple[ExpiredJob, ...] = ()
    more: bool = False  # whether more jobs may be queued, so that claiming again is better than waiting


class LeaseStates(msgspec.Struct, frozen=True):
    """Result of `renew_leases`, as job ids."""

    lost: frozenset[str] = frozenset()
    followed: frozenset[str] = frozenset()  # jobs with a valid lease whose events a client follows


class LiveText(msgspec.Struct, frozen=True):
    """The next part of a run's text. Positions are in characters."""

    owner: str
    job: str
    fence: int
    start: int
    text: str

    @property
    def end(self) -> int:
        return self.start + len(self.text)


class DueJobs(msgspec.Struct, frozen=True):
    """Result of `promote_and_expire`."""

    changed: int
    expired: tuple[ExpiredJob, ...] = ()


class DeadLetter(msgspec.Struct, frozen=True):
    """A job that used up its attempts, without its content."""

    id: str
    owner: str
    tier: str
    attempts: int
    code: str  # code of the last error
    died: int  # Unix milliseconds


class QueueDepth(msgspec.Struct, frozen=True):
    """Length of one queue."""

    tier: str
    priority: str
    queued: int  # number of queued jobs, without parked ones
    running: int
    oldest_ms: int  # time at which the oldest queued job was queued, Unix milliseconds; 0 for an empty queue


class QueueDepths(msgspec.Struct, frozen=True):
    """Lengths of all queues."""

    queues: tuple[QueueDepth, ...]
    dead: int
    waiting: int  # jobs that wait for their next attempt
    parked: int  # queued jobs of tenants over a rate or budget
    pending_deliveries: int
    receivers: int  # receivers of webhooks with pending deliveries
    receivers_open: int  # number of these whose breaker is open
    receivers_half_open: int
    now_ms: int  # Unix milliseconds
