"""Jobs that were cancelled here and may be at the cloud: it is told of each, as soon as it can be reached.

1. The row is committed with the cancellation, and goes when the cloud has answered.
2. A cloud that does not know the job is asked once more: the submission may have been on its way.
3. At the job's deadline the row goes: the cloud knows that, too.
"""

from __future__ import annotations

import sqlite3

import msgspec

from ...box_time import BoxTime
from .values import OutboxStats

_ADD = "INSERT OR IGNORE INTO cancellations (key, due, deadline, unknown) VALUES (?, ?, ?, 0)"
_DUE = "SELECT key, unknown FROM cancellations WHERE due <= ? ORDER BY due LIMIT ?"
_AGAIN_S = 60.0  # until a cloud that does not know the job is asked once more


class Cancellation(msgspec.Struct, frozen=True):
    """A job that the cloud must cancel. `key`: its Idempotency-Key. `unknown`: the cloud did not know it once."""

    key: str
    unknown: bool


class OutboxCancellations:
    """The cancellations that the cloud does not know of. `load` comes first."""

    def __init__(self, time: BoxTime, stats: OutboxStats) -> None:
        self._time = time
        self._stats = stats

    def load(self, db: sqlite3.Connection) -> None:
        (count,) = db.execute("SELECT count(*) FROM cancellations").fetchone()
        self._stats.cancellations_due = int(count)

    def add(self, db: sqlite3.Connection, key: str, deadline: float) -> None:
        """Note a job that was cancelled after it may have been sent. `deadline`: of the job, the box's own time. (1)"""
        self._stats.cancellations_due += db.execute(_ADD, (key, self._time.now(), deadline)).rowcount

    def due(self, db: sqlite3.Connection, limit: int) -> list[Cancellation]:
        now = self._time.now()
        self._stats.cancellations_due -= db.execute("DELETE FROM cancellations WHERE deadline <= ?", (now,)).rowcount
        return [Cancellation(key, bool(unknown)) for key, unknown in db.execute(_DUE, (now, limit))]

    def unknown(self, db: sqlite3.Connection, one: Cancellation) -> None:
        """Note that the cloud does not know the job. (2)"""
        if one.unknown:
            self.done(db, one)
        else:
            due = self._time.now() + _AGAIN_S
            db.execute("UPDATE cancellations SET due = ?, unknown = 1 WHERE key = ?", (due, one.key))

    def done(self, db: sqlite3.Connection, one: Cancellation) -> None:
        self._stats.cancellations_due -= db.execute("DELETE FROM cancellations WHERE key = ?", (one.key,)).rowcount
