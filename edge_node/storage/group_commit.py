"""A SQLite file whose writes are acknowledged only after a commit that survives a power cut (group commit).

One background thread owns the file. All work that waits when it is free becomes one transaction with one fsync
(`synchronous=FULL`), so that the rate grows with the number of callers. After a transaction of several units, the
thread waits a moment for as many units again, because callers that are answered together often return together.
Otherwise the first of them would get an fsync of its own, and the others would wait for that and for the next one.
Faults:

1. The file is corrupt or not a database: it is renamed to ``<name>.bad`` (one is kept) and replaced by a new file.
2. The disk is full or cannot be written: every caller of the transaction gets the error, the transaction is rolled
back, and the next one tries again.
3. A unit of work fails unexpectedly: unreadable rows are set aside and it runs once more; if that does not help, its
   caller alone gets the error, and the others are committed without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from causeway_server.router.errors import CausewayError, JobStoreUnavailable
from causeway_server.router.serving.at_rest.state_keys import StateKeys
from causeway_server.router.serving.folders import sync
from causeway_server.router.serving.logs import redacted

from ..observability.logs import Fault
from .background_sqlite import SqliteThread, truncate_log

log = logging.getLogger(__name__)

T = TypeVar("T")
_MOST = 512  # maximum units of work in one transaction
_LOG_BYTES = 4 * 1024 * 1024  # size of the log after which a commit copies it into the file
_IDLE_S = 0.02  # time without callers, before a checkpoint
_LATEST_S = 10.0  # time after a deletion, from which the first moment without callers is used
_RETRY_S = 5.0


@dataclass(eq=False, repr=False, slots=True)
class _Work(Generic[T]):
    run: Callable[[sqlite3.Connection], T]
    future: asyncio.Future[T]
    result: T | None = None
    error: Exception | None = None

    def deliver(self) -> None:
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)  # type: ignore[arg-type]


@dataclass(frozen=True)
class TableHooks:
    """Callbacks for the tables of a file, called in its thread.

    Attributes:
        set_aside: Called in a separate transaction, after a unit failed unexpectedly: sets unreadable rows aside, and
            returns their number.
        deletions: Returns a counter that grows with each deletion of content that must become unreadable.
    """

    load: Callable[[sqlite3.Connection], None]  # called after the file was opened, and after a rollback
    seal: Callable[[sqlite3.Connection], None] = lambda _: None  # called before each commit that changes the file
    set_aside: Callable[[sqlite3.Connection], int] = lambda _: 0
    deletions: Callable[[], int] = lambda: 0


class GroupCommit(SqliteThread):
    """A SQLite file, made with mode 0600 and `page_bytes`, and the thread that commits to it. It waits up to `gather_s`
    for as many units as the last transaction had, and erases deletions from the file's log after at least
    `erase_after_s`. `schema`, `keys`: as for `SqliteThread`.
    """

    def __init__(
        self,
        path: Path,
        schema: str,
        tables: TableHooks,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        gather_s: float = 0.003,
        erase_after_s: float = 1.0,
        page_bytes: int = 4096,
        keys: StateKeys | None = None,
    ) -> None:
        # What is deleted must become unreadable, such as the request of a job that has ended: see also `LogErasure`.
        pragmas = (
            f"PRAGMA page_size={page_bytes}; PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; "
            f"PRAGMA secure_delete=ON; PRAGMA journal_size_limit={_LOG_BYTES}; "
            f"PRAGMA wal_autocheckpoint={_LOG_BYTES // page_bytes};"
        )
        super().__init__(path, f"{pragmas} BEGIN; {schema}", monotonic, keys)
        self._tables = tables
        self._gather_s = gather_s
        # Guarded by `_ready`:
        self._waiting: deque[_Work[object]] = deque()
        self._wanted = 1  # number of units for which the thread is woken
        # Used by the background thread only:
        self._last = 1  # number of units of the last transaction
        self._corrupt = ""
        self._erasure = LogErasure(path, erase_after_s, monotonic)

    @property
    def problems(self) -> tuple[str, ...]:
        """Faults of the file now, and whether one was set aside since the start."""
        return tuple(
            problem for problem in (self._fault.problem, self._corrupt, self._erasure.fault.problem) if problem
        )

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` in the thread, and return its result once it is committed; cancelling does not undo it. It may
        raise CausewayError, but before it writes. JobStoreUnavailable: a disk fault; whether it was committed is
        unknown.
        """
        return await self.submit(work)

    def submit(self, work: Callable[[sqlite3.Connection], T]) -> asyncio.Future[T]:
        """Return the future of what `run` returns. Raises JobStoreUnavailable at the end of the daemon."""
        unit: _Work[T] = _Work(work, asyncio.get_running_loop().create_future())
        with self._ready:
            if self._closing:
                raise JobStoreUnavailable("This server is shutting down.", retry_after_s=1.0)
            self._waiting.append(unit)  # type: ignore[arg-type]
            if len(self._waiting) == self._wanted:
                self._ready.notify()
        return unit.future

    # --- background thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (units := self._next()) is not None:
            if units:
                self._commit(units)
                _deliver(units)
            elif self._database is not None:
                self._erasure.run(self._database)
        if self._database is not None:
            self._erasure.run(self._database)
            self._close_database()

    def _next(self) -> list[_Work[object]] | None:
        """Return the waiting units; empty when an erasure is due, None at the end."""
        with self._ready:
            while not self._waiting:
                if self._closing:
                    return None
                if not self._ready.wait(None if self._database is None else self._erasure.wait_s()):
                    return []
            if len(self._waiting) < self._last and not self._closing:
                self._wanted = self._last
                self._ready.wait(self._gather_s)
                self._wanted = 1
            self._last = min(_MOST, len(self._waiting))
            return [self._waiting.popleft() for _ in range(self._last)]

    def _commit(self, units: list[_Work[object]]) -> None:
        """Commit all units, except those that fail unexpectedly even after unreadable rows were set aside. (3)"""
        while (broken := self._transaction(units)) is not None:
            repair = _Work(self._tables.set_aside, broken.future)
            if self._transaction([repair]) is None and repair.error is None and repair.result:
                continue
            units = [unit for unit in units if unit is not broken]

    def _transaction(self, units: list[_Work[object]]) -> _Work[object] | None:
        """Commit the units. If one of them has a bug, return it; then none of the others is committed."""
        try:
            database = self._database or self._open()
            database.execute("BEGIN IMMEDIATE")
            changes, deletions = database.total_changes, self._tables.deletions()
            for unit in units:
                try:
                    unit.result, unit.error = unit.run(database), None
                except CausewayError as error:
                    unit.error = error
                except (sqlite3.Error, OSError):
                    raise
                except Exception as bug:
                    log.error("%s: a transaction failed unexpectedly: %s", self._path.name, redacted(bug))
                    unit.error = CausewayError("Internal error.")
                    self._close_undone()
                    return unit
            if database.total_changes != changes:
                self._tables.seal(database)
            database.execute("COMMIT")
        except Exception as error:
            self._undo(error)
            message = f"{self._path.name} cannot be written ({error}); the request may be repeated with the same key"
            for unit in units:
                unit.error = JobStoreUnavailable(message, retry_after_s=5.0)
        else:
            self._fault.end(f"{self._path} can be written again")
            if self._tables.deletions() != deletions:
                self._erasure.note()
        return None

    def _open(self) -> sqlite3.Connection:
        self._erasure.open()
        try:
            self._database = self._connect()
        except (sqlite3.DatabaseError, OSError) as error:
            if not (self._is_corrupt(error) and self._replace(error)):
                raise
            self._database = self._connect()
        return self._database

    def _prepare(self, database: sqlite3.Connection) -> None:
        super()._prepare(database)
        self._tables.load(database)
        database.execute("COMMIT")
        sync(self._path.parent.parent)  # SQLite syncs the folder of the file, but not the folder's own name

    def _undo(self, error: Exception) -> None:
        """Roll back, and close the file: the next transaction opens it again. A corrupt file is set aside."""
        self._fault.begin(f"{self._path} cannot be written ({error}): until it can, nothing new is accepted into it.")
        if self._database is None:
            return
        self._close_undone()
        if self._is_corrupt(error):
            self._replace(error)

    def _close_undone(self) -> None:
        assert self._database is not None
        try:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
        except sqlite3.Error as failure:
            log.warning("%s: the transaction could not be rolled back: %s", self._path.name, failure)
        self._close_database()

    def _replace(self, error: Exception) -> bool:
        """Set the corrupt file aside: the next transaction begins a new one. Return False if that fails, too."""
        if (fault := self._set_aside()) is not None:
            log.error("%s is corrupt and cannot be renamed: %s", self._path, fault.strerror)
            return False
        self._corrupt = (
            f"{self._path} was corrupt ({error}). It was renamed to {self._path.name}.bad, and its "
            "contents are lost to this daemon"
        )
        log.error(self._corrupt)
        return True


