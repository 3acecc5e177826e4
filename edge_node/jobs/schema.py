"""The tables of the outbox, their queries, the row of a job, and unreadable rows.

A row is unreadable if it is damaged, or was written by a newer version before a downgrade:

1. A job's row gets the state `unreadable` in its column alone; record, request and result stay. Only the queries here
   find it, and its Idempotency-Key stays taken.
2. Each time the file is opened they are read again: after an upgrade they are restored.
3. Such a row is kept as long as a dead letter, or until its owner purges it.
4. A webhook's unreadable notice counts as a failed delivery.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from causeway_server.router.documents.data import text_of
from causeway_server.router.errors import RecordUnreadable
from causeway_server.router.jobs.job import JobState, encode_job_error
from causeway_server.router.jobs.submission import RANK
from causeway_server.router.jobs.webhooks import JobNotice

from ..clock import ClockMark
from .record import EdgeJob

SCHEMA = text_of(__package__, "jobs.sql")
# Each frequent query uses an index, however many jobs there are.
WAITING = "state IN ('queued', 'waiting')"  # in the form of the index
RECORD = "opened(record, 'jobs', jobs.seq)"
_BODY = "opened_body(body, '{0}', {0}.seq)"
_OF_KEY = "owner = keyed(?) AND key = keyed(?) AND key != ''"  # in the form of the index
BY_KEY = f"SELECT state, {RECORD} FROM jobs WHERE {_OF_KEY}"
FREE_KEY = f"UPDATE jobs SET key = '' WHERE {_OF_KEY}"
OLDEST_BULK = f"SELECT seq, {RECORD} FROM jobs WHERE {WAITING} AND lane = ? AND rank = {RANK['bulk']} ORDER BY seq"
UNREADABLE = "unreadable"
"""The state, in its column only, of a row whose record this version cannot read."""
_READABLE = f"state != '{UNREADABLE}'"
LISTED = f"SELECT {RECORD} FROM jobs WHERE owner = keyed(?) AND seq < ? AND {_READABLE} ORDER BY seq DESC LIMIT ?"
OWNED = f"SELECT seq, {RECORD} FROM jobs WHERE owner = keyed(?)"
OF_ALL = f"SELECT seq, {RECORD} FROM jobs WHERE owner >= ?"
DUE = (
    f"SELECT {RECORD}, {_BODY.format('requests')} FROM jobs JOIN requests USING (seq) "
    f"WHERE {WAITING} AND lane = ? AND due <= ? ORDER BY rank, seq LIMIT ?"
)
LATE = f"SELECT {RECORD} FROM jobs WHERE ended IS NULL AND deadline <= ? ORDER BY deadline LIMIT ?"
_TOLD = "NOT EXISTS (SELECT 1 FROM webhooks WHERE webhooks.seq = jobs.seq)"
_ENDED = f"SELECT {RECORD} FROM jobs WHERE (state = 'dead') = ? AND ended < ? AND {_READABLE}"
OLD = f"{_ENDED} AND {_TOLD} ORDER BY ended LIMIT ?"
OLD_BODIES = f"{_ENDED} AND bytes != 0 ORDER BY ended LIMIT ?"
UNTOLD = f"{_ENDED} AND NOT {_TOLD} ORDER BY ended LIMIT ?"
OLDEST_EMPTY = f"SELECT {RECORD} FROM jobs WHERE bytes = 0 AND ended >= 0.0 AND {_READABLE} ORDER BY ended LIMIT ?"
OLD_UNREADABLE = (
    "SELECT seq FROM jobs WHERE (state = 'dead') = ? AND ended < ? AND +state = 'unreadable' ORDER BY ended LIMIT ?"
)
DUE_REPLIES = (
    f"SELECT replies.due, opened(address, 'replies', jobs.seq), {RECORD}, {_BODY.format('results')} "
    "FROM replies JOIN jobs USING (seq) LEFT JOIN results USING (seq) "
    f"WHERE replies.due <= ? AND {_READABLE} ORDER BY replies.due LIMIT ?"
)
DUE_WEBHOOKS = (
    f"SELECT number, attempts, opened(notice, 'webhooks', jobs.seq), {RECORD} "
    f"FROM webhooks AS one JOIN jobs USING (seq) WHERE one.due <= ? AND {_READABLE} "
    "AND one.receiver NOT IN (SELECT keyed(value) FROM json_each(?)) "
    "AND number NOT IN (SELECT value FROM json_each(?)) "
    "AND NOT EXISTS (SELECT 1 FROM webhooks AS earlier WHERE earlier.seq = one.seq AND earlier.number < one.number) "
    "ORDER BY one.due LIMIT ?"
)
RUNNING = f"SELECT {RECORD} FROM jobs WHERE state = 'running'"
RESULT = f"SELECT {_BODY.format('results')} FROM results WHERE seq = ?"
COUNTS = (
    "SELECT sum(ended IS NULL), sum(ended IS NULL AND rank = ?), sum(bytes), "
    f"sum((ended IS NULL AND rank = ?) * bytes), sum(ended IS NOT NULL AND bytes = 0 AND {_READABLE}), "
    f"sum(NOT ({_READABLE})) FROM jobs"
)
COUNTS_BY_OWNER = (
    f"SELECT max(iif({_READABLE}, seq, 0)), owner, {RECORD}, sum(ended IS NULL), sum(ended IS NULL AND rank = ?), "
    "sum(bytes), sum((ended IS NULL AND rank = ?) * bytes) FROM jobs GROUP BY owner"
)
INSERT = "INSERT INTO jobs VALUES (?1, keyed(?2), keyed(?3), ?4, ?5, ?6, ?7, ?8, ?9, ?10, seal(?11, 'jobs', ?1))"
UPDATE = (
    "UPDATE jobs SET state = ?1, lane = ?2, due = ?3, ended = ?4, bytes = ?5, record = seal(?6, 'jobs', ?7) "
    "WHERE seq = ?7"
)
_encoder = msgspec.msgpack.Encoder()
decode_job = msgspec.msgpack.Decoder(EdgeJob).decode
_decode_mark = msgspec.msgpack.Decoder(ClockMark).decode
decode_notice = msgspec.json.Decoder(JobNotice).decode
T = TypeVar("T")
Value = str | int | float | bytes | None


def inserted(job: EdgeJob) -> tuple[Value, ...]:
    """Return the values of `INSERT`."""
    rank, state = RANK[job.priority], job.state.value
    times = (job.due, job.deadline, job.ended)
    return (job.seq, job.owner, job.key, rank, state, job.lane, *times, job.stored_bytes, _encoder.encode(job))


def updated(job: EdgeJob) -> tuple[Value, ...]:
    """Return the values of `UPDATE`."""
    return (job.state.value, job.lane, job.due, job.ended, job.stored_bytes, _encoder.encode(job), job.seq)


log = logging.getLogger(__name__)

_UNREAD_NOW = f"SELECT seq, state, {RECORD} FROM jobs WHERE state != '{UNREADABLE}'"
_UNREAD_BEFORE = f"SELECT {RECORD} FROM jobs WHERE state = '{UNREADABLE}'"
_SET_ASIDE = f"UPDATE jobs SET state = '{UNREADABLE}', ended = ? WHERE seq = ?"
_NEWEST = "SELECT max(coalesce((SELECT max(ended) FROM jobs), 0.0), coalesce((SELECT min(due) FROM jobs), 0.0))"


def set_aside(db: sqlite3.Connection, now: float) -> int:
    """Set unreadable jobs aside (1), and return their number. `now`: the device's own time, s."""
    unreadable = [
        seq
        for seq, state, record in db.execute(_UNREAD_NOW)
        if (job := decoded(decode_job, record)) is None or job.state.value != state
    ]
    db.executemany(_SET_ASIDE, [(now, seq) for seq in unreadable])
    if unreadable:
        log.error("%d jobs of the outbox cannot be read: they are damaged, or of a newer version.", len(unreadable))
    return len(unreadable)


