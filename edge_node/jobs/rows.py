"""Operations on single jobs: reading, saving, ending and deleting; and all counts.

Jobs move between states by `router.jobs.job`; the report of a run that is not the job's last run is ignored.
"""

from __future__ import annotations

import base64
import logging
import re
import secrets
import sqlite3
from collections.abc import Collection, Mapping
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from causeway_server.router.errors import NotFound
from causeway_server.router.jobs.job import JobEvent, JobState, next_state
from causeway_server.router.jobs.submission import RANK
from causeway_server.router.jobs.webhooks import JobNotice
from causeway_server.router.trackers import network_of

from ..clock import DeviceTime
from .record import ClientStats, DueReply, EdgeJob, OutboxStats, OutboxWebhook, ReplyTo, WebhookStatus
from .schema import (
    COUNTS,
    COUNTS_BY_OWNER,
    DUE_REPLIES,
    DUE_WEBHOOKS,
    INSERT,
    RECORD,
    UNREADABLE,
    UPDATE,
    decode_job,
    decode_notice,
    decoded,
    inserted,
    read_mark,
    read_row,
    set_aside,
    take_back,
    unreadable_notices,
    updated,
)

log = logging.getLogger(__name__)

_OVERLAP_S = 24 * 3600.0  # validity of a rotated secret
_encoder = msgspec.json.Encoder()
Table = Literal["requests", "results"]
_ADD = "INSERT OR IGNORE INTO cancellations (key, due, deadline, unknown) VALUES (?, ?, ?, 0)"
_DUE = "SELECT key, unknown FROM cancellations WHERE due <= ? ORDER BY due LIMIT ?"
_ALL_DUE = (
    "SELECT (SELECT count(*) FROM replies WHERE due IS NOT NULL), (SELECT count(*) FROM webhooks), "
    "(SELECT count(*) FROM cancellations)"
)
_SECRET = "opened({0}, 'webhook_secrets', owner)"
_SECRETS = (
    f"SELECT {_SECRET.format('secret')}, {_SECRET.format('earlier')}, until FROM webhook_secrets WHERE owner = keyed(?)"
)
_PUT_SECRETS = (
    "INSERT OR REPLACE INTO webhook_secrets VALUES "
    "(keyed(?1), seal(?2, 'webhook_secrets', keyed(?1)), seal(?3, 'webhook_secrets', keyed(?1)), ?4)"
)
_AGAIN_S = 60.0  # pause until a cloud that does not know the job is asked once more


