"""What may still revise the answer of a job that has succeeded: its request is kept as long."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence

import msgspec

from router.errors import CausewayError
from router.jobs.revisions import LateParts, outcome_of
from router.jobs.states import JobEvent, next_state
from router.jobs.view import encode_job_error
from router.types import Modality

from ..record import Claimed, EdgeJob
from .rows import OutboxRows, body_of
from .schema import REVISABLE, decode_job, stored_bytes


class OutboxRevisions:
    """The answers that may be revised."""

    def __init__(self, rows: OutboxRows) -> None:
        self._rows = rows

    def all(self, db: sqlite3.Connection) -> list[Claimed]:
        found = [(decode_job(record), body) for record, body in db.execute(REVISABLE)]
        return [Claimed(job, body_of(body, job.body_bytes)) for job, body in found]

    def pin(self, db: sqlite3.Connection, job: EdgeJob, target: str) -> bool:
        current = self._current(db, job)
        if current is None or current.late is None:
            return False
        if current.late.target != target:
            late = msgspec.structs.replace(current.late, target=target)
            self._rows.save(db, msgspec.structs.replace(current, late=late))
        return True

    def revise(
        self,
        db: sqlite3.Connection,
        job: EdgeJob,
        kinds: Sequence[Modality],
        notes: Mapping[str, object],
        result: bytes,
    ) -> EdgeJob | None:
        current = self._current(db, job)
        if current is None or current.late is None or not set(kinds) <= set(current.late.kinds):
            return None
        left = tuple(kind for kind in current.late.kinds if kind not in kinds)
        revised = msgspec.structs.replace(
            current,
            state=next_state(current.state, JobEvent.REVISE),
            revision=current.revision + 1,
            late=LateParts(left, current.late.until) if left else None,
            body_bytes=current.body_bytes if left else 0,
            result_bytes=len(result),
            webhook_status="pending" if current.webhook else "",
            **notes,
        )
        self._rows.bodies.delete(db, "results", job.seq)
        self._rows.bodies.put(db, "results", job.seq, result)
        self._keep(db, current, revised)
        self._rows.replies.set_due(db, revised.seq, self._rows.time.now())
        if revised.webhook:
            self._rows.webhooks.add(db, revised, "revised")
        self._rows.stats.count_revision("made")
        return revised

    def drop(self, db: sqlite3.Connection, job: EdgeJob, error: CausewayError) -> None:
        current = self._current(db, job)
        if current is not None:
            self.drop_stored(db, current, error)

    def drop_stored(self, db: sqlite3.Connection, job: EdgeJob, error: CausewayError) -> EdgeJob:
        """As `drop`, for a job as it is stored."""
        dropped = msgspec.structs.replace(
            job,
            late=None,
            body_bytes=0,
            late_error=encode_job_error(error),
            webhook_status="pending" if job.webhook else "",
        )
        self._keep(db, job, dropped)
        if dropped.webhook:
            self._rows.webhooks.add(db, dropped, "not_revised")
        self._rows.stats.count_revision(outcome_of(error))
        return dropped

    def _keep(self, db: sqlite3.Connection, before: EdgeJob, after: EdgeJob) -> None:
        if after.late is None:
            self._rows.bodies.delete(db, "requests", after.seq)
        self._rows.add_bytes(after, stored_bytes(after) - stored_bytes(before))
        self._rows.save(db, after)

    def _current(self, db: sqlite3.Connection, job: EdgeJob) -> EdgeJob | None:
        """The job as stored, if `job` is its last revision and another one is wanted."""
        current = self._rows.stored(db, job.seq)
        if current is None or current.late is None or (current.id, current.revision) != (job.id, job.revision):
            return None
        return current