def take_back(db: sqlite3.Connection) -> None:
    """Restore the states of jobs that can be read now. (2)"""
    records = db.execute(_UNREAD_BEFORE).fetchall()
    jobs = [job for (record,) in records if (job := decoded(decode_job, record)) is not None]
    db.executemany(UPDATE, [updated(job) for job in jobs])
    if jobs:
        log.info("%d jobs of the outbox, which could not be read before, are restored.", len(jobs))


def read_row(state: str, record: bytes) -> EdgeJob:
    """Return the job of a row. Raises RecordUnreadable for a job that was set aside."""
    if state == UNREADABLE:
        raise RecordUnreadable(
            "The job cannot be read: it is damaged, or a newer version of this daemon wrote it. Upgrade the daemon "
            "to run the job, or purge the job."
        )
    return decode_job(record)


def unreadable_job(seq: int, job_id: str, error: RecordUnreadable) -> EdgeJob:
    """Return the view of a job with an unreadable record, for its purge."""
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
    rows = db.execute("SELECT number, opened(notice, 'webhooks', seq) FROM webhooks")
    return [number for number, notice in rows if decoded(decode_notice, notice) is None]


def read_mark(db: sqlite3.Connection, mark: bytes | None) -> ClockMark | None:
    """Return the recorded time; if it is damaged, the newest end of a job, so that no job is overdue."""
    if mark is None:
        return None
    if (known := decoded(_decode_mark, mark)) is not None:
        return known
    (elapsed,) = db.execute(_NEWEST).fetchone()
    log.error("The time of the outbox cannot be read, so it continues from the newest end of a job.")
    return ClockMark("", 0.0, float("inf"), float(elapsed))


def decoded(decode: Callable[[Any], T], data: object) -> T | None:
    """Return the decoded data; None if it is unreadable."""
    try:
        return decode(data)
    except Exception:  # damaged bytes fail in many ways
        return None
