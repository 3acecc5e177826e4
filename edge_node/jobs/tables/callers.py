"""What the owner of a job and operators ask for."""

from __future__ import annotations

import sqlite3

import msgspec

from router.errors import JobAlreadyEnded, JobCancelled, RecordUnreadable
from router.jobs.revisions import revision_id
from router.jobs.states import JobEvent, JobState, next_state

from ...config.schema import OutboxConfig
from ..record import EdgeJob, JobNotDead, JobNotEnded
from .revisions import OutboxRevisions
from .rows import OutboxRows, body_of
from .schema import LISTED, decode_job, unreadable_job


class OutboxCallers:
    """Shows, cancels, retries and purges jobs. `owner` None: anybody's."""

    def __init__(self, config: OutboxConfig, rows: OutboxRows, revisions: OutboxRevisions) -> None:
        self._config = config
        self._rows = rows
        self._revisions = revisions

    def get(self, db: sqlite3.Connection, job_id: str, owner: str | None) -> tuple[EdgeJob, bytes]:
        job = self._rows.find(db, job_id, owner)
        row = db.execute("SELECT body FROM results WHERE seq = ?", (job.seq,)).fetchone()
        return job, b"" if row is None else body_of(row[0], job.result_bytes)

    def list_owned(self, db: sqlite3.Connection, owner: str, after: str, limit: int) -> list[EdgeJob]:
        before = self._rows.find(db, after, owner).seq if after else 1 << 62
        return [decode_job(row[0]) for row in db.execute(LISTED, (owner, before, limit))]

    def cancel(self, db: sqlite3.Connection, job_id: str, owner: str | None) -> EdgeJob:
        job = self._rows.find(db, job_id, owner)
        if job.late is not None:
            if job.late.target:
                self._rows.cancellations.add(db, revision_id(job.cloud_key, job.revision + 1), job.deadline)
            error = JobCancelled("the job was cancelled before the part was read")
            return self._revisions.drop_stored(db, job, error)
        if job.has_ended:
            raise JobAlreadyEnded(f"the job has ended: {job.state.value}")
        return self._rows.end(db, job, JobEvent.CANCEL, {})

    def retry(self, db: sqlite3.Connection, job_id: str, owner: str | None) -> EdgeJob:
        job = self._rows.find(db, job_id, owner)
        if job.state is not JobState.DEAD:
            raise JobNotDead(f"only a dead letter can be retried; this job is {job.state.value}")
        if not job.body_bytes:
            raise JobNotDead("the time of this dead letter has passed and its request is deleted: submit it again")
        now = self._rows.time.now()
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

    def purge(self, db: sqlite3.Connection, job_id: str, owner: str | None) -> EdgeJob:
        try:
            job = self._rows.find(db, job_id, owner)
        except RecordUnreadable as error:
            job = unreadable_job(self._rows.seq_of(job_id), job_id, error)
            self._rows.delete_unreadable(db, job.seq)
            return job
        if not job.has_ended:
            raise JobNotEnded(f"the job is {job.state.value}; cancel it first")
        self._rows.delete(db, job)
        return job
