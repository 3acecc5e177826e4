"""What the transactions of the outbox take and return."""

from __future__ import annotations

import msgspec

from router.jobs.revisions import RevisionOutcome
from router.serving.webhooks import DueWebhook

from ..record import EdgeJob


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
    """A job that has ended, whose answer is to be sent. `due`: the box's own time, s."""

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
    unreadable: int = 0  # jobs that are set aside, see `unreadable`
    accepted: int = 0
    dropped: int = 0
    ended: dict[str, int] = {}  # by state
    revisions: dict[RevisionOutcome, int] = {}  # of answers, made or not
    replies_due: int = 0  # answers that are to be sent
    replies_lost: int = 0  # answers that were deleted before they could be sent

    cancellations_due: int = 0  # that the cloud is to be told of
    webhooks_due: int = 0  # webhooks that are to be sent
    webhooks: dict[str, int] = {}  # that were sent, or are not any more

    def count_webhook(self, outcome: str, count: int = 1) -> None:
        self.webhooks[outcome] = self.webhooks.get(outcome, 0) + count

    def count_revision(self, outcome: RevisionOutcome) -> None:
        self.revisions[outcome] = self.revisions.get(outcome, 0) + 1
