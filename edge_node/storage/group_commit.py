"""One SQLite file whose writes are acknowledged only after a commit that survives a power cut (group commit).

One background thread owns the file. What waits when it is free becomes one transaction with one fsync
(`synchronous=FULL`), so that the rate grows with the number of callers. Disk faults:

1. The file is corrupt or not a database: it is renamed to ``<name>.bad`` (one is kept) and replaced by a new file.
2. The disk is full or cannot be written: every caller of the transaction gets the error, nothing of it is kept, and the
   next transaction tries again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from router.errors import CausewayError, JobStoreUnavailable

from ..observability.faults import Fault
from .background_sqlite import CORRUPT_MESSAGES

log = logging.getLogger(__name__)

T = TypeVar("T")
_MOST = 512  # units of work of one transaction


class _Work(Generic[T]):
    __slots__ = ("error", "future", "loop", "result", "run")

    def __init__(self, run: Callable[[sqlite3.Connection], T], loop: asyncio.AbstractEventLoop) -> None:
        self.run = run
        self.loop = loop
        self.future: asyncio.Future[T] = loop.create_future()
        self.result: T | None = None
        self.error: Exception | None = None

    def deliver(self) -> None:
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)  # type: ignore[arg-type]


class GroupCommit:
    """A SQLite file and the thread that commits to it.

    Args:
        path: The file; created with mode 0600.
        schema: The SQL script to run when the file is opened.
        load: Called in the thread after the file was opened, and after a transaction was undone.
        seal: Called in the thread before each commit that changes something.
        monotonic: The clock, seconds.
    """

    def __init__(
        self,
        path: Path,
        schema: str,
        *,
        load: Callable[[sqlite3.Connection], None],
        seal: Callable[[sqlite3.Connection], None] = lambda _: None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._schema = schema
        self._load = load
        self._seal = seal
        self._ready = threading.Condition()
        # Guarded by `_ready`:
        self._waiting: deque[_Work[object]] = deque()
        self._closing = False
        # Used by the background thread only:
        self._database: sqlite3.Connection | None = None
        self._fault = Fault(log, logging.ERROR, monotonic)
        self._corrupt = ""
        self._thread = threading.Thread(target=self._run, name=f"commit-{path.name}", daemon=True)

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong with the file now, and whether one was set aside since the start."""
        return tuple(problem for problem in (self._fault.problem, self._corrupt) if problem)

    @property
    def available(self) -> bool:
        return not self._fault.problem

    def start(self) -> None:
        self._thread.start()

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` in the thread, and return its result once it is committed. Cancelling does not undo it.

        Args:
            work: Reads and writes; raises CausewayError before it writes anything, or not at all.

        Raises:
            JobStoreUnavailable: The disk is full or failing; whether the work was committed is then unknown.
        """
        unit = _Work(work, asyncio.get_running_loop())
        with self._ready:
            if self._closing:
                raise JobStoreUnavailable("this server is shutting down", retry_after_s=1.0)
            self._waiting.append(unit)  # type: ignore[arg-type]
            if len(self._waiting) == 1:
                self._ready.notify()
        return await unit.future

    def close(self, timeout_s: float = 10.0) -> None:
        """Commit what waits and stop. Blocks for up to `timeout_s`."""
        with self._ready:
            self._closing = True
            self._ready.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    # --- background thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while units := self._next():
            self._transaction(units)
            _deliver(units)
        if self._database is not None:
            self._database.close()

    def _next(self) -> list[_Work[object]]:
        """What waits; empty at the end."""
        with self._ready:
            while not (self._waiting or self._closing):
                self._ready.wait()
            return [self._waiting.popleft() for _ in range(min(_MOST, len(self._waiting)))]

    def _transaction(self, units: list[_Work[object]]) -> None:
        try:
            database = self._database or self._open()
            database.execute("BEGIN IMMEDIATE")
            changes = database.total_changes
            for unit in units:
                try:
                    unit.result = unit.run(database)
                except CausewayError as error:
                    unit.error = error
            if database.total_changes != changes:
                self._seal(database)
            database.execute("COMMIT")
        except Exception as error:
            self._undo(error)
            message = f"{self._path.name} cannot be written ({error}); what was sent may be repeated with the same key"
            for unit in units:
                unit.error = JobStoreUnavailable(message, retry_after_s=5.0)
        else:
            self._fault.end(f"{self._path} is written again")

    def _open(self) -> sqlite3.Connection:
        try:
            self._database = self._connect()
        except sqlite3.DatabaseError as error:
            if not _is_corrupt(error):
                raise
            self._set_aside(error)
            self._database = self._connect()
        return self._database

    def _connect(self) -> sqlite3.Connection:
        is_new = not self._path.exists()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        database = sqlite3.connect(self._path, timeout=1.0, isolation_level=None)
        try:
            # Deleted requests and answers are overwritten: some of them must not outlive their job.
            database.executescript(
                "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; PRAGMA secure_delete=ON; "
                "PRAGMA journal_size_limit=4194304;"
            )
            database.executescript(f"BEGIN;{self._schema}")
            self._load(database)
            database.execute("COMMIT")
            if is_new:  # SQLite syncs the folder of the file, but not the folder's own name
                _sync_folder(self._path.parent.parent)
        except BaseException:
            database.close()
            raise
        return database

    def _undo(self, error: Exception) -> None:
        """Roll back, and close the file: the next transaction opens it anew. A corrupt file is set aside."""
        self._fault.begin(f"{self._path} cannot be written ({error}): no job is accepted until it can")
        if self._database is None:
            return
        try:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
        except sqlite3.Error as failure:
            log.warning("%s: the transaction could not be rolled back: %s", self._path.name, failure)
        self._database.close()
        self._database = None
        if isinstance(error, sqlite3.DatabaseError) and _is_corrupt(error):
            self._set_aside(error)

    def _set_aside(self, error: Exception) -> None:
        aside = self._path.with_name(self._path.name + ".bad")
        self._path.replace(aside)
        for suffix in ("-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
        self._corrupt = f"{self._path} was corrupt ({error}): it is now {aside.name}, and its jobs are not known here"
        log.error(self._corrupt)


def _is_corrupt(error: sqlite3.DatabaseError) -> bool:
    return any(text in str(error) for text in CORRUPT_MESSAGES)


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _deliver(units: list[_Work[object]]) -> None:
    """Hand the results over, in one turn of each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Work[object]]] = {}
    for unit in units:
        by_loop.setdefault(unit.loop, []).append(unit)
    for loop, own in by_loop.items():
        if not loop.is_closed():
            loop.call_soon_threadsafe(_deliver_all, own)


def _deliver_all(units: list[_Work[object]]) -> None:
    for unit in units:
        unit.deliver()
