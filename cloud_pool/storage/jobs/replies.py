"""What the job store returns."""

from __future__ import annotations

import msgspec

from ..record import JobRecord


class AcceptedJob(msgspec.Struct, frozen=True):
    """Result of `accept`."""

    id: str
    known: bool  # accepted before, under the same idempotency key


class ExpiredJob(msgspec.Struct, frozen=True):
    """A job whose deadline passed while it was not running."""

    id: str
    owner: str
    tier: str


class ClaimedJobs(msgspec.Struct, frozen=True):
    """Result of `claim`."""

    records: tuple[JobRecord, ...]
    unreadable: tuple[str, ...] = ()  # jobs whose records this version cannot read: dead letters now
    expired: tuple[ExpiredJob, ...] = ()
    more: bool = False  # more may be queued: claim again instead of waiting


class LateAnswer(msgspec.Struct, frozen=True):
    """A job whose answer may be revised for `left_s` seconds, with its request."""

    record: JobRecord
    left_s: float


class ClaimedRevisions(msgspec.Struct, frozen=True):
    """Result of `claim_revisions`: what was claimed, and how many were dropped because their time is over, or lost."""

    answers: tuple[LateAnswer, ...] = ()
    too_late: int = 0
    lost: int = 0


class LeaseStates(msgspec.Struct, frozen=True):
    """Result of `renew_leases`: job ids."""

    lost: frozenset[str] = frozenset()
    followed: frozenset[str] = frozenset()  # of those that are not lost, whose events a client follows


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
    code: str  # of the last error
    died: int  # unix ms


class QueueDepth(msgspec.Struct, frozen=True):
    """One queue."""

    tier: str
    priority: str
    queued: int  # without parked ones
    running: int
    oldest_ms: int  # unix, of the oldest queued job; 0: nothing is queued


class QueueDepths(msgspec.Struct, frozen=True):
    """All queues."""

    queues: tuple[QueueDepth, ...]
    dead: int
    waiting: int  # for their next attempt
    parked: int  # queued jobs of tenants over a rate or budget
    pending_deliveries: int
    receivers: int  # of webhooks, with pending deliveries
    receivers_open: int  # of these, whose breaker is open
    receivers_half_open: int
    now_ms: int  # unix
