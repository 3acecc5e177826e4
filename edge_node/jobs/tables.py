"""The transactions of the outbox, which run in the thread of its file.

States move by `router.jobs.states`; a report of a run that is not the job's last one changes nothing. Bounds are of
jobs that have not ended, and of the bytes of requests and results:

1. A job that is not bulk takes the place of the oldest waiting bulk jobs, if there is no other room.
2. A bulk job takes that of older bulk jobs, and all of them have a share; the rest is reserved.
3. A job for which there is no room even so is refused.
"""

from __future__ import annotations

import heapq
import secrets
import sqlite3
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import get_args

import msgspec

from router.errors import DeadlineExceeded, IdempotencyConflict, JobAlreadyEnded, NotFound
from router.jobs.states import JobEvent, JobState, next_state
from router.jobs.submission import RANK
from router.jobs.view import encode_job_error

from ..config.schema import JobsConfig
from .box_time import BoxTime, ClockMark
from .errors import JobDropped, JobLost, JobNotDead, JobNotEnded, OutboxFull
from .record import EdgeJob, Lane

SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT NOT NULL, key TEXT NOT NULL, rank INTEGER NOT NULL,
    state TEXT NOT NULL, lane TEXT NOT NULL, due REAL NOT NULL, deadline REAL NOT NULL, ended REAL,
    bytes INTEGER NOT NULL, record BLOB NOT NULL
);
CREATE UNIQUE INDEX IF NOT EXISTS jobs_by_key ON jobs (owner, key) WHERE key != '';
CREATE INDEX IF NOT EXISTS jobs_waiting ON jobs (lane, rank, seq) WHERE state IN ('queued', 'waiting');
CREATE INDEX IF NOT EXISTS jobs_by_deadline ON jobs (deadline) WHERE ended IS NULL;
CREATE INDEX IF NOT EXISTS jobs_by_end ON jobs (ended) WHERE ended IS NOT NULL;
CREATE TABLE IF NOT EXISTS requests (seq INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS results (seq INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS replies (seq INTEGER PRIMARY KEY, due REAL, address BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS replies_by_due ON replies (due) WHERE due IS NOT NULL;
CREATE TABLE IF NOT EXISTS box (id INTEGER PRIMARY KEY, name TEXT NOT NULL, mark BLOB);
"""
_WAITING = "state IN ('queued', 'waiting')"
_MOST_LOST = 32  # runs that end with the daemon, before the job is taken for the cause
_ENDED_AT_ONCE = 500  # jobs that one transaction expires or deletes


class Accepted(msgspec.Struct, frozen=True):
    """`known`: the same request came before, with the same key."""

    job: EdgeJob
    known: bool = False


class Claimed(msgspec.Struct, frozen=True):
    job: EdgeJob
    body: bytes


class ReplyTo(msgspec.Struct, frozen=True):
    """Where the answer of a job is sent, for a sender that does not fetch it.

    `address`: the sender's matter. `is_new`: an earlier job with the same key was another one, and loses the key.
    """

    address: bytes
    is_new: bool = False


class DueReply(msgspec.Struct, frozen=True):
    """A job that has ended, whose answer is to be sent. `due`: the box's own time, s."""

    job: EdgeJob
    result: bytes
    address: bytes
    due: float


class OutboxStats(msgspec.Struct):
    """Counted in the thread of the file, read anywhere. Totals are since the start of the daemon."""

    unfinished: int = 0
    bulk: int = 0  # of the unfinished
    bytes: int = 0  # of requests and results
    bulk_bytes: int = 0  # of unfinished bulk jobs
    accepted: int = 0
    dropped: int = 0
    ended: dict[str, int] = {}  # by state
    replies_due: int = 0  # answers that are to be sent
    replies_lost: int = 0  # answers that were deleted before they could be sent


class OutboxTables:
    """The tables of one device's jobs. Times are the box's own, s; `load` comes first."""

    def __init__(self, config: JobsConfig, time: BoxTime) -> None:
        self.time = time
        self.stats = OutboxStats(ended={})
        self._config = config
        self._name = ""  # of the file, in the ids of its jobs
        self._seq = 0

    @property
    def name(self) -> str:
        """The file's own name, in the ids of its jobs; "" before `load`."""
        return self._name

    # --- callers -----------------------------------------------------------------------------------------------------

    def accept(self, db: sqlite3.Connection, job: EdgeJob, body: bytes, reply: ReplyTo | None = None) -> Accepted:
        row = db.execute(_BY_KEY, (job.owner, job.key)).fetchone() if job.key else None
        renewed = row is not None and reply is not None and reply.is_new
        if row is not None and not renewed:
            known = _decode(row[0])
            if known.digest != job.digest:
                raise IdempotencyConflict("this `Idempotency-Key` was used with another body or other headers")
            if reply is not None and known.has_ended:  # its sender has lost the answer
                self._set_reply(db, known, self.time.now())
            return Accepted(known, known=True)
        job = msgspec.structs.replace(job, body_bytes=len(body))
        self._make_room(db, job)
        if renewed:
            db.execute(_FREE_KEY, (job.owner, job.key))
        self._seq += 1
        job = msgspec.structs.replace(job, seq=self._seq, id=f"job_{self._name}{self._seq:010x}")
        db.execute("INSERT INTO jobs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", _columns(job))
        db.execute("INSERT INTO requests VALUES (?, ?)", (job.seq, body))
        if reply is not None:
            db.execute("INSERT INTO replies VALUES (?, NULL, ?)", (job.seq, reply.address))
        self._count(job, 1)
        self.stats.accepted += 1
        return Accepted(job)

    def _make_room(self, db: sqlite3.Connection, job: EdgeJob) -> None:
        """(1) to (3). Decide first: OutboxFull is raised before anything is dropped."""
        config, stats, is_bulk = self._config, self.stats, job.priority == "bulk"
        share = config.bulk_share if is_bulk else 1.0
        jobs = (stats.bulk if is_bulk else stats.unfinished) + 1 - int(config.max_jobs * share)
        size = (stats.bulk_bytes if is_bulk else stats.bytes) + job.body_bytes - int(config.max_bytes * share)
        if is_bulk:
            jobs = max(jobs, stats.unfinished + 1 - config.max_jobs)
            size = max(size, stats.bytes + job.body_bytes - config.max_bytes)
        victims: list[EdgeJob] = []
        if jobs > 0 or size > 0:
            by_lane = [db.execute(_OLDEST_BULK, (lane,)) for lane in get_args(Lane)]
            for _, record in heapq.merge(*by_lane, key=itemgetter(0)):
                victims.append(_decode(record))
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
            self._end(db, victim, JobEvent.CANCEL, {"error": encode_job_error(dropped)})
            self.stats.dropped += 1

    def get(self, db: sqlite3.Connection, job_id: str, owner: str | None) -> tuple[EdgeJob, bytes]:
        job = self._read(db, job_id, owner)
        row = db.execute("SELECT body FROM results WHERE seq = ?", (job.seq,)).fetchone()
        return job, b"" if row is None else bytes(row[0])

    def list_owned(self, db: sqlite3.Connection, owner: str | None, after: str, limit: int) -> list[EdgeJob]:
        before = self._read(db, after, owner).seq if after else 1 << 62
        rows = db.execute(_LIST, (before, owner, owner, limit))
        return [_decode(row[0]) for row in rows]

    def cancel(self, db: sqlite3.Connection, job_id: str, owner: str | None) -> EdgeJob:
        job = self._read(db, job_id, owner)
        if job.has_ended:
            raise JobAlreadyEnded(f"the job has ended: {job.state.value}")
        return self._end(db, job, JobEvent.CANCEL, {})

    def retry(self, db: sqlite3.Connection, job_id: str, owner: str | None) -> EdgeJob:
        job = self._read(db, job_id, owner)
        if job.state is not JobState.DEAD:
            raise JobNotDead(f"only a dead letter can be retried; this job is {job.state.value}")
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
        )
        self.stats.bytes -= job.body_bytes
        self._count(job, 1)
        self._save(db, job)
        self._set_reply(db, job, None)
        db.execute("UPDATE jobs SET deadline = ? WHERE seq = ?", (job.deadline, job.seq))
        return job

    def purge(self, db: sqlite3.Connection, job_id: str, owner: str | None) -> EdgeJob:
        job = self._read(db, job_id, owner)
        if not job.has_ended:
            raise JobNotEnded(f"the job is {job.state.value}; cancel it first")
        self._delete(db, job)
        return job

    def _read(self, db: sqlite3.Connection, job_id: str, owner: str | None) -> EdgeJob:
        name, number = job_id[4 : 4 + len(self._name)], job_id[4 + len(self._name) :]
        row = None
        if job_id.startswith("job_") and name == self._name and _is_hex(number):
            row = db.execute("SELECT record FROM jobs WHERE seq = ?", (int(number, 16),)).fetchone()
        job = None if row is None else _decode(row[0])
        if job is None or owner not in (None, job.owner):
            raise NotFound(f"no job {job_id[:100]!r}; a job that ended is deleted after a time")
        return job

    # --- the runner --------------------------------------------------------------------------------------------------

    def claim(self, db: sqlite3.Connection, lane: Lane, limit: int) -> list[Claimed]:
        claimed = []
        for job, body in self._waiting_jobs(db, lane, limit):
            state = next_state(job.state, JobEvent.PROMOTE) if job.state is JobState.WAITING else job.state
            job = msgspec.structs.replace(  # noqa: PLW2901
                job, state=next_state(state, JobEvent.CLAIM), run=job.run + 1, started_unix=self.time.unix()
            )
            self._save(db, job)
            claimed.append(Claimed(job, body))
        return claimed

    def waiting(self, db: sqlite3.Connection, lane: Lane, limit: int) -> list[Claimed]:
        return [Claimed(job, body) for job, body in self._waiting_jobs(db, lane, limit)]

    def _waiting_jobs(self, db: sqlite3.Connection, lane: Lane, limit: int) -> list[tuple[EdgeJob, bytes]]:
        rows = db.execute(_DUE, (lane, self.time.now(), limit)).fetchall()
        return [(_decode(record), bytes(body)) for record, body in rows]

    def place(self, db: sqlite3.Connection, lanes: Sequence[tuple[EdgeJob, Lane]]) -> None:
        statement = f"UPDATE jobs SET lane = ? WHERE seq = ? AND {_WAITING}"
        db.executemany(statement, [(lane, job.seq) for job, lane in lanes])

    def reset_lanes(self, db: sqlite3.Connection) -> None:
        db.execute(f"UPDATE jobs SET lane = '' WHERE {_WAITING} AND lane != ''")

    def note_target(self, db: sqlite3.Connection, job: EdgeJob, target: str) -> bool:
        current = self._current(db, job)
        if current is not None and current.target != target:
            self._save(db, msgspec.structs.replace(current, target=target))
        return current is not None

    def move(self, db: sqlite3.Connection, job: EdgeJob, event: JobEvent, notes: Mapping[str, object]) -> bool:
        current = self._current(db, job)
        if current is None:
            return False
        self._save(db, msgspec.structs.replace(current, state=next_state(current.state, event), **notes))
        return True

    def finish(
        self, db: sqlite3.Connection, job: EdgeJob, event: JobEvent, notes: Mapping[str, object], result: bytes = b""
    ) -> bool:
        current = self._current(db, job)
        if current is None:
            return False
        self._end(db, current, event, notes, result=result)
        return True

    def _current(self, db: sqlite3.Connection, job: EdgeJob) -> EdgeJob | None:
        """The job as stored, if `job` is its last run and still running."""
        row = db.execute("SELECT record FROM jobs WHERE seq = ?", (job.seq,)).fetchone()
        current = None if row is None else _decode(row[0])
        is_last = current is not None and current.run == job.run and current.state is JobState.RUNNING
        return current if is_last else None

    def _end(
        self, db: sqlite3.Connection, job: EdgeJob, event: JobEvent, notes: Mapping[str, object], result: bytes = b""
    ) -> EdgeJob:
        """Move a job to a final state. Its request is deleted, unless it is a dead letter."""
        self._count(job, -1)
        state = next_state(job.state, event)
        kept = job.body_bytes if state is JobState.DEAD else 0
        job = msgspec.structs.replace(
            job,
            state=state,
            ended=self.time.now(),
            ended_unix=self.time.unix(),
            body_bytes=kept,
            result_bytes=len(result),
            **notes,
        )
        self._save(db, job)
        if not kept:
            db.execute("DELETE FROM requests WHERE seq = ?", (job.seq,))
        if result:
            db.execute("INSERT INTO results VALUES (?, ?)", (job.seq, result))
        self._set_reply(db, job, job.ended)
        self.stats.bytes += kept + len(result)
        self.stats.ended[state.value] = self.stats.ended.get(state.value, 0) + 1
        return job

    def expire(self, db: sqlite3.Connection) -> int:
        now, config = self.time.now(), self._config
        late = db.execute(_LATE, (now, _ENDED_AT_ONCE)).fetchall()
        error = encode_job_error(DeadlineExceeded("the job's deadline passed before it was answered"))
        for row in late:
            self._end(db, _decode(row[0]), JobEvent.EXPIRE, {"error": error})
        old = db.execute(_OLD, (now - config.result_ttl_s, now - config.dead_letter_ttl_s, _ENDED_AT_ONCE)).fetchall()
        for (record,) in old:
            self._delete(db, _decode(record))
        return len(late) + len(old)

    def _delete(self, db: sqlite3.Connection, job: EdgeJob) -> None:
        self.stats.replies_lost += self._set_reply(db, job, None)
        for table in ("jobs", "requests", "results", "replies"):
            db.execute(f"DELETE FROM {table} WHERE seq = ?", (job.seq,))
        self.stats.bytes -= job.body_bytes + job.result_bytes

    # --- answers that are sent ---------------------------------------------------------------------------------------

    def due_replies(self, db: sqlite3.Connection, limit: int) -> list[DueReply]:
        rows = db.execute(_REPLIES, (self.time.now(), limit)).fetchall()
        return [
            DueReply(_decode(record), bytes(body or b""), bytes(address), due) for due, address, record, body in rows
        ]

    def replied(self, db: sqlite3.Connection, reply: DueReply, until: float | None) -> None:
        """The answer was sent, or is to be sent at `until`. Nothing changes if it became due anew meanwhile."""
        statement = "UPDATE replies SET due = ? WHERE seq = ? AND due = ?"
        changed = db.execute(statement, (until, reply.job.seq, reply.due)).rowcount
        self.stats.replies_due -= changed if until is None else 0

    def _set_reply(self, db: sqlite3.Connection, job: EdgeJob, due: float | None) -> int:
        """Set when the answer of a job is sent, if it is; None: not now. Returns 1 if that changes whether it is."""
        statement = f"UPDATE replies SET due = ? WHERE seq = ? AND due IS {'NOT ' if due is None else ''}NULL"
        changed = db.execute(statement, (due, job.seq)).rowcount
        self.stats.replies_due += -changed if due is None else changed
        return changed

    # --- rows --------------------------------------------------------------------------------------------------------

    def _save(self, db: sqlite3.Connection, job: EdgeJob) -> None:
        db.execute(_UPDATE, (job.state.value, job.lane, job.due, job.ended, _bytes(job), _encoder.encode(job), job.seq))

    def mark(self, db: sqlite3.Connection) -> None:
        """Note the time with each commit: the next start continues from it."""
        db.execute("UPDATE box SET mark = ? WHERE id = 1", (_encoder.encode(self.time.mark()),))

    def _count(self, job: EdgeJob, sign: int) -> None:
        """Add or take an unfinished job."""
        self.stats.unfinished += sign
        self.stats.bytes += sign * job.body_bytes
        if job.priority == "bulk":
            self.stats.bulk += sign
            self.stats.bulk_bytes += sign * job.body_bytes

    def load(self, db: sqlite3.Connection) -> None:
        row = db.execute("SELECT name, mark FROM box WHERE id = 1").fetchone()
        if row is None:
            row = (secrets.token_hex(6), None)
            db.execute("INSERT INTO box VALUES (1, ?, ?)", row)
        if self._name != row[0]:
            self.time.restore(None if row[1] is None else msgspec.msgpack.decode(row[1], type=ClockMark))
        self._name = str(row[0])
        self._seq = int((db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'jobs'").fetchone() or (0,))[0])
        counts = db.execute(_COUNTS, (RANK["bulk"], RANK["bulk"])).fetchone()
        stats = self.stats
        stats.unfinished, stats.bulk, stats.bytes, stats.bulk_bytes = (int(count or 0) for count in counts)
        stats.replies_due = int(db.execute("SELECT count(*) FROM replies WHERE due IS NOT NULL").fetchone()[0])

    def recover(self, db: sqlite3.Connection) -> None:
        """Take back the jobs that ran when the daemon ended; one that was lost too often is a dead letter."""
        for (record,) in db.execute("SELECT record FROM jobs WHERE state = 'running'").fetchall():
            job = _decode(record)
            job = msgspec.structs.replace(job, lost=job.lost + 1)
            if job.lost >= _MOST_LOST:
                error = JobLost(f"the daemon ended during {job.lost} runs of this job")
                self._end(db, job, JobEvent.EXHAUST, {"error": encode_job_error(error)})
            else:
                self._save(db, msgspec.structs.replace(job, state=next_state(job.state, JobEvent.RELEASE)))


_BY_KEY = "SELECT record FROM jobs WHERE owner = ? AND key = ? AND key != ''"  # as the index has it
_FREE_KEY = "UPDATE jobs SET key = '' WHERE owner = ? AND key = ? AND key != ''"
_OLDEST_BULK = f"SELECT seq, record FROM jobs WHERE {_WAITING} AND lane = ? AND rank = {RANK['bulk']} ORDER BY seq"
_LIST = "SELECT record FROM jobs WHERE seq < ? AND (? IS NULL OR owner = ?) ORDER BY seq DESC LIMIT ?"
_DUE = (
    "SELECT record, body FROM jobs JOIN requests USING (seq) "
    f"WHERE {_WAITING} AND lane = ? AND due <= ? ORDER BY rank, seq LIMIT ?"
)
_LATE = "SELECT record FROM jobs WHERE ended IS NULL AND deadline <= ? ORDER BY deadline LIMIT ?"
_OLD = "SELECT record FROM jobs WHERE ended < ? AND (state != 'dead' OR ended < ?) ORDER BY ended LIMIT ?"
_REPLIES = (
    "SELECT replies.due, address, record, body FROM replies JOIN jobs USING (seq) LEFT JOIN results USING (seq) "
    "WHERE replies.due <= ? ORDER BY replies.due LIMIT ?"
)
_UPDATE = "UPDATE jobs SET state = ?, lane = ?, due = ?, ended = ?, bytes = ?, record = ? WHERE seq = ?"
_COUNTS = (
    "SELECT sum(ended IS NULL), sum(ended IS NULL AND rank = ?), sum(bytes), sum((ended IS NULL AND rank = ?) * bytes) "
    "FROM jobs"
)
QUERIES = (_BY_KEY, _FREE_KEY, _OLDEST_BULK, _LIST, _DUE, _LATE, _OLD, _REPLIES)
"""What is asked again and again: each is found by an index, however many jobs there are."""
_encoder = msgspec.msgpack.Encoder()
_decode = msgspec.msgpack.Decoder(EdgeJob).decode


def _columns(job: EdgeJob) -> tuple[str | int | float | bytes | None, ...]:
    rank, state = RANK[job.priority], job.state.value
    times = (job.due, job.deadline, job.ended)
    return (job.seq, job.owner, job.key, rank, state, job.lane, *times, _bytes(job), _encoder.encode(job))


def _bytes(job: EdgeJob) -> int:
    return job.body_bytes + job.result_bytes


def _is_hex(text: str) -> bool:
    return 0 < len(text) <= 15 and all(digit in "0123456789abcdef" for digit in text)
