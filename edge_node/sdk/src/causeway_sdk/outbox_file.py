"""The submissions of an application, in a SQLite file of its own, until it has read their results."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import OutboxError

_TABLE = """
CREATE TABLE IF NOT EXISTS submissions (
    key TEXT PRIMARY KEY,     -- the Idempotency-Key
    arguments TEXT NOT NULL,  -- JSON: messages, priority, options
    deadline REAL,            -- Unix seconds; NULL: the device's default
    stated_s REAL,            -- the time left that was sent; NULL: no try can have arrived
    job TEXT,                 -- its id on the device; NULL: it waits
    refusal TEXT              -- JSON: why it never became a job
)
"""
_COLUMNS = "key, arguments, deadline, stated_s, job, refusal"


@dataclass(frozen=True, repr=False)
class Submission:
    """A stored submission. `refusal`: the fields of a `Job` that ended before the device accepted it."""

    key: str
    arguments: Mapping[str, Any]
    deadline: float | None
    stated_s: float | None
    job: str | None
    refusal: Mapping[str, str] | None


class OutboxFile:
    """The rows, oldest first. An added row survives a power cut. Threads may share it.

    Every method raises OutboxError: the file cannot be read or written, or, in `add`, is full.
    """

    def __init__(self, path: str | os.PathLike[str], max_jobs: int) -> None:
        self._path = os.fspath(path)
        self._max_jobs = max_jobs
        self._lock = threading.Lock()
        try:
            os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))  # only its owner may read the prompts
            self._database = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise OutboxError(f"{self._path} cannot be opened: {getattr(error, 'strerror', error)}") from error
        for statement in ("PRAGMA journal_mode=WAL", "PRAGMA synchronous=FULL", "PRAGMA secure_delete=ON", _TABLE):
            self._rows(statement)

    def add(self, key: str, arguments: Mapping[str, object], deadline: float | None) -> None:
        """Store a submission; no-op if one with the same key exists."""
        row = (key, json.dumps(arguments), deadline, self._max_jobs, key)
        self._rows(
            "INSERT OR IGNORE INTO submissions (key, arguments, deadline) SELECT ?, ?, ? "
            "WHERE (SELECT count(*) FROM submissions) < ? OR EXISTS (SELECT 1 FROM submissions WHERE key = ?)",
            row,
        )
        if not self._rows("SELECT 1 FROM submissions WHERE key = ?", (key,)):
            raise OutboxError(f"{self._path} is full: it holds {self._max_jobs} submissions.")

    def waiting(self) -> list[Submission]:
        """Return the submissions that have not been sent."""
        return self._found("WHERE job IS NULL AND refusal IS NULL")

    def taken(self) -> list[Submission]:
        """Return the submissions that became jobs, or were refused."""
        return self._found("WHERE job IS NOT NULL OR refusal IS NOT NULL")

    def state(self, key: str, left_s: float) -> float:
        """Record the remaining time that is about to be sent, and return it; or the one that was recorded before."""
        self._rows("UPDATE submissions SET stated_s = ? WHERE key = ? AND stated_s IS NULL", (left_s, key))
        rows = self._rows("SELECT stated_s FROM submissions WHERE key = ?", (key,))
        return float(rows[0][0]) if rows else left_s

    def restate(self, key: str, left_s: float | None) -> None:
        """Record again what was recorded before a try that was not sent."""
        self._rows("UPDATE submissions SET stated_s = ? WHERE key = ?", (left_s, key))

    def accept(self, key: str, job: str) -> None:
        """Record the job's id."""
        self._rows("UPDATE submissions SET job = ? WHERE key = ?", (job, key))

    def refuse(self, key: str, refusal: Mapping[str, str]) -> None:
        """Record the reason why the submission never becomes a job; no-op if it is one."""
        self._rows("UPDATE submissions SET refusal = ? WHERE key = ? AND job IS NULL", (json.dumps(refusal), key))

    def forget(self, key: str) -> None:
        """Delete a submission; its content is overwritten."""
        self._rows("DELETE FROM submissions WHERE key = ?", (key,))

    def count(self) -> int:
        """Return the number of rows."""
        ((number,),) = self._rows("SELECT count(*) FROM submissions")
        return int(number)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._database.close()

    def _found(self, condition: str) -> list[Submission]:
        rows = self._rows(f"SELECT {_COLUMNS} FROM submissions {condition} ORDER BY rowid")
        return [
            Submission(key, json.loads(arguments), deadline, stated_s, job, json.loads(refusal or "null"))
            for key, arguments, deadline, stated_s, job, refusal in rows
        ]

    def _rows(self, statement: str, values: Sequence[object] = ()) -> list[Any]:
        try:
            with self._lock:
                return self._database.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise OutboxError(f"{self._path} cannot be used: {error}") from error
