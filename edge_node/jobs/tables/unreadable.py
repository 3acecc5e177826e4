"""Rows that this version cannot read: damaged, or written by a newer version before a downgrade.

1. A job's row gets the state `unreadable` in its column alone; record, request and result stay. No query but those here
   finds it, and its Idempotency-Key stays taken.
2. Each time the file is opened they are read again: after an upgrade they are what they were.
3. Such a row is kept as long as a dead letter, or until its owner purges it.
4. A webhook's notice that cannot be read counts as a delivery that failed.
"""

from __future__ import annotations

import logging
import sqlite3

import msgspec

from router.errors import RecordUnreadable
from router.jobs.states import JobState
from router.jobs.view import encode_job_error

from ...box_time import ClockMark
from ..record import EdgeJob
from .schema import UNREADABLE, UPDATE, decode_job, decode_notice, updated

log = logging.getLogger(__name__)

_UNREAD_NOW = f"SELECT seq, state, record FROM jobs WHERE state != '{UNREADABLE}'"
_UNREAD_BEFORE = f"SELECT record FROM jobs WHERE state = '{UNREADABLE}'"
_SET_ASIDE = f"UPDATE jobs SET state = '{UNREADABLE}', ended = ? WHERE seq = ?"
_NEWEST = "SELECT max(coalesce((SELECT max(ended) FROM jobs), 0.0), coalesce((SELECT min(due) FROM jobs), 0.0))"


def set_aside(db: sqlite3.Connection, now: float) -> int:
    """Set the jobs aside that cannot be read (1), and return how many. `now`: the box's own time, s."""
    found = [seq for seq, state, record in db.execute(_UNREAD_NOW) if not _is_readable(record, state)]
    db.executemany(_SET_ASIDE, [(now, seq) for seq in found])
    if found:
        log.error("jobs of the outbox that cannot be read, damaged or of a newer version: %d", len(found))
    return len(found)


def take_back(db: sqlite3.Connection) -> None:
    """Give the jobs their states back that can be read now. (2)"""
    jobs = [job for (record,) in db.execute(_UNREAD_BEFORE).fetchall() if (job := _decoded(record)) is not None]
    db.executemany(UPDATE, [updated(job) for job in jobs])
    if jobs:
        log.info("jobs of the outbox that could not be read and now can: %d", len(jobs))


def read_row(state: str, record: bytes) -> EdgeJob:
    """Return the job of a row. Raises RecordUnreadable for one that was set aside."""
    if state == UNREADABLE:
        raise RecordUnreadable(
            "The job cannot be read: it is damaged, or a newer version of this daemon wrote it. Upgrade the daemon to "
            "run it, or purge it."
        )
    return decode_job(record)


def unreadable_job(seq: int, job_id: str, error: RecordUnreadable) -> EdgeJob:
    """Return what is shown of a job whose record cannot be read, when it is purged."""
    return EdgeJob(
        seq=seq,
        id=job_id,
        owner="",
        priority="standard",
        endpoint="/v1/chat/completions",
        model="",
        may_leave=False,
        lane="",
        state=JobState.DEAD,
        due=0.0,
        deadline=0.0,
        accepted_unix=0.0,
        error=encode_job_error(error),
    )


def unreadable_notices(db: sqlite3.Connection) -> list[int]:
    """Return the numbers of webhooks whose notice cannot be read. (4)"""
    return [number for number, notice in db.execute("SELECT number, notice FROM webhooks") if not _is_notice(notice)]


def read_mark(db: sqlite3.Connection, mark: bytes | None) -> ClockMark | None:
    """Return the time that was noted last; where that is damaged, the newest end of a job, so that none is overdue."""
    if mark is None:
        return None
    try:
        return msgspec.msgpack.decode(mark, type=ClockMark)
    except Exception:
        (elapsed,) = db.execute(_NEWEST).fetchone()
        log.error("the outbox's time cannot be read: it goes on from the newest end of a job")
        return ClockMark("", 0.0, float("inf"), float(elapsed))


def _is_readable(record: object, state: str) -> bool:
    job = _decoded(record)
    return job is not None and job.state.value == state


def _decoded(record: object) -> EdgeJob | None:
    try:
        return decode_job(record)  # type: ignore[arg-type]
    except Exception:  # damaged bytes fail in many ways
        return None


def _is_notice(notice: bytes) -> bool:
    try:
        decode_notice(notice)
    except Exception:
        return False
    return True
