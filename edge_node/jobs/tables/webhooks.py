"""Webhooks that are to be sent: a row for each, from the transaction that ends or revises its job.

1. Those of a job are sent in order: a later one waits for the earlier ones.
2. A job is kept until its webhooks are sent, though without its request and its answer once their time has passed.
   After `max_age_s` they are given up. Those of a job that is purged, or gives way, are lost. Both are counted.
3. `owners` have a secret that signs; a rotated one signs, too, for a day.
"""

from __future__ import annotations

import base64
import logging
import secrets
import sqlite3
from collections.abc import Collection
from urllib.parse import urlsplit

import msgspec

from router.jobs.webhooks import JobNotice

from ...clock import BoxTime
from ..record import EdgeJob, OutboxStats, OutboxWebhook, WebhookStatus
from .schema import DUE_WEBHOOKS, UNREADABLE, UPDATE, decode_job, decode_notice, updated

log = logging.getLogger(__name__)

_OVERLAP_S = 24 * 3600.0
_encoder = msgspec.json.Encoder()


class OutboxWebhooks:
    """The webhooks of one device's jobs. `load` comes first."""

    def __init__(self, time: BoxTime, stats: OutboxStats) -> None:
        self._time = time
        self._stats = stats

    def load(self, db: sqlite3.Connection) -> None:
        (count,) = db.execute("SELECT count(*) FROM webhooks").fetchone()
        self._stats.webhooks_due = int(count)

    def add(self, db: sqlite3.Connection, job: EdgeJob, event: str = "") -> None:
        """Tell of a job as it is now. `event`: what happened, if that is not its new state."""
        name = f"{job.cloud_key}.{event or job.state.value}" + (f".{job.revision}" if job.revision else "")
        notice = JobNotice(
            id=name,
            job=job.id,
            state=job.state.value,
            event=event,
            revision=job.revision,
            finished=int(self._time.unix() * 1000.0),
        )
        row = (job.seq, self._time.now(), receiver_of(job.webhook), 0, _encoder.encode(notice))
        db.execute("INSERT INTO webhooks (seq, due, receiver, attempts, notice) VALUES (?, ?, ?, ?, ?)", row)
        self._stats.webhooks_due += 1

    def due(
        self, db: sqlite3.Connection, limit: int, receivers: Collection[str], in_flight: Collection[int]
    ) -> list[OutboxWebhook]:
        """Return what is to be sent now, but for these receivers and these numbers."""
        excluded = _encoder.encode(list(receivers)).decode(), _encoder.encode(list(in_flight)).decode()
        found, claimed = [], int(self._time.unix() * 1000.0)
        for number, attempts, notice, record in db.execute(DUE_WEBHOOKS, (self._time.now(), *excluded, limit)):
            job = decode_job(record)
            fields = msgspec.structs.asdict(decode_notice(notice))
            found.append(
                OutboxWebhook(
                    **fields, number=number, owner=job.owner, url=job.webhook, attempts=attempts, claimed=claimed
                )
            )
        return found

    def postpone(self, db: sqlite3.Connection, number: int, until: float) -> None:
        """Count an attempt that failed; another follows at `until`."""
        db.execute("UPDATE webhooks SET due = ?, attempts = attempts + 1 WHERE number = ?", (until, number))

    def finish(self, db: sqlite3.Connection, number: int, status: WebhookStatus) -> bool:
        """End a delivery. False: its job was deleted meanwhile."""
        row = db.execute("DELETE FROM webhooks WHERE number = ? RETURNING seq", (number,)).fetchone()
        if row is None:
            return False
        self._stats.webhooks_due -= 1
        self._stats.count_webhook(status)
        state, record = db.execute("SELECT state, record FROM jobs WHERE seq = ?", row).fetchone()
        (waiting,) = db.execute("SELECT count(*) FROM webhooks WHERE seq = ?", row).fetchone()
        if not waiting and state != UNREADABLE:
            db.execute(UPDATE, updated(msgspec.structs.replace(decode_job(record), webhook_status=status)))
        return True

    def delete(self, db: sqlite3.Connection, seq: int) -> None:
        """Delete the webhooks of a job with it. (2)"""
        self._delete(db, seq, "lost")

    def give_up(self, db: sqlite3.Connection, job: EdgeJob) -> None:
        """End the webhooks of a job whose receiver was away for too long. (2)"""
        self._delete(db, job.seq, "expired")
        db.execute(UPDATE, updated(msgspec.structs.replace(job, webhook_status="failed")))
        log.warning("%s: its webhooks are given up: the receiver was away for too long", job.id)

    def _delete(self, db: sqlite3.Connection, seq: int, outcome: str) -> None:
        count = db.execute("DELETE FROM webhooks WHERE seq = ?", (seq,)).rowcount
        self._stats.webhooks_due -= count
        if count:
            self._stats.count_webhook(outcome, count)

    def secrets(self, db: sqlite3.Connection, owner: str, *, rotate: bool = False) -> tuple[str, ...]:
        """Return the valid secrets of an owner, newest first. The first call makes one; `rotate` replaces it. (3)"""
        now = self._time.now()
        row = db.execute("SELECT secret, earlier, until FROM webhook_secrets WHERE owner = ?", (owner,)).fetchone()
        if row is not None and not rotate:
            secret, earlier, until = row
            return (secret, earlier) if earlier and now < until else (secret,)
        secret = "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()
        earlier = "" if row is None else str(row[0])
        row = (owner, secret, earlier, now + _OVERLAP_S)
        db.execute("INSERT OR REPLACE INTO webhook_secrets VALUES (?, ?, ?, ?)", row)
        return (secret, earlier) if earlier else (secret,)


def receiver_of(url: str) -> str:
    """Return scheme, host and port of a URL: what is slow or away together."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.lower()}"