class OutboxRows:
    """The rows of this device's jobs, with counts for all clients and for each client. Call `load` first."""

    def __init__(self, time: DeviceTime) -> None:
        self.time = time
        self.stats = OutboxStats()
        self._by_client: dict[str, ClientStats] = {}
        self.bodies = OutboxBodies()
        self.replies = OutboxReplies(time, self.stats)
        self.webhooks = OutboxWebhooks(time, self.stats)
        self.cancellations = OutboxCancellations(time, self.stats)
        self.name = ""  # the file's own name, in the ids of its jobs; "" before `load`
        self._seq = 0  # number of the last job

    def load(self, db: sqlite3.Connection) -> None:
        row = db.execute("SELECT name, mark FROM box WHERE id = 1").fetchone()
        if row is None:
            row = (secrets.token_hex(6), None)
            db.execute("INSERT INTO box VALUES (1, ?, ?)", row)
        if self.name != row[0]:
            self.time.restore(read_mark(db, row[1]))
            take_back(db)
        self.name = str(row[0])
        (last,) = db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'jobs'").fetchone() or (0,)
        self._seq = max(self._seq, int(last))  # also in a new file: a run of a lost job must not end another job
        self._recount(db)

    def _recount(self, db: sqlite3.Connection) -> None:
        counts = [int(count or 0) for count in db.execute(COUNTS, (RANK["bulk"], RANK["bulk"])).fetchone()]
        stats = self.stats
        stats.unfinished, stats.bulk, stats.bytes, stats.bulk_bytes, stats.empty, stats.unreadable = counts
        stats.replies_due, stats.webhooks_due, stats.cancellations_due = db.execute(_ALL_DUE).fetchone()
        self._by_client.clear()
        for seq, digest, record, *held in db.execute(COUNTS_BY_OWNER, (RANK["bulk"], RANK["bulk"])):
            job = decoded(decode_job, record) if seq else None
            self._add(digest if job is None else job.owner, *(int(count or 0) for count in held))

    def set_unreadable_aside(self, db: sqlite3.Connection) -> int:
        """Set aside rows that this version cannot read; return their number."""
        jobs, notices = set_aside(db, self.time.now()), unreadable_notices(db)
        for number in notices:
            self.webhooks.finish(db, number, "failed")
        self._recount(db)
        return jobs + len(notices)

    def mark(self, db: sqlite3.Connection) -> None:
        """Record the time with each commit: the next start continues from it."""
        db.execute("UPDATE box SET mark = ? WHERE id = 1", (msgspec.msgpack.encode(self.time.mark()),))

    def find(self, db: sqlite3.Connection, job_id: str, owner: str | None) -> EdgeJob:
        """Return a job of `owner`; None stands for all clients. Raises NotFound."""
        query = f"SELECT owner = keyed(?), state, {RECORD} FROM jobs WHERE seq = ?"
        row = db.execute(query, (owner or "", self.seq_of(job_id))).fetchone()
        if row is None or not (row[0] or owner is None):
            raise NotFound(f"Job {job_id[:100]!r} not found. Jobs are deleted some time after their end.")
        return read_row(*row[1:])

    def seq_of(self, job_id: str) -> int:
        """Return the number in the id of a job; 0 if the id is not of this file."""
        match = re.fullmatch(rf"job_{re.escape(self.name)}([0-9a-f]{{1,15}})", job_id)
        return int(match[1], 16) if match else 0

    def stored(self, db: sqlite3.Connection, seq: int) -> EdgeJob | None:
        row = db.execute(f"SELECT {RECORD} FROM jobs WHERE seq = ? AND state != '{UNREADABLE}'", (seq,)).fetchone()
        return None if row is None else decode_job(row[0])

    def add(self, db: sqlite3.Connection, job: EdgeJob, body: bytes) -> EdgeJob:
        """Store a new job; return it with its number and its id."""
        self._seq += 1
        job = msgspec.structs.replace(job, seq=self._seq, id=f"job_{self.name}{self._seq:010x}", body_bytes=len(body))
        db.execute(INSERT, inserted(job))
        self.bodies.put(db, "requests", job.seq, body)
        self.count(job, 1)
        return job

    def save(self, db: sqlite3.Connection, job: EdgeJob) -> None:
        db.execute(UPDATE, updated(job))

    def end(
        self, db: sqlite3.Connection, job: EdgeJob, event: JobEvent, notes: Mapping[str, object], result: bytes = b""
    ) -> EdgeJob:
        """Move a job to a final state. Its request is deleted, unless it may run again."""
        self.count(job, -1)
        state = next_state(job.state, event)
        kept = job.body_bytes if state is JobState.DEAD else 0
        job = msgspec.structs.replace(
            job,
            state=state,
            ended=self.time.now(),
            ended_unix=self.time.unix(),
            body_bytes=kept,
            result_bytes=len(result),
            webhook_status="pending" if job.webhook else "",
            **notes,
        )
        self.save(db, job)
        if job.webhook:
            self.webhooks.add(db, job)
        if not kept:
            self.bodies.delete(db, "requests", job.seq)
        if result:
            self.bodies.put(db, "results", job.seq, result)
        if event is JobEvent.CANCEL and job.target:
            self.cancellations.add(db, job.cloud_key, job.target, job.deadline)
        self.replies.set_due(db, job.seq, job.ended)
        self.add_bytes(job, job.stored_bytes)
        self.stats.empty += not job.stored_bytes
        self.stats.ended[state.value] += 1
        return job

    def delete(self, db: sqlite3.Connection, job: EdgeJob) -> None:
        self._delete(db, job.seq)
        self.add_bytes(job, -job.stored_bytes)
        self.stats.empty -= not job.stored_bytes

    def delete_unreadable(self, db: sqlite3.Connection, seq: int) -> None:
        """Delete a job that was set aside."""
        self._delete(db, seq)
        self._recount(db)

    def _delete(self, db: sqlite3.Connection, seq: int) -> None:
        self.webhooks.delete(db, seq)
        self.stats.replies_lost += self.replies.set_due(db, seq, None)
        self.bodies.delete(db, "requests", seq)
        self.bodies.delete(db, "results", seq)
        db.execute("DELETE FROM replies WHERE seq = ?", (seq,))
        db.execute("DELETE FROM jobs WHERE seq = ?", (seq,))

    def empty(self, db: sqlite3.Connection, job: EdgeJob) -> None:
        """Delete request and result of a job that has ended; the job stays."""
        self.stats.replies_lost += self.replies.set_due(db, job.seq, None)
        self.bodies.delete(db, "requests", job.seq)
        self.bodies.delete(db, "results", job.seq)
        self.add_bytes(job, -job.stored_bytes)
        self.stats.empty += 1
        self.save(db, msgspec.structs.replace(job, body_bytes=0, result_bytes=0))

    def count(self, job: EdgeJob, sign: int) -> None:
        """Add (1) or subtract (-1) an unfinished job in the counts."""
        size, bulk = sign * job.body_bytes, job.priority == "bulk"
        self.stats.unfinished += sign
        self.stats.bytes += size
        if bulk:
            self.stats.bulk += sign
            self.stats.bulk_bytes += size
        self._add(job.owner, sign, sign * bulk, size, size * bulk)

    def add_bytes(self, job: EdgeJob, size: int) -> None:
        """Count stored bytes of a request or result; a negative size counts deleted ones."""
        self.stats.bytes += size
        self._add(job.owner, 0, 0, size, 0)

    def held_by(self, owner: str) -> ClientStats:
        """Return the outbox's counts for the client of an owner."""
        return self._by_client.get(network_of(owner), ClientStats())

    def _add(self, owner: str, unfinished: int, bulk: int, size: int, bulk_bytes: int) -> None:
        before, client = self.held_by(owner), network_of(owner)
        held = ClientStats(
            before.unfinished + unfinished, before.bulk + bulk, before.bytes + size, before.bulk_bytes + bulk_bytes
        )
        if held == ClientStats():
            self._by_client.pop(client, None)
        else:
            self._by_client[client] = held


