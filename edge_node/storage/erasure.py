"""Erases deleted rows from the write-ahead log of a SQLite file: until a checkpoint they are readable there.

`secure_delete` fills with zeros what was deleted, in newer frames of the log; the older frames stay until they are
overwritten. Therefore a checkpoint that truncates the log follows deletions: one for many, at a moment without callers.
A log that an earlier run left is truncated, too. While another program reads the file it cannot be: it is tried again.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from pathlib import Path

from ..observability.faults import Fault

log = logging.getLogger(__name__)

_IDLE_S = 0.02  # without callers, before a checkpoint
_LATEST_S = 10.0  # after a deletion: then the first moment without callers will do
_RETRY_S = 5.0


class LogErasure:
    """When the log of `path` is truncated. Used by the thread of the file alone.

    Args:
        path: The database.
        after_s: The time from a deletion to the checkpoint, at least.
        monotonic: The clock, seconds.
    """

    def __init__(self, path: Path, after_s: float, monotonic: Callable[[], float]) -> None:
        self._log = path.with_name(path.name + "-wal")
        self._after_s = after_s
        self._monotonic = monotonic
        self._since: float | None = None  # of the first deletion that is not erased
        self._due = 0.0
        self._fault = Fault(log, logging.WARNING, monotonic)

    @property
    def problem(self) -> str:
        """Why deleted rows are still readable; "" if they are not, or not for long."""
        return self._fault.problem

    def open(self) -> None:
        """The file is about to be opened."""
        self._since = None
        if self._log.exists() and self._log.stat().st_size:
            self.note()

    def note(self) -> None:
        """Rows were deleted."""
        if self._since is None:
            self._since = self._monotonic()
            self._due = self._since + self._after_s

    def wait_s(self) -> float | None:
        """How long nobody must have called before `run`; None: nothing is to be erased."""
        if self._since is None:
            return None
        now = self._monotonic()
        idle_s = 0.0 if now >= self._since + _LATEST_S else min(_IDLE_S, self._after_s)
        return max(idle_s, self._due - now)

    def run(self, database: sqlite3.Connection) -> None:
        """Truncate the log, or note when to try again. Does not wait for other programs."""
        if self._since is None:
            return
        problem = _truncate_log(database)
        if not problem:
            self._since = None
            self._fault.end(f"{self._log} holds nothing that was deleted")
            return
        self._due = self._monotonic() + _RETRY_S
        self._fault.begin(f"{self._log} holds requests and answers that were deleted ({problem}): it is tried again")


def _truncate_log(database: sqlite3.Connection) -> str:
    """Returns why it could not be; "" if it was."""
    (waits_ms,) = database.execute("PRAGMA busy_timeout").fetchone()
    database.execute("PRAGMA busy_timeout=0")
    try:
        is_blocked = database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
    except sqlite3.Error as error:
        return str(error)
    finally:
        database.execute(f"PRAGMA busy_timeout={waits_ms}")
    return "another program reads the file" if is_blocked else ""
