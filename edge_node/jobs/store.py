"""The outbox: the jobs of a device in one SQLite file. Returned results are committed, and survive a power cut.

Each public coroutine of `JobOutbox` is one transaction, together with those that wait at the same time (`GroupCommit`).
It runs in the thread of the file.
"""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from causeway_server.router.errors import CausewayError, DeadlineExceeded, JobAlreadyEnded, RecordUnreadable
from causeway_server.router.jobs.job import JobEvent, JobState, encode_job_error, next_state
from causeway_server.router.serving.at_rest.state_keys import StateKeys

from ..clock import Clock, DeviceTime
from ..config.schema import OutboxConfig
from ..storage.group_commit import GroupCommit, TableHooks
from ..storage.sealed import PAGE_BYTES
from . import FILE
from .acceptance import OutboxAcceptance
from .record import Accepted, Claimed, EdgeJob, JobAnswer, JobLost, JobNotDead, JobNotEnded, Lane, ReplyTo
from .rows import OutboxRows
from .schema import (
    DUE,
    LATE,
    LISTED,
    OF_ALL,
    OLD,
    OLD_BODIES,
    OLD_UNREADABLE,
    OLDEST_EMPTY,
    OWNED,
    RESULT,
    RUNNING,
    SCHEMA,
    UNTOLD,
    WAITING,
    decode_job,
    decoded,
    unreadable_job,
)

READ_BYTES = 16 * 1024 * 1024  # bytes of requests that are read at once; a single one may be larger
_MAX_LOST = 32  # runs that end with the daemon, before the job counts as the cause
_ENDED_AT_ONCE = 500  # maximum number of jobs that one transaction expires or deletes

P = ParamSpec("P")
T = TypeVar("T")


