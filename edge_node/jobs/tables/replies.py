"""When the answers of jobs are sent, for senders that do not fetch them."""

from __future__ import annotations

import sqlite3

from ...box_time import BoxTime
from ..record import EdgeJob
from .bodies import body_of
from .schema import DUE_REPLIES, decode_job
from .values import DueReply, OutboxStats, ReplyTo


class OutboxReplies:
    """The answers that are to be sent."""

    def __init__(self, time: BoxTime, stats: OutboxStats) -> None:
        self._time = time
        self._stats = stats

    def load(self, db: sqlite3.Connection) -> None:
        count = db.execute("SELECT count(*) FROM replies WHERE due IS NOT NULL").fetchone()[0]
        self._stats.replies_due = int(count)

    def add(self, db: sqlite3.Connection, job: EdgeJob, reply: ReplyTo) -> None:
        """The answer of a new job is sent once it has ended."""
        db.execute("INSERT INTO replies VALUES (?, NULL, ?)", (job.seq, reply.address))

    def due(self, db: sqlite3.Connection, limit: int) -> list[DueReply]:
        found = []
        for due, address, record, body in db.execute(DUE_REPLIES, (self._time.now(), limit)):
            job = decode_job(record)
            found.append(DueReply(job, body_of(body or b"", job.result_bytes), bytes(address), due))
        return found

    def sent(self, db: sqlite3.Connection, reply: DueReply, until: float | None) -> None:
        """The answer was sent, or is to be sent at `until`. Nothing changes if it became due anew meanwhile."""
        statement = "UPDATE replies SET due = ? WHERE seq = ? AND due = ?"
        changed = db.execute(statement, (until, reply.job.seq, reply.due)).rowcount
        self._stats.replies_due -= changed if until is None else 0

    def set_due(self, db: sqlite3.Connection, seq: int, due: float | None) -> int:
        """Set when the answer of a job is sent, if it is; None: not now. Returns 1 if that changes whether it is."""
        statement = f"UPDATE replies SET due = ? WHERE seq = ? AND due IS {'NOT ' if due is None else ''}NULL"
        changed = db.execute(statement, (due, seq)).rowcount
        self._stats.replies_due += -changed if due is None else changed
        return changed