def _deliver(units: list[_Work[object]]) -> None:
    """Pass the results to the callers, in one turn of the event loop."""

    def deliver() -> None:
        for unit in units:
            unit.deliver()

    with contextlib.suppress(RuntimeError):  # the loop is closed
        units[0].future.get_loop().call_soon_threadsafe(deliver)


class LogErasure:
    """Erases deleted rows from the write-ahead log of `path`, where they are readable until a checkpoint.

    `secure_delete` fills deleted content with zeros in newer frames of the log; the older frames stay until they are
    overwritten. Therefore a checkpoint that truncates the log follows deletions, at least `after_s` later: one for
    many, at a moment without callers. A log of an earlier run is truncated, too. The checkpoint fails while another
    program reads the file, and is then repeated. Used by the thread of the file alone.
    """

    def __init__(self, path: Path, after_s: float, monotonic: Callable[[], float]) -> None:
        self._log = path.with_name(path.name + "-wal")
        self._after_s = after_s
        self._monotonic = monotonic
        self._since: float | None = None  # time of the first deletion that is not erased
        self._due = 0.0
        self.fault = Fault(log, logging.WARNING, monotonic)  # whether deleted rows are still readable

    def open(self) -> None:
        """Prepare for the opening of the file: note whether an earlier run left a log."""
        self._since = None
        if self._log.exists() and self._log.stat().st_size:
            self.note()

    def note(self) -> None:
        """Record that rows were deleted."""
        if self._since is None:
            self._since = self._monotonic()
            self._due = self._since + self._after_s

    def wait_s(self) -> float | None:
        """Return the idle time after which `run` must be called; None if there is nothing to erase."""
        if self._since is None:
            return None
        now = self._monotonic()
        idle_s = 0.0 if now >= self._since + _LATEST_S else min(_IDLE_S, self._after_s)
        return max(idle_s, self._due - now)

    def run(self, database: sqlite3.Connection) -> None:
        """Truncate the log, or note when to try again. Does not wait for other programs."""
        if self._since is None:
            return
        problem = truncate_log(database)
        if not problem:
            self._since = None
            self.fault.end(f"{self._log} no longer holds deleted content")
            return
        self._due = self._monotonic() + _RETRY_S
        self.fault.begin(f"{self._log} still holds deleted requests and answers ({problem}); the erasure is repeated.")
