"""What the runner claims and reports, and what time ends."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence

import msgspec

from router.errors import DeadlineExceeded
from router.jobs.states import JobEvent, JobState, next_state
from router.jobs.view import encode_job_error

from ...config.schema import OutboxConfig
from ..record import Claimed, EdgeJob, JobLost, Lane
from .rows import OutboxRows, body_of
from .schema import DUE, LATE, OLD, OLD_BODIES, OLD_UNREADABLE, OLDEST_EMPTY, UNTOLD, WAITING, decode_job

READ_BYTES = 16 * 1024 * 1024  # of requests that are read at once; one may be larger
_MOST_LOST = 32  # runs that end with the daemon, before the job is taken for the cause
_ENDED_AT_ONCE = 500  # jobs that one transaction expires or deletes


class OutboxRuns:
    """Claims jobs for runs, and takes their reports."""

    def __init__(self, config: OutboxConfig, rows: OutboxRows) -> None:
        self._config = config
        self._rows = rows

    def claim(self, db: sqlite3.Connection, lane: Lane, limit: int) -> list[Claimed]:
        claimed = []
        for waiting in self.waiting(db, lane, limit):
            job = waiting.job
            state = next_state(job.state, JobEvent.PROMOTE) if job.state is JobState.WAITING else job.state
            job = msgspec.structs.replace(
                job,
                state=next_state(state, JobEvent.CLAIM),
                lane=lane,
                run=job.run + 1,
                started_unix=self._rows.time.unix(),
            )
            self._rows.save(db, job)
            claimed.append(Claimed(job, waiting.body))
        return claimed

    def waiting(self, db: sqlite3.Connection, lane: Lane, limit: int) -> list[Claimed]:
        found: list[Claimed] = []
        left_bytes = READ_BYTES
        for record, body in db.execute(DUE, (lane, self._rows.time.now(), limit)):
            job = decode_job(record)
            found.append(Claimed(job, body_of(body, job.body_bytes)))
            left_bytes -= job.body_bytes
            if left_bytes <= 0:  # requests with pictures are large
                break
        return found

    def place(self, db: sqlite3.Connection, lanes: Sequence[tuple[EdgeJob, Lane]]) -> None:
        statement = f"UPDATE jobs SET lane = ? WHERE seq = ? AND {WAITING}"
        db.executemany(statement, [(lane, job.seq) for job, lane in lanes])

    def reset_lanes(self, db: sqlite3.Connection) -> None:
        db.execute(f"UPDATE jobs SET lane = '' WHERE {WAITING} AND lane != ''")

    def pin(self, db: sqlite3.Connection, job: EdgeJob, target: str) -> bool:
        current = self._current(db, job)
        if current is not None and current.target != target:
            self._rows.save(db, msgspec.structs.replace(current, target=target))
        return current is not None

    def move(self, db: sqlite3.Connection, job: EdgeJob, event: JobEvent, notes: Mapping[str, object]) -> bool:
        current = self._current(db, job)
        if current is None:
            return False
        self._rows.save(db, msgspec.structs.replace(current, state=next_state(current.state, event), **notes))
        return True

    def finish(
        self, db: sqlite3.Connection, job: EdgeJob, event: JobEvent, notes: Mapping[str, object], result: bytes = b""
    ) -> bool:
        current = self._current(db, job)
        if current is None:
            return False
        self._rows.end(db, current, event, notes, result=result)
        return True

    def _current(self, db: sqlite3.Connection, job: EdgeJob) -> EdgeJob | None:
        """The job as stored, if `job` is its last run and still running."""
        current = self._rows.stored(db, job.seq)
        is_last = current is not None and current.run == job.run and current.state is JobState.RUNNING
        return current if is_last else None

    def expire(self, db: sqlite3.Connection) -> int:
        now, config = self._rows.time.now(), self._config
        late = db.execute(LATE, (now, _ENDED_AT_ONCE)).fetchall()
        error = encode_job_error(DeadlineExceeded("the job's deadline passed before it was answered"))
        for row in late:
            self._rows.end(db, decode_job(row[0]), JobEvent.EXPIRE, {"error": error})
        deleted = 0
        for dead, ttl_s in enumerate((config.result_ttl_s, config.dead_letter_ttl_s)):
            deleted += self._delete(db, OLD, dead, now - ttl_s, _ENDED_AT_ONCE)
            for job in self._found(db, OLD_BODIES, dead, now - ttl_s, _ENDED_AT_ONCE):  # a webhook of it waits
                self._rows.empty(db, job)
            for job in self._found(db, UNTOLD, dead, now - config.webhooks.max_age_s, _ENDED_AT_ONCE):
                self._rows.webhooks.give_up(db, job)
        if (surplus := self._rows.stats.empty - config.max_jobs) > 0:
            deleted += self._delete(db, OLDEST_EMPTY, min(surplus, _ENDED_AT_ONCE))
        if self._rows.stats.unreadable:
            old = db.execute(OLD_UNREADABLE, (False, now - config.dead_letter_ttl_s, _ENDED_AT_ONCE)).fetchall()
            for (seq,) in old:
                self._rows.delete_unreadable(db, seq)
            deleted += len(old)
        return len(late) + deleted

    def _delete(self, db: sqlite3.Connection, query: str, *arguments: float) -> int:
        found = self._found(db, query, *arguments)
        for job in found:
            self._rows.delete(db, job)
        return len(found)

    def _found(self, db: sqlite3.Connection, query: str, *arguments: float) -> list[EdgeJob]:
        return [decode_job(row[0]) for row in db.execute(query, arguments).fetchall()]

    def recover(self, db: sqlite3.Connection) -> None:
        """Take back the jobs that ran when the daemon ended; one that was lost too often is a dead letter."""
        for (record,) in db.execute("SELECT record FROM jobs WHERE state = 'running'").fetchall():
            job = decode_job(record)
            job = msgspec.structs.replace(job, lost=job.lost + 1)
            if job.lost >= _MOST_LOST:
                error = JobLost(f"the daemon ended during {job.lost} runs of this job")
                self._rows.end(db, job, JobEvent.EXHAUST, {"error": encode_job_error(error)})
            else:
                self._rows.save(db, msgspec.structs.replace(job, state=next_state(job.state, JobEvent.RELEASE)))
