"""The outbox: the jobs of a device in one SQLite file. What returns is committed, and survives a power cut.

Each method is one transaction (`tables`), together with those that wait at the same time (`GroupCommit`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from router.errors import CausewayError
from router.jobs.revisions import LateParts
from router.jobs.states import JobEvent
from router.jobs.view import encode_job_error
from router.types import Modality

from ..clock import BoxTime, Clock
from ..config.schema import OutboxConfig
from ..storage.group_commit import GroupCommit, TableHooks
from . import FILE
from .record import (
    Accepted,
    Claimed,
    DueReply,
    EdgeJob,
    JobAnswer,
    Lane,
    OutboxStats,
    OutboxWebhook,
    ReplyTo,
    WebhookStatus,
)
from .tables.acceptance import OutboxAcceptance
from .tables.callers import OutboxCallers
from .tables.revisions import OutboxRevisions
from .tables.rows import PAGE_BYTES, Cancellation, OutboxRows
from .tables.runs import OutboxRuns
from .tables.schema import SCHEMA


class JobOutbox:
    """The jobs of one device. `start` comes first; times are the box's own, s.

    Args:
        erase_after_s: Least time from a deletion until nothing of it is left in the folder; without other calls it
            takes a second more at most.
    """

    def __init__(self, folder: Path, config: OutboxConfig, clock: Clock, *, erase_after_s: float = 1.0) -> None:
        self.time = BoxTime(clock)
        self._config = config
        self._rows = rows = OutboxRows(self.time)
        self._replies = rows.replies
        self._webhooks = rows.webhooks
        self._revisions = OutboxRevisions(rows)
        self._acceptance = OutboxAcceptance(config, rows)
        self._callers = OutboxCallers(config, rows, self._revisions)
        self._runs = OutboxRuns(config, rows)
        self._file = GroupCommit(
            folder / FILE,
            SCHEMA,
            TableHooks(rows.load, rows.mark, rows.set_unreadable_aside, lambda: rows.bodies.deletions),
            monotonic=clock.monotonic,
            erase_after_s=erase_after_s,
            page_bytes=PAGE_BYTES,
        )

    @property
    def stats(self) -> OutboxStats:
        return self._rows.stats

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong with the file, that it is full, or that it has jobs which cannot be read."""
        found, stats = list(self._file.problems), self.stats
        if stats.unfinished >= self._config.max_jobs or stats.bytes >= self._config.max_bytes:
            found.append(f"the outbox is full ({stats.unfinished} jobs, {stats.bytes} bytes): jobs are refused")
        if stats.unreadable:
            found.append(
                f"the outbox has jobs that cannot be read: {stats.unreadable}, damaged or of a newer version of the "
                "daemon, which runs them after an upgrade; they are kept as long as a dead letter "
                "(jobs.dead_letter_ttl_s)"
            )
        return tuple(found)

    @property
    def name(self) -> str:
        """The file's own name, 12 characters; "" before `open`."""
        return self._rows.name

    def start(self) -> None:
        """Start the thread of the file."""
        self._file.start()

    async def open(self) -> None:
        """Open the file, unless it is open. `time` counts from then on. Raises JobStoreUnavailable."""
        await self._file.run(lambda _: None)

    async def recover(self) -> None:
        """Take back the jobs that ran when the daemon ended; once, before the first claim."""
        await self._file.run(self._runs.recover)

    def close(self) -> None:
        """Commit what waits. Blocks."""
        self._file.close()

    # --- callers -----------------------------------------------------------------------------------------------------

    async def accept(self, job: EdgeJob, body: bytes, reply: ReplyTo | None = None) -> Accepted:
        """Store a job. Raises IdempotencyConflict, OutboxFull or JobStoreUnavailable.

        Args:
            reply: where its answer is sent; None: it is fetched. That of a known job that has ended is sent again.
        """
        return await self._file.run(lambda db: self._acceptance.accept(db, job, body, reply))

    async def known(self, owner: str, key: str) -> EdgeJob | None:
        """Return the job that `owner` submitted under this key; None: there is none."""
        return await self._file.run(lambda db: self._acceptance.known(db, owner, key))

    async def get(self, job_id: str, owner: str | None) -> tuple[EdgeJob, bytes]:
        """Return a job and its result. `owner` None: anybody's. Raises NotFound."""
        return await self._file.run(lambda db: self._callers.get(db, job_id, owner))

    async def list_owned(self, owner: str, after: str, limit: int) -> list[EdgeJob]:
        """Return jobs, newest first. Raises NotFound for an unknown `after`."""
        return await self._file.run(lambda db: self._callers.list_owned(db, owner, after, limit))

    async def cancel(self, job_id: str, owner: str | None) -> EdgeJob:
        """End a job, or what may still revise its answer. Raises NotFound or JobAlreadyEnded."""
        return await self._file.run(lambda db: self._callers.cancel(db, job_id, owner))

    async def retry(self, job_id: str, owner: str | None) -> EdgeJob:
        """Queue a dead letter again, with all attempts and a new deadline. Raises NotFound or JobNotDead."""
        return await self._file.run(lambda db: self._callers.retry(db, job_id, owner))

    async def purge(self, job_id: str, owner: str | None) -> EdgeJob:
        """Delete a job that has ended, with its request and its result. Raises NotFound or JobNotEnded."""
        return await self._file.run(lambda db: self._callers.purge(db, job_id, owner))

    async def due_replies(self, limit: int) -> list[DueReply]:
        """Return the answers that are to be sent now, those that wait longest first."""
        return await self._file.run(lambda db: self._replies.due(db, limit))

    async def replied(self, reply: DueReply, *, again_s: float | None = None) -> None:
        """Note that an answer was sent; or, after a failure, that it is to be sent in `again_s` seconds."""
        until = None if again_s is None else self.time.now() + again_s
        await self._file.run(lambda db: self._replies.sent(db, reply, until))

    # --- what the cloud is told ------------------------------------------------------------------------------------

    async def due_cancellations(self, limit: int) -> list[Cancellation]:
        """Return the cancelled jobs that the cloud is to be told of now."""
        return await self._file.run(lambda db: self._rows.cancellations.due(db, limit))

    async def settle_cancellation(self, one: Cancellation, *, known: bool) -> None:
        """Note the cloud's answer. `known` False: it did not know the job, and is asked once more."""
        cancellations = self._rows.cancellations
        settle = cancellations.done if known else cancellations.unknown
        await self._file.run(lambda db: settle(db, one))

    # --- webhooks ----------------------------------------------------------------------------------------------------

    async def due_webhooks(
        self, limit: int, receivers: Collection[str], in_flight: Collection[int]
    ) -> list[OutboxWebhook]:
        """Return the webhooks that are to be sent now, but for these receivers, and those that are being sent."""
        return await self._file.run(lambda db: self._webhooks.due(db, limit, receivers, in_flight))

    async def postpone_webhook(self, number: int, delay_s: float) -> None:
        """Count an attempt that failed; another follows after `delay_s`."""
        until = self.time.now() + delay_s
        await self._file.run(lambda db: self._webhooks.postpone(db, number, until))

    async def finish_webhook(self, number: int, status: WebhookStatus) -> bool:
        """End a delivery. False: its job was deleted meanwhile."""
        return await self._file.run(lambda db: self._webhooks.finish(db, number, status))

    async def webhook_secrets(self, owner: str, *, rotate: bool = False) -> tuple[str, ...]:
        """Return the valid secrets of an owner, newest first. The first call makes one; `rotate` replaces it."""
        return await self._file.run(lambda db: self._webhooks.secrets(db, owner, rotate=rotate))

    # --- the runner --------------------------------------------------------------------------------------------------

    async def claim(self, lane: Lane, limit: int) -> list[Claimed]:
        """Move the first jobs of a lane that are due to running."""
        return await self._file.run(lambda db: self._runs.claim(db, lane, limit))

    async def unplaced(self, limit: int) -> list[Claimed]:
        """Return the first jobs without a lane."""
        return await self._file.run(lambda db: self._runs.waiting(db, "", limit))

    async def place(self, lanes: Sequence[tuple[EdgeJob, Lane]]) -> None:
        """Set the lanes of jobs that still wait."""
        await self._file.run(lambda db: self._runs.place(db, lanes))

    async def reset_lanes(self) -> None:
        """Let every waiting job be decided anew."""
        await self._file.run(self._runs.reset_lanes)

    async def pin(self, job: EdgeJob, target: str) -> bool:
        """Note that the request may have been sent to this target from now on; False: it is no longer this run's."""
        return await self._file.run(lambda db: self._runs.pin(db, job, target))

    async def succeed(
        self, job: EdgeJob, answer: JobAnswer, late: LateParts | None = None, late_error: CausewayError | None = None
    ) -> bool:
        """End a run with an answer. False: it is not the job's last run, and the answer is dropped.

        Args:
            late: what the answer may be revised for; the request is kept for that.
            late_error: why it is not.
        """
        notes: dict[str, object] = answer.notes | {"late": late}
        if late_error is not None:
            notes["late_error"] = encode_job_error(late_error)
        return await self._file.run(
            lambda db: self._runs.finish(db, job, JobEvent.SUCCEED, notes, result=answer.result)
        )

    async def fail(self, job: EdgeJob, event: JobEvent, error: CausewayError | bytes, *, decision: str = "") -> bool:
        """End a run for good: FAIL, EXHAUST or EXPIRE."""
        body = error if isinstance(error, bytes) else encode_job_error(error)
        notes = {"error": body, "decision": decision, "attempts": job.attempts + 1}
        return await self._file.run(lambda db: self._runs.finish(db, job, event, notes))

    async def postpone(self, job: EdgeJob, until: float, error: CausewayError, *, decision: str) -> bool:
        """End a run that failed: another follows at `until`."""
        notes = {"error": encode_job_error(error), "decision": decision, "attempts": job.attempts + 1, "due": until}
        return await self._file.run(lambda db: self._runs.move(db, job, JobEvent.POSTPONE, notes))

    async def release(self, job: EdgeJob, *, until: float = 0.0, unpin: bool = False, lane: Lane | None = None) -> bool:
        """Give a run back that could not begin, or was stopped: this is no attempt. `lane` None: as it was."""
        notes: dict[str, object] = {"due": max(job.due, until)} | ({"target": ""} if unpin else {})
        notes |= {} if lane is None else {"lane": lane}
        return await self._file.run(lambda db: self._runs.move(db, job, JobEvent.RELEASE, notes))

    async def late(self) -> list[Claimed]:
        """Return the jobs whose answers may still be revised."""
        return await self._file.run(self._revisions.all)

    async def pin_revision(self, job: EdgeJob, target: str) -> bool:
        """As `pin`, for the next revision of an answer."""
        return await self._file.run(lambda db: self._revisions.pin(db, job, target))

    async def revise(self, job: EdgeJob, kinds: Sequence[Modality], answer: JobAnswer) -> EdgeJob | None:
        """Replace the answer of a job by one that was made with late parts of these kinds.

        Returns:
            The job as it is now; None: another revision came before, or none is wanted any more.
        """
        return await self._file.run(lambda db: self._revisions.revise(db, job, kinds, answer.notes, answer.result))

    async def drop_revision(self, job: EdgeJob, error: CausewayError) -> None:
        """Note that no further revision comes, and why; the request is deleted."""
        await self._file.run(lambda db: self._revisions.drop(db, job, error))

    async def expire(self) -> int:
        """End jobs whose deadline passed, and delete those that ended long ago. Returns how many of both."""
        return await self._file.run(self._runs.expire)