class OutboxBodies:
    """Stores requests and results, each in separate pages (`padded`), so that no copy stays when they are deleted.
    `deletions` counts deleted contents, also in transactions that were rolled back.
    """

    def __init__(self) -> None:
        self.deletions = 0

    def put(self, db: sqlite3.Connection, table: Table, seq: int, body: bytes) -> None:
        db.execute(f"INSERT INTO {table} VALUES (?1, seal_body(?2, '{table}', ?1))", (seq, body))

    def delete(self, db: sqlite3.Connection, table: Table, seq: int) -> None:
        self.deletions += db.execute(f"DELETE FROM {table} WHERE seq = ?", (seq,)).rowcount


class OutboxReplies:
    """Times at which the answers of jobs are sent, for senders that do not fetch them."""

    def __init__(self, time: DeviceTime, stats: OutboxStats) -> None:
        self._time = time
        self._stats = stats

    def add(self, db: sqlite3.Connection, job: EdgeJob, reply: ReplyTo) -> None:
        """Schedule the answer of a new job to be sent once it has ended."""
        db.execute("INSERT INTO replies VALUES (?1, NULL, seal(?2, 'replies', ?1))", (job.seq, reply.address))

    def due(self, db: sqlite3.Connection, limit: int) -> list[DueReply]:
        """Return the answers that must be sent now, those that have waited longest first."""
        found = []
        for due, address, record, body in db.execute(DUE_REPLIES, (self._time.now(), limit)):
            job = decode_job(record)
            found.append(DueReply(job, body, address, due))
        return found

    def sent(self, db: sqlite3.Connection, reply: DueReply, *, again_s: float | None = None) -> None:
        """Record that an answer was sent, or failed and is due in `again_s`; no-op if it became due again meanwhile."""
        until = None if again_s is None else self._time.now() + again_s
        statement = "UPDATE replies SET due = ? WHERE seq = ? AND due = ?"
        changed = db.execute(statement, (until, reply.job.seq, reply.due)).rowcount
        self._stats.replies_due -= changed if until is None else 0

    def set_due(self, db: sqlite3.Connection, seq: int, due: float | None) -> int:
        """Set when a job's answer is sent; None: not yet. Return 1 if it becomes or stops being scheduled."""
        statement = f"UPDATE replies SET due = ? WHERE seq = ? AND due IS {'NOT ' if due is None else ''}NULL"
        changed = db.execute(statement, (due, seq)).rowcount
        self._stats.replies_due += -changed if due is None else changed
        return changed