def transaction(
    work: Callable[Concatenate[JobOutbox, sqlite3.Connection, P], T],
) -> Callable[Concatenate[JobOutbox, P], Coroutine[Any, Any, T]]:
    """Turn a method into a coroutine that ends once its work is committed, and may raise JobStoreUnavailable."""

    @functools.wraps(work)
    async def run(self: JobOutbox, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.run(lambda db: work(self, db, *args, **kwargs))

    return run


class JobOutbox:
    """The jobs of one device. Call `start` first; times are the device's own, s. `owner` None stands for all clients.
    `erase_after_s`: minimum time until no copy of deleted content is left; without other calls up to a second more.
    """

    def __init__(
        self,
        folder: Path,
        config: OutboxConfig,
        clock: Clock,
        *,
        erase_after_s: float = 1.0,
        keys: StateKeys | None = None,
    ) -> None:
        self.time = DeviceTime(clock)
        self._config = config
        self._rows = rows = OutboxRows(self.time)
        self.replies, self.cancellations, self.webhooks = rows.replies, rows.cancellations, rows.webhooks
        self.stats = rows.stats
        self._acceptance = OutboxAcceptance(config, rows)
        self._file = GroupCommit(
            folder / FILE,
            SCHEMA,
            TableHooks(rows.load, rows.mark, rows.set_unreadable_aside, lambda: rows.bodies.deletions),
            monotonic=clock.monotonic,
            erase_after_s=erase_after_s,
            page_bytes=PAGE_BYTES,
            keys=keys,
        )

    @property
    def problems(self) -> tuple[str, ...]:
        """Faults of the file, a full outbox, or unreadable jobs."""
        problems, stats = list(self._file.problems), self.stats
        if stats.unfinished >= self._config.max_jobs or stats.bytes >= self._config.max_bytes:
            problems.append(f"The outbox is full ({stats.unfinished} jobs, {stats.bytes} bytes): jobs are refused.")
        if stats.unreadable:
            problems.append(
                f"{stats.unreadable} jobs of the outbox cannot be read: they are damaged, or a newer "
                "version of the daemon wrote them, which runs them after an upgrade. They are kept as "
                "long as dead letters (jobs.dead_letter_ttl_s)."
            )
        return tuple(problems)

    @property
    def name(self) -> str:
        """The file's id, 12 characters; "" before `open`."""
        return self._rows.name

    def start(self) -> None:
        """Start the thread of the file."""
        self._file.start()

    async def run(
        self, work: Callable[Concatenate[sqlite3.Connection, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a method of `replies`, `cancellations` or `webhooks` as a transaction. Raises JobStoreUnavailable."""
        return await self._file.run(lambda db: work(db, *args, **kwargs))

    @transaction
    def open(self, db: sqlite3.Connection) -> None:
        """Open the file, unless it is open. `time` is valid from then on."""

    def close(self) -> None:
        """Commit waiting work. Blocking."""
        self._file.close(timeout_s=10.0)

    # --- callers -----------------------------------------------------------------------------------------------------

    @transaction
    def accept(self, db: sqlite3.Connection, job: EdgeJob, body: bytes, reply: ReplyTo | None = None) -> Accepted:
        """Store a job. Raises IdempotencyConflict or OutboxFull. `reply`: destination of its answer, which is sent
        again for a known job that has ended; None: the client fetches it.
        """
        return self._acceptance.accept(db, job, body, reply)

    @transaction
    def known(self, db: sqlite3.Connection, owner: str, key: str) -> EdgeJob | None:
        """Return the job that `owner` submitted under this key; None if there is none."""
        return self._acceptance.known(db, owner, key)

    @transaction
    def get(self, db: sqlite3.Connection, job_id: str, owner: str | None) -> tuple[EdgeJob, bytes]:
        """Return a job and its result. Raises NotFound."""
        job = self._rows.find(db, job_id, owner)
        row = db.execute(RESULT, (job.seq,)).fetchone()
        return job, b"" if row is None else row[0]

    @transaction
    def list_owned(self, db: sqlite3.Connection, owner: str, after: str, limit: int) -> list[EdgeJob]:
        """Return jobs, newest first. Raises NotFound for an unknown `after`."""
        before = self._rows.find(db, after, owner).seq if after else 1 << 62
        return [decode_job(row[0]) for row in db.execute(LISTED, (owner, before, limit))]

    @transaction
    def cancel(self, db: sqlite3.Connection, job_id: str, owner: str | None) -> EdgeJob:
        """Cancel a job. Raises NotFound or JobAlreadyEnded."""
        job = self._rows.find(db, job_id, owner)
        if job.has_ended:
            raise JobAlreadyEnded(f"The job has already ended: {job.state.value}.")
        return self._rows.end(db, job, JobEvent.CANCEL, {})

    @transaction
    def retry(self, db: sqlite3.Connection, job_id: str, owner: str | None) -> EdgeJob:
        """Queue a dead letter again, with all attempts and a new deadline. Raises NotFound or JobNotDead."""
        job = self._rows.find(db, job_id, owner)
        if job.state is not JobState.DEAD:
            raise JobNotDead(f"Only a dead letter can be retried; this job is {job.state.value}.")
        if not job.body_bytes:
            raise JobNotDead(
                "The time of this dead letter has passed, and its request is deleted. Submit the request again."
            )
        now = self.time.now()
        job = msgspec.structs.replace(
            job,
            state=next_state(job.state, JobEvent.REVIVE),
            lane="",
            target="",
            due=now,
            deadline=now + self._config.default_deadline_s,
            ended=None,
            ended_unix=None,
            attempts=0,
            revived=job.revived + 1,
            lost=0,
            error=b"",
            webhook_status="",
        )
        self._rows.add_bytes(job, -job.body_bytes)
        self._rows.count(job, 1)
        self._rows.save(db, job)
        self._rows.replies.set_due(db, job.seq, None)
        db.execute("UPDATE jobs SET deadline = ? WHERE seq = ?", (job.deadline, job.seq))
        return job

    @transaction
    def purge(self, db: sqlite3.Connection, job_id: str, owner: str | None) -> EdgeJob:
        """Delete a job that has ended, with its request and its result. Raises NotFound or JobNotEnded."""
        try:
            job = self._rows.find(db, job_id, owner)
        except RecordUnreadable as error:
            job = unreadable_job(self._rows.seq_of(job_id), job_id, error)
            self._rows.delete_unreadable(db, job.seq)
            return job
        if not job.has_ended:
            raise JobNotEnded(f"The job is {job.state.value}, so it cannot be purged. Cancel the job first.")
        self._rows.delete(db, job)
        return job

    @transaction
    def erase(self, db: sqlite3.Connection, owner: str) -> tuple[list[EdgeJob], int]:
        """Delete all jobs and webhook secrets of an owner ("": of all). Return the jobs, and the number of secrets."""
        jobs = []
        for seq, record in db.execute(OWNED if owner else OF_ALL, (owner,)).fetchall():
            if (job := decoded(decode_job, record)) is None:
                self._rows.delete_unreadable(db, seq)
                job = unreadable_job(seq, "", RecordUnreadable("The job cannot be read."))
            else:
                self._rows.delete(db, job if job.has_ended else self._rows.end(db, job, JobEvent.CANCEL, {}))
            jobs.append(job)
        secrets = db.execute("DELETE FROM webhook_secrets WHERE keyed(?) IN ('', owner)", (owner,)).rowcount
        self._rows.bodies.deletions += len(jobs) + secrets
        return jobs, secrets

    # --- the runner --------------------------------------------------------------------------------------------------

    @transaction
    def recover(self, db: sqlite3.Connection) -> None:
        """Take back the jobs that ran when the daemon ended, before any claim. One lost too often is a dead letter."""
        for (record,) in db.execute(RUNNING).fetchall():
            job = decode_job(record)
            job = msgspec.structs.replace(job, lost=job.lost + 1)
            if job.lost >= _MAX_LOST:
                error = JobLost(f"The daemon ended during {job.lost} runs of this job.")
                self._rows.end(db, job, JobEvent.EXHAUST, {"error": encode_job_error(error)})
            else:
                self._rows.save(db, msgspec.structs.replace(job, state=next_state(job.state, JobEvent.RELEASE)))

    @transaction
    def claim(self, db: sqlite3.Connection, lane: Lane, limit: int) -> list[Claimed]:
        """Set the first due jobs of a lane to the state running, and return them."""
        claimed = []
        for waiting in self._waiting(db, lane, limit):
            job = waiting.job
            state = next_state(job.state, JobEvent.PROMOTE) if job.state is JobState.WAITING else job.state
            job = msgspec.structs.replace(
                job, state=next_state(state, JobEvent.CLAIM), lane=lane, run=job.run + 1, started_unix=self.time.unix()
            )
            self._rows.save(db, job)
            claimed.append(Claimed(job, waiting.body))
        return claimed

    @transaction
    def unplaced(self, db: sqlite3.Connection, limit: int) -> list[Claimed]:
        """Return the first jobs without a lane."""
        return self._waiting(db, "", limit)

    def _waiting(self, db: sqlite3.Connection, lane: Lane, limit: int) -> list[Claimed]:
        waiting: list[Claimed] = []
        left_bytes = READ_BYTES
        for record, body in db.execute(DUE, (lane, self.time.now(), limit)):
            job = decode_job(record)
            waiting.append(Claimed(job, body))
            left_bytes -= job.body_bytes
            if left_bytes <= 0:  # requests with images are large
                break
        return waiting

    @transaction
    def place(self, db: sqlite3.Connection, lanes: Sequence[tuple[EdgeJob, Lane]]) -> None:
        """Set the lanes of jobs that are still waiting."""
        statement = f"UPDATE jobs SET lane = ? WHERE seq = ? AND {WAITING}"
        db.executemany(statement, [(lane, job.seq) for job, lane in lanes])

    @transaction
    def reset_lanes(self, db: sqlite3.Connection) -> None:
        """Clear the lanes of all waiting jobs, so that they are decided again."""
        db.execute(f"UPDATE jobs SET lane = '' WHERE {WAITING} AND lane != ''")

    @transaction
    def pin(self, db: sqlite3.Connection, job: EdgeJob, target: str) -> bool:
        """Record that the request may have been sent to this target; return False if the run no longer owns the job."""
        current = self._current_run(db, job)
        if current is not None and current.target != target:
            self._rows.save(db, msgspec.structs.replace(current, target=target))
        return current is not None

    @transaction
    def succeed(self, db: sqlite3.Connection, job: EdgeJob, answer: JobAnswer) -> bool:
        """End a run with an answer. Return False if it is not the job's last run, and drop the answer."""
        notes = {"cache": answer.cache, "route": answer.route, "decision": answer.decision}
        return self._finish(db, job, JobEvent.SUCCEED, notes, answer.result)

    @transaction
    def fail(
        self, db: sqlite3.Connection, job: EdgeJob, event: JobEvent, error: CausewayError | bytes, *, decision: str = ""
    ) -> bool:
        """End a run permanently: FAIL, EXHAUST or EXPIRE."""
        body = error if isinstance(error, bytes) else encode_job_error(error)
        return self._finish(db, job, event, {"error": body, "decision": decision, "attempts": job.attempts + 1})

    def _finish(
        self, db: sqlite3.Connection, job: EdgeJob, event: JobEvent, notes: Mapping[str, object], result: bytes = b""
    ) -> bool:
        current = self._current_run(db, job)
        if current is not None:
            self._rows.end(db, current, event, notes, result=result)
        return current is not None

    @transaction
    def postpone(
        self, db: sqlite3.Connection, job: EdgeJob, until: float, error: CausewayError, *, decision: str
    ) -> bool:
        """End a failed run: another follows at `until`."""
        notes = {"error": encode_job_error(error), "decision": decision, "attempts": job.attempts + 1, "due": until}
        return self._move(db, job, JobEvent.POSTPONE, notes)

    @transaction
    def release(
        self, db: sqlite3.Connection, job: EdgeJob, *, until: float = 0.0, unpin: bool = False, lane: Lane | None = None
    ) -> bool:
        """Return a job to the queue if its run could not begin, or was stopped; no attempt is counted."""
        notes: dict[str, object] = {"due": max(job.due, until)} | ({"target": ""} if unpin else {})
        return self._move(db, job, JobEvent.RELEASE, notes | ({} if lane is None else {"lane": lane}))

    def _move(self, db: sqlite3.Connection, job: EdgeJob, event: JobEvent, notes: Mapping[str, object]) -> bool:
        current = self._current_run(db, job)
        if current is not None:
            self._rows.save(db, msgspec.structs.replace(current, state=next_state(current.state, event), **notes))
        return current is not None

    def _current_run(self, db: sqlite3.Connection, job: EdgeJob) -> EdgeJob | None:
        """Return the job as stored, if `job` is its last run and still running."""
        current = self._rows.stored(db, job.seq)
        is_last = current is not None and current.run == job.run and current.state is JobState.RUNNING
        return current if is_last else None

    @transaction
    def expire(self, db: sqlite3.Connection) -> int:
        """End jobs whose deadline has passed, and delete those that ended long ago. Return the sum of both."""
        now, config = self.time.now(), self._config
        late = _found(db, LATE, now, _ENDED_AT_ONCE)
        error = encode_job_error(DeadlineExceeded("The job's deadline passed before it was answered."))
        for job in late:
            self._rows.end(db, job, JobEvent.EXPIRE, {"error": error})
        deleted = 0
        for dead, ttl_s in enumerate((config.result_ttl_s, config.dead_letter_ttl_s)):
            deleted += self._delete(db, OLD, dead, now - ttl_s, _ENDED_AT_ONCE)
            for job in _found(db, OLD_BODIES, dead, now - ttl_s, _ENDED_AT_ONCE):  # one of its webhooks waits
                self._rows.empty(db, job)
            for job in _found(db, UNTOLD, dead, now - config.webhooks.max_age_s, _ENDED_AT_ONCE):
                self._rows.webhooks.give_up(db, job)
        if (surplus := self.stats.empty - config.max_jobs) > 0:
            deleted += self._delete(db, OLDEST_EMPTY, min(surplus, _ENDED_AT_ONCE))
        if self.stats.unreadable:
            old = db.execute(OLD_UNREADABLE, (False, now - config.dead_letter_ttl_s, _ENDED_AT_ONCE)).fetchall()
            for (seq,) in old:
                self._rows.delete_unreadable(db, seq)
            deleted += len(old)
        return len(late) + deleted

    def _delete(self, db: sqlite3.Connection, query: str, *arguments: float) -> int:
        jobs = _found(db, query, *arguments)
        for job in jobs:
            self._rows.delete(db, job)
        return len(jobs)


def _found(db: sqlite3.Connection, query: str, *arguments: float) -> list[EdgeJob]:
    return [decode_job(row[0]) for row in db.execute(query, arguments).fetchall()]
