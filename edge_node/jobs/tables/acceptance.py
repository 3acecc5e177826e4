"""Room for a new job. Bounds are of jobs that have not ended, and of the bytes of requests and results:

1. A job that is not bulk takes the place of the oldest waiting bulk jobs, if there is no other room.
2. A bulk job takes that of older bulk jobs, and all of them have a share; the rest is reserved.
3. A job for which there is no room even so is refused.
"""

from __future__ import annotations

import heapq
import sqlite3
from operator import itemgetter
from typing import get_args

from router.errors import IdempotencyConflict
from router.jobs.states import JobEvent
from router.jobs.submission import is_same_request
from router.jobs.view import encode_job_error

from ...config.schema import JobsConfig
from ..errors import JobDropped, OutboxFull
from ..record import EdgeJob, Lane
from .rows import OutboxRows
from .schema import BY_KEY, FREE_KEY, OLDEST_BULK, decode_job
from .unreadable import read_row
from .values import Accepted, ReplyTo


class OutboxAcceptance:
    """Accepts jobs within the bounds."""

    def __init__(self, config: JobsConfig, rows: OutboxRows) -> None:
        self._config = config
        self._rows = rows

    def known(self, db: sqlite3.Connection, owner: str, key: str) -> EdgeJob | None:
        row = db.execute(BY_KEY, (owner, key)).fetchone() if key else None
        return None if row is None else read_row(*row)

    def accept(self, db: sqlite3.Connection, job: EdgeJob, body: bytes, reply: ReplyTo | None = None) -> Accepted:
        rows = self._rows
        row = db.execute(BY_KEY, (job.owner, job.key)).fetchone() if job.key else None
        renewed = row is not None and reply is not None and reply.is_new
        if row is not None and not renewed:
            known = read_row(*row)
            if not is_same_request(known.digest, job.digest):
                raise IdempotencyConflict(
                    f"this `Idempotency-Key` was used with another body or other headers, for {known.id}; "
                    "send those again, or a new key"
                )
            if reply is not None and known.has_ended:  # its sender has lost the answer
                rows.replies.set_due(db, known.seq, rows.time.now())
            return Accepted(known, known=True)
        self._make_room(db, job, len(body))
        if renewed:
            db.execute(FREE_KEY, (job.owner, job.key))
        job = rows.add(db, job, body)
        if reply is not None:
            rows.replies.add(db, job, reply)
        rows.stats.accepted += 1
        return Accepted(job)

    def _make_room(self, db: sqlite3.Connection, job: EdgeJob, body_bytes: int) -> None:
        """(1) to (3). Decide first: OutboxFull is raised before anything is dropped."""
        config, stats, is_bulk = self._config, self._rows.stats, job.priority == "bulk"
        share = config.bulk_share if is_bulk else 1.0
        jobs = (stats.bulk if is_bulk else stats.unfinished) + 1 - int(config.max_jobs * share)
        size = (stats.bulk_bytes if is_bulk else stats.bytes) + body_bytes - int(config.max_bytes * share)
        if is_bulk:
            jobs = max(jobs, stats.unfinished + 1 - config.max_jobs)
            size = max(size, stats.bytes + body_bytes - config.max_bytes)
        victims: list[EdgeJob] = []
        if jobs > 0 or size > 0:
            by_lane = [db.execute(OLDEST_BULK, (lane,)) for lane in get_args(Lane)]
            for _, record in heapq.merge(*by_lane, key=itemgetter(0)):
                victims.append(decode_job(record))
                jobs, size = jobs - 1, size - victims[-1].body_bytes
                if jobs <= 0 and size <= 0:
                    break
        if jobs > 0 or size > 0:
            raise OutboxFull(
                f"the outbox holds {stats.unfinished} jobs and {stats.bytes} bytes, and no waiting bulk job gives way; "
                "raise jobs.max_jobs or jobs.max_bytes, or wait",
                retry_after_s=30.0,
            )
        dropped = JobDropped("the outbox was full, and a newer job took the place of the oldest bulk jobs")
        for victim in victims:
            self._rows.end(db, victim, JobEvent.CANCEL, {"error": encode_job_error(dropped)})
            stats.dropped += 1
