"""The outbox: the jobs of a device in one SQLite file. What returns is committed, and survives a power cut.

Each method is one transaction (`tables`), together with those that wait at the same time (`GroupCommit`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from router.errors import CausewayError
from router.jobs.states import JobEvent
from router.jobs.view import encode_job_error

from ..clock import Clock
from ..config.schema import JobsConfig
from ..storage.group_commit import GroupCommit
from .box_time import BoxTime
from .entry import FILE
from .record import EdgeJob, Lane
from .tables import SCHEMA, Accepted, Claimed, DueReply, OutboxStats, OutboxTables, ReplyTo


class JobStore:
    """The jobs of one device. `start` comes first; times are the box's own, s."""

    def __init__(self, folder: Path, config: JobsConfig, clock: Clock) -> None:
        self.time = BoxTime(clock)
        self._config = config
        self._tables = OutboxTables(config, self.time)
        tables = self._tables
        self._file = GroupCommit(folder / FILE, SCHEMA, load=tables.load, seal=tables.mark, monotonic=clock.monotonic)

    @property
    def stats(self) -> OutboxStats:
        return self._tables.stats

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong with the file, or that it is full."""
        if self.stats.unfinished < self._config.max_jobs and self.stats.bytes < self._config.max_bytes:
            return self._file.problems
        full = f"the outbox is full ({self.stats.unfinished} jobs, {self.stats.bytes} bytes): jobs are refused"
        return (*self._file.problems, full)

    @property
    def name(self) -> str:
        """The file's own name, 12 characters; "" before `open`."""
        return self._tables.name

    @property
    def available(self) -> bool:
        return self._file.available

    def start(self) -> None:
        """Start the thread of the file."""
        self._file.start()

    async def open(self) -> None:
        """Open the file, unless it is open. `time` counts from then on. Raises JobStoreUnavailable."""
        await self._file.run(lambda _: None)

    async def recover(self) -> None:
        """Take back the jobs that ran when the daemon ended; once, before the first claim."""
        await self._file.run(self._tables.recover)

    def close(self) -> None:
        """Commit what waits. Blocks."""
        self._file.close()

    # --- callers -----------------------------------------------------------------------------------------------------

    async def accept(self, job: EdgeJob, body: bytes, reply: ReplyTo | None = None) -> Accepted:
        """Store a job. Raises IdempotencyConflict, OutboxFull or JobStoreUnavailable.

        Args:
            reply: where its answer is sent; None: it is fetched. That of a known job that has ended is sent again.
        """
        return await self._file.run(lambda db: self._tables.accept(db, job, body, reply))

    async def get(self, job_id: str, owner: str | None) -> tuple[EdgeJob, bytes]:
        """Return a job and its result. `owner` None: anybody's. Raises NotFound."""
        return await self._file.run(lambda db: self._tables.get(db, job_id, owner))

    async def list_owned(self, owner: str | None, after: str, limit: int) -> list[EdgeJob]:
        """Return jobs, newest first. Raises NotFound for an unknown `after`."""
        return await self._file.run(lambda db: self._tables.list_owned(db, owner, after, limit))

    async def cancel(self, job_id: str, owner: str | None) -> EdgeJob:
        """Raises NotFound or JobAlreadyEnded."""
        return await self._file.run(lambda db: self._tables.cancel(db, job_id, owner))

    async def retry(self, job_id: str, owner: str | None) -> EdgeJob:
        """Queue a dead letter again, with all attempts and a new deadline. Raises NotFound or JobNotDead."""
        return await self._file.run(lambda db: self._tables.retry(db, job_id, owner))

    async def purge(self, job_id: str, owner: str | None) -> EdgeJob:
        """Delete a job that has ended, with its request and its result. Raises NotFound or JobNotEnded."""
        return await self._file.run(lambda db: self._tables.purge(db, job_id, owner))

    async def due_replies(self, limit: int) -> list[DueReply]:
        """Return the answers that are to be sent now, those that wait longest first."""
        return await self._file.run(lambda db: self._tables.due_replies(db, limit))

    async def replied(self, reply: DueReply, *, again_s: float | None = None) -> None:
        """Note that an answer was sent; or, after a failure, that it is to be sent in `again_s` seconds."""
        until = None if again_s is None else self.time.now() + again_s
        await self._file.run(lambda db: self._tables.replied(db, reply, until))

    # --- the runner --------------------------------------------------------------------------------------------------

    async def claim(self, lane: Lane, limit: int) -> list[Claimed]:
        """Move the first jobs of a lane that are due to running."""
        return await self._file.run(lambda db: self._tables.claim(db, lane, limit))

    async def unplaced(self, limit: int) -> list[Claimed]:
        """Return the first jobs without a lane."""
        return await self._file.run(lambda db: self._tables.waiting(db, "", limit))

    async def place(self, lanes: Sequence[tuple[EdgeJob, Lane]]) -> None:
        """Set the lanes of jobs that still wait."""
        await self._file.run(lambda db: self._tables.place(db, lanes))

    async def reset_lanes(self) -> None:
        """Let every waiting job be decided anew."""
        await self._file.run(self._tables.reset_lanes)

    async def pin(self, job: EdgeJob, target: str) -> bool:
        """Note that the request may have been sent to this target from now on; False: it is no longer this run's."""
        return await self._file.run(lambda db: self._tables.note_target(db, job, target))

    async def succeed(self, job: EdgeJob, result: bytes, *, cache: str, route: str, decision: str) -> bool:
        """End a run with an answer. False: it is not the job's last run, and the answer is dropped."""
        notes = {"cache": cache, "route": route, "decision": decision}
        return await self._file.run(lambda db: self._tables.finish(db, job, JobEvent.SUCCEED, notes, result=result))

    async def fail(self, job: EdgeJob, event: JobEvent, error: CausewayError | bytes, *, decision: str = "") -> bool:
        """End a run for good: FAIL, EXHAUST or EXPIRE."""
        body = error if isinstance(error, bytes) else encode_job_error(error)
        notes = {"error": body, "decision": decision, "attempts": job.attempts + 1}
        return await self._file.run(lambda db: self._tables.finish(db, job, event, notes))

    async def postpone(self, job: EdgeJob, until: float, error: CausewayError, *, decision: str) -> bool:
        """End a run that failed: another follows at `until`."""
        notes = {"error": encode_job_error(error), "decision": decision, "attempts": job.attempts + 1, "due": until}
        return await self._file.run(lambda db: self._tables.move(db, job, JobEvent.POSTPONE, notes))

    async def release(self, job: EdgeJob, *, until: float = 0.0, unpin: bool = False, lane: Lane | None = None) -> bool:
        """Give a run back that could not begin, or was stopped: this is no attempt. `lane` None: as it was."""
        notes: dict[str, object] = {"due": max(job.due, until)} | ({"target": ""} if unpin else {})
        notes |= {} if lane is None else {"lane": lane}
        return await self._file.run(lambda db: self._tables.move(db, job, JobEvent.RELEASE, notes))

    async def expire(self) -> int:
        """End jobs whose deadline passed, and delete those that ended long ago. Returns how many of both."""
        return await self._file.run(self._tables.expire)