class Cancellation(msgspec.Struct, frozen=True):
    """A job that the cloud must cancel. `key`: its Idempotency-Key, followed by `@` and the name of its cloud if that
    is known. `unknown`: the cloud did not know it once.
    """

    key: str
    unknown: bool


class OutboxCancellations:
    """Jobs that were cancelled here and may be at the cloud, which is notified as soon as it can be reached.

    1. The row is committed with the cancellation, and deleted once the cloud has answered, or at the job's deadline.
    2. A cloud that does not know the job is asked once more: the submission may have been in transit.
    """

    def __init__(self, time: DeviceTime, stats: OutboxStats) -> None:
        self._time = time
        self._stats = stats

    def add(self, db: sqlite3.Connection, key: str, target: str, deadline: float) -> None:
        """Record a job that was cancelled after it may have been sent (1). `deadline`: the job's, in device time."""
        _, at, cloud = target.rpartition("@")
        key += at and at + cloud
        self._stats.cancellations_due += db.execute(_ADD, (key, self._time.now(), deadline)).rowcount

    def due(self, db: sqlite3.Connection, limit: int) -> list[Cancellation]:
        """Return the cancellations that must be sent to the cloud now."""
        now = self._time.now()
        self._stats.cancellations_due -= db.execute("DELETE FROM cancellations WHERE deadline <= ?", (now,)).rowcount
        return [Cancellation(key, bool(unknown)) for key, unknown in db.execute(_DUE, (now, limit))]

    def settle(self, db: sqlite3.Connection, cancellation: Cancellation, *, known: bool) -> None:
        """Record the cloud's response: the cancellation is finished, or sent once more if the job was unknown. (2)"""
        if known or cancellation.unknown:
            deleted = db.execute("DELETE FROM cancellations WHERE key = ?", (cancellation.key,)).rowcount
            self._stats.cancellations_due -= deleted
        else:
            due = self._time.now() + _AGAIN_S
            db.execute("UPDATE cancellations SET due = ?, unknown = 1 WHERE key = ?", (due, cancellation.key))


