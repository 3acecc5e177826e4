"""The tables of the outbox, their queries, and the row of a job."""

from __future__ import annotations

import msgspec

from router.jobs.submission import RANK
from router.jobs.webhooks.payload import JobNotice

from ..record import EdgeJob

SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT NOT NULL, key TEXT NOT NULL, rank INTEGER NOT NULL,
    state TEXT NOT NULL, lane TEXT NOT NULL, due REAL NOT NULL, deadline REAL NOT NULL, ended REAL,
    bytes INTEGER NOT NULL, record BLOB NOT NULL
);
CREATE UNIQUE INDEX IF NOT EXISTS jobs_by_key ON jobs (owner, key) WHERE key != '';
CREATE INDEX IF NOT EXISTS jobs_by_owner ON jobs (owner, seq);
CREATE INDEX IF NOT EXISTS jobs_waiting ON jobs (lane, rank, seq) WHERE state IN ('queued', 'waiting');
CREATE INDEX IF NOT EXISTS jobs_by_deadline ON jobs (deadline) WHERE ended IS NULL;
CREATE INDEX IF NOT EXISTS jobs_by_end ON jobs (state = 'dead', ended) WHERE ended IS NOT NULL;
CREATE INDEX IF NOT EXISTS jobs_empty ON jobs (ended) WHERE bytes = 0;
CREATE TABLE IF NOT EXISTS requests (seq INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS results (seq INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS replies (seq INTEGER PRIMARY KEY, due REAL, address BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS replies_by_due ON replies (due) WHERE due IS NOT NULL;
CREATE TABLE IF NOT EXISTS webhooks (
    number INTEGER PRIMARY KEY AUTOINCREMENT, seq INTEGER NOT NULL, due REAL NOT NULL, receiver TEXT NOT NULL,
    attempts INTEGER NOT NULL, notice BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS webhooks_by_due ON webhooks (due, receiver);
CREATE INDEX IF NOT EXISTS webhooks_by_job ON webhooks (seq);
CREATE TABLE IF NOT EXISTS webhook_secrets (
    owner TEXT PRIMARY KEY, secret TEXT NOT NULL, earlier TEXT NOT NULL, until REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS cancellations (
    key TEXT PRIMARY KEY, due REAL NOT NULL, deadline REAL NOT NULL, unknown INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS box (id INTEGER PRIMARY KEY, name TEXT NOT NULL, mark BLOB);
"""
WAITING = "state IN ('queued', 'waiting')"  # as the index has it
BY_KEY = "SELECT state, record FROM jobs WHERE owner = ? AND key = ? AND key != ''"  # as the index has it
FREE_KEY = "UPDATE jobs SET key = '' WHERE owner = ? AND key = ? AND key != ''"
OLDEST_BULK = f"SELECT seq, owner, record FROM jobs WHERE {WAITING} AND lane = ? AND rank = {RANK['bulk']} ORDER BY seq"
UNREADABLE = "unreadable"
"""In the column of the state alone: a row whose record this version cannot read."""
_READABLE = f"state != '{UNREADABLE}'"
LISTED = f"SELECT record FROM jobs WHERE owner = ? AND seq < ? AND {_READABLE} ORDER BY seq DESC LIMIT ?"
DUE = (
    "SELECT record, body FROM jobs JOIN requests USING (seq) "
    f"WHERE {WAITING} AND lane = ? AND due <= ? ORDER BY rank, seq LIMIT ?"
)
LATE = "SELECT record FROM jobs WHERE ended IS NULL AND deadline <= ? ORDER BY deadline LIMIT ?"
_TOLD = "NOT EXISTS (SELECT 1 FROM webhooks WHERE webhooks.seq = jobs.seq)"
_ENDED = f"SELECT record FROM jobs WHERE (state = 'dead') = ? AND ended < ? AND {_READABLE}"
OLD = f"{_ENDED} AND {_TOLD} ORDER BY ended LIMIT ?"
OLD_BODIES = f"{_ENDED} AND bytes != 0 ORDER BY ended LIMIT ?"
UNTOLD = f"{_ENDED} AND NOT {_TOLD} ORDER BY ended LIMIT ?"
OLDEST_EMPTY = f"SELECT record FROM jobs WHERE bytes = 0 AND ended >= 0.0 AND {_READABLE} ORDER BY ended LIMIT ?"
OLD_UNREADABLE = (
    "SELECT seq FROM jobs WHERE (state = 'dead') = ? AND ended < ? AND +state = 'unreadable' ORDER BY ended LIMIT ?"
)
DUE_REPLIES = (
    "SELECT replies.due, address, record, body FROM replies JOIN jobs USING (seq) LEFT JOIN results USING (seq) "
    f"WHERE replies.due <= ? AND {_READABLE} ORDER BY replies.due LIMIT ?"
)
DUE_WEBHOOKS = (
    "SELECT number, attempts, notice, record FROM webhooks AS one JOIN jobs USING (seq) WHERE one.due <= ? "
    f"AND {_READABLE} "
    "AND one.receiver NOT IN (SELECT value FROM json_each(?)) AND number NOT IN (SELECT value FROM json_each(?)) "
    "AND NOT EXISTS (SELECT 1 FROM webhooks AS earlier WHERE earlier.seq = one.seq AND earlier.number < one.number) "
    "ORDER BY one.due LIMIT ?"
)
QUERIES = (
    BY_KEY,
    FREE_KEY,
    OLDEST_BULK,
    LISTED,
    DUE,
    LATE,
    OLD,
    OLD_BODIES,
    UNTOLD,
    OLDEST_EMPTY,
    OLD_UNREADABLE,
    DUE_REPLIES,
    DUE_WEBHOOKS,
)
"""Queries that run often: each uses an index, however many jobs there are."""
REVISABLE = "SELECT record, body FROM requests JOIN jobs USING (seq) WHERE jobs.state = 'succeeded'"
COUNTS = (
    "SELECT sum(ended IS NULL), sum(ended IS NULL AND rank = ?), sum(bytes), "
    f"sum((ended IS NULL AND rank = ?) * bytes), sum(ended IS NOT NULL AND bytes = 0 AND {_READABLE}), "
    f"sum(NOT ({_READABLE})) FROM jobs"
)
COUNTS_BY_OWNER = (
    "SELECT owner, sum(ended IS NULL), sum(ended IS NULL AND rank = ?), sum(bytes), "
    "sum((ended IS NULL AND rank = ?) * bytes) FROM jobs GROUP BY owner"
)
INSERT = "INSERT INTO jobs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
UPDATE = "UPDATE jobs SET state = ?, lane = ?, due = ?, ended = ?, bytes = ?, record = ? WHERE seq = ?"
_encoder = msgspec.msgpack.Encoder()
decode_job = msgspec.msgpack.Decoder(EdgeJob).decode
decode_notice = msgspec.json.Decoder(JobNotice).decode
Value = str | int | float | bytes | None


def inserted(job: EdgeJob) -> tuple[Value, ...]:
    """The values of `INSERT`."""
    rank, state = RANK[job.priority], job.state.value
    times = (job.due, job.deadline, job.ended)
    return (job.seq, job.owner, job.key, rank, state, job.lane, *times, stored_bytes(job), _encoder.encode(job))


def updated(job: EdgeJob) -> tuple[Value, ...]:
    """The values of `UPDATE`."""
    return (job.state.value, job.lane, job.due, job.ended, stored_bytes(job), _encoder.encode(job), job.seq)


def stored_bytes(job: EdgeJob) -> int:
    return job.body_bytes + job.result_bytes