class OutboxWebhooks:
    """The webhooks that must be sent: a row for each, from the transaction that ends its job.

    1. The webhooks of a job are sent in order: a later one waits for the earlier ones.
    2. A job is kept until its webhooks are sent; its request and its answer are still deleted on time. After
    `max_age_s` its webhooks are given up. The webhooks of a job that is purged or displaced are lost. Both are counted.
    3. An owner has a secret that signs webhooks. After a rotation, the earlier secret signs them, too, for a day.
    """

    def __init__(self, time: DeviceTime, stats: OutboxStats) -> None:
        self._time = time
        self._stats = stats

    def add(self, db: sqlite3.Connection, job: EdgeJob) -> None:
        """Schedule a webhook about the end of a job."""
        state, finished = job.state.value, int(self._time.unix() * 1000.0)
        notice = JobNotice(id=f"{job.cloud_key}.{state}", job=job.id, state=state, finished=finished)
        row = (job.seq, self._time.now(), receiver_of(job.webhook), 0, _encoder.encode(notice))
        values = "VALUES (?1, ?2, keyed(?3), ?4, seal(?5, 'webhooks', ?1))"
        db.execute(f"INSERT INTO webhooks (seq, due, receiver, attempts, notice) {values}", row)
        self._stats.webhooks_due += 1

    def due(
        self, db: sqlite3.Connection, limit: int, receivers: Collection[str], in_flight: Collection[int]
    ) -> list[OutboxWebhook]:
        """Return the webhooks that must be sent now, except to these receivers and with these numbers."""
        excluded = _encoder.encode(list(receivers)).decode(), _encoder.encode(list(in_flight)).decode()
        due, claimed = [], int(self._time.unix() * 1000.0)
        for number, attempts, notice, record in db.execute(DUE_WEBHOOKS, (self._time.now(), *excluded, limit)):
            job = decode_job(record)
            fields = msgspec.structs.asdict(decode_notice(notice))
            due.append(
                OutboxWebhook(
                    **fields, number=number, owner=job.owner, url=job.webhook, attempts=attempts, claimed=claimed
                )
            )
        return due

    def postpone(self, db: sqlite3.Connection, number: int, delay_s: float) -> None:
        """Count a failed attempt; another follows after `delay_s`."""
        due = self._time.now() + delay_s
        db.execute("UPDATE webhooks SET due = ?, attempts = attempts + 1 WHERE number = ?", (due, number))

    def finish(self, db: sqlite3.Connection, number: int, status: WebhookStatus) -> bool:
        """End a delivery. Return False if its job was deleted meanwhile."""
        row = db.execute("DELETE FROM webhooks WHERE number = ? RETURNING seq", (number,)).fetchone()
        if row is None:
            return False
        self._stats.webhooks_due -= 1
        self._stats.webhooks[status] += 1
        state, record = db.execute(f"SELECT state, {RECORD} FROM jobs WHERE seq = ?", row).fetchone()
        (waiting,) = db.execute("SELECT count(*) FROM webhooks WHERE seq = ?", row).fetchone()
        if not waiting and state != UNREADABLE:
            db.execute(UPDATE, updated(msgspec.structs.replace(decode_job(record), webhook_status=status)))
        return True

    def delete(self, db: sqlite3.Connection, seq: int) -> None:
        """Delete a job's webhooks together with the job. (2)"""
        self._delete(db, seq, "lost")

    def give_up(self, db: sqlite3.Connection, job: EdgeJob) -> None:
        """Give up the webhooks of a job whose receiver was unreachable for too long. (2)"""
        self._delete(db, job.seq, "expired")
        db.execute(UPDATE, updated(msgspec.structs.replace(job, webhook_status="failed")))
        log.warning("The webhooks of job %s are given up, because the receiver was unreachable for too long.", job.id)

    def _delete(self, db: sqlite3.Connection, seq: int, outcome: str) -> None:
        count = db.execute("DELETE FROM webhooks WHERE seq = ?", (seq,)).rowcount
        self._stats.webhooks_due -= count
        if count:
            self._stats.webhooks[outcome] += count

    def secrets(self, db: sqlite3.Connection, owner: str, *, rotate: bool = False) -> tuple[str, ...]:
        """Return the valid secrets of an owner, newest first. The first call makes one; `rotate` replaces it. (3)"""
        now = self._time.now()
        row = db.execute(_SECRETS, (owner,)).fetchone()
        if row is not None and row[0] and not rotate:
            secret, earlier, until = row[0].decode(), row[1].decode(), row[2]
            return (secret, earlier) if earlier and now < until else (secret,)
        secret = "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()
        earlier = "" if row is None else row[0].decode()
        row = (owner, secret, earlier, now + _OVERLAP_S)
        db.execute(_PUT_SECRETS, row)
        return (secret, earlier) if earlier else (secret,)


def receiver_of(url: str) -> str:
    """Return scheme, host and port of a URL, which identify the receiver that may be slow or unreachable."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.lower()}"
