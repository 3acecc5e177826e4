"""One SQLite file, touched by one thread and never by the event loop.

Writes are queued in memory (bounded in bytes), written in batches, and dropped and counted when they cannot be. Reads
go to the same thread, before writes. What a bad disk does:

1. the file is damaged or no database: it is set aside as ``<name>.bad`` (one is kept) and a fresh one takes its place
2. the disk is full or cannot be written: nothing is stored for `retry_s`, then it is tried again
3. the disk is slow: a read gives up after its timeout, writes queue up to the bound
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import groupby
from pathlib import Path

import msgspec

log = logging.getLogger(__name__)

Value = str | bytes | int | float | None
Row = tuple[Value, ...]
_LINGER_S = 0.25  # a batch waits this long for company: fewer commits, less wear of the flash, few thread switches
_PENDING_BYTES = 8 * 1024 * 1024
_BATCH_BYTES = 256 * 1024
_TRIM_BYTES = 256 * 1024  # a file outgrows its bound by about so much before it is trimmed
_TRIM_S = 60.0
_DAMAGED = ("not a database", "malformed", "unsupported file format")


class Write(msgspec.Struct, frozen=True):
    """`values` may be a function: it is called in the journal's thread, where encoding holds nobody up."""

    statement: str
    values: Row | Callable[[], Row]
    size_bytes: int = 0  # about

    def row(self) -> Row:
        return self.values() if callable(self.values) else self.values


class _Read(msgspec.Struct, frozen=True):
    statement: str
    values: Row
    answer: Future[list[Row]]


class SqliteStats(msgspec.Struct, frozen=True):
    lost_writes: int  # writes that were dropped
    corrupt_files: int  # damaged files
    available: bool  # False: memory only, for now


class BackgroundSqlite:
    """`schema` is run when the file is opened; `after_batch` keeps the file within bounds, in the journal's thread."""

    def __init__(
        self,
        path: Path,
        schema: str,
        *,
        after_batch: Callable[[sqlite3.Connection], None] = lambda _: None,
        pending_bytes: int = _PENDING_BYTES,
        retry_s: float = 30.0,
        linger_s: float = _LINGER_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._schema = schema
        self._after_batch = after_batch
        self._pending_limit_bytes = pending_bytes
        self._retry_s = retry_s
        self._linger_s = linger_s
        self._monotonic = monotonic
        self._ready = threading.Condition()
        # Guarded by `_ready`:
        self._writes: deque[Write] = deque()
        self._reads: deque[_Read] = deque()
        self._pending_bytes = 0
        self._lost = 0
        self._closing = False
        # The thread's own:
        self._database: sqlite3.Connection | None = None
        self._retry_at = float("-inf")
        self._replace_at = float("-inf")
        self._untrimmed_bytes = 0
        self._trim_at = float("-inf")
        self._set_aside = 0
        self._thread = threading.Thread(target=self._run, name=f"journal-{path.name}", daemon=True)

    # --- for everybody -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stats(self) -> SqliteStats:
        return SqliteStats(lost_writes=self._lost, corrupt_files=self._set_aside, available=self._database is not None)

    def write(self, write: Write) -> bool:
        """Queue one write; False when it was dropped because too much waits already."""
        with self._ready:
            if self._closing or self._pending_bytes + write.size_bytes > self._pending_limit_bytes:
                self._lost += 1
                return False
            self._writes.append(write)
            self._pending_bytes += write.size_bytes
            if len(self._writes) == 1:
                self._ready.notify()
        return True

    async def read(self, statement: str, values: Row = (), *, timeout_s: float = 1.0) -> list[Row]:
        """The rows; none when the file cannot be read. Raises TimeoutError when the disk does not answer."""
        answer: Future[list[Row]] = Future()
        with self._ready:
            if self._closing:
                return []
            self._reads.append(_Read(statement, values, answer))
            self._ready.notify()
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(answer)

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is queued and stop. Blocks for at most `timeout_s`; call it from a thread when a loop runs."""
        with self._ready:
            self._closing = True
            self._ready.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._open()
        while True:
            reads, writes, closing = self._take()
            for read in reads:
                self._serve(read)
            if writes:
                self._store(writes)
            if closing and not writes:
                break
        if self._database is not None:
            self._database.close()
            self._database = None

    def _take(self) -> tuple[list[_Read], list[Write], bool]:
        with self._ready:
            while not (self._reads or self._writes or self._closing):
                self._ready.wait()
            if not (self._reads or self._closing or self._pending_bytes >= _BATCH_BYTES):
                self._ready.wait_for(lambda: bool(self._reads or self._closing), self._linger_s)
            reads, writes = list(self._reads), [] if self._reads else self._batch()
            self._reads.clear()
            return reads, writes, self._closing and not self._writes

    def _batch(self) -> list[Write]:
        batch: list[Write] = []
        size_bytes = 0
        while self._writes and size_bytes < _BATCH_BYTES:
            write = self._writes.popleft()
            size_bytes += write.size_bytes
            batch.append(write)
        self._pending_bytes -= size_bytes
        return batch

    def _serve(self, read: _Read) -> None:
        if not read.answer.set_running_or_notify_cancel():
            return
        rows: list[Row] = []
        try:
            database = self._opened()
            if database is not None:
                rows = database.execute(read.statement, read.values).fetchall()
        except sqlite3.Error as error:
            self._failed(error)
        read.answer.set_result(rows)

    def _store(self, writes: Sequence[Write]) -> None:
        try:
            database = self._opened()
            if database is None:
                self._lose(len(writes))
                return
            with database:
                database.execute("BEGIN IMMEDIATE")
                for statement, rows in groupby(writes, key=lambda write: write.statement):
                    database.executemany(statement, [write.row() for write in rows])
            self._untrimmed_bytes += sum(write.size_bytes for write in writes)
            if self._untrimmed_bytes >= _TRIM_BYTES or self._monotonic() >= self._trim_at:
                self._trim(database)
        except sqlite3.Error as error:
            self._lose(len(writes))
            self._failed(error)

    def _trim(self, database: sqlite3.Connection) -> None:
        with database:
            database.execute("BEGIN IMMEDIATE")
            self._after_batch(database)
        self._untrimmed_bytes = 0
        self._trim_at = self._monotonic() + _TRIM_S

    def _lose(self, count: int) -> None:
        with self._ready:
            self._lost += count

    def _opened(self) -> sqlite3.Connection | None:
        if self._database is None and self._monotonic() >= self._retry_at:
            self._open()
        return self._database

    def _open(self) -> None:
        try:
            self._database = self._connect()
        except (sqlite3.Error, OSError) as error:
            self._failed(error)

    def _connect(self) -> sqlite3.Connection:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        database = sqlite3.connect(self._path, timeout=1.0, isolation_level=None)
        try:
            database.executescript(
                "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA journal_size_limit=4194304;"
            )
            database.executescript(self._schema)
        except BaseException:
            database.close()
            raise
        return database

    def _failed(self, error: Exception) -> None:
        """(1) a damaged file is replaced at once, (2) anything else is left alone for a while."""
        if self._database is not None:
            self._database.close()
            self._database = None
        now = self._monotonic()
        # A disk that damages the fresh file too is not worth a second one right away.
        if now >= self._replace_at and self._is_damaged(error) and self._move_aside():
            self._replace_at = now + self._retry_s
            log.warning("%s is unreadable (%s): set aside, starting afresh", self._path, error)
            self._open()
            return
        self._retry_at = now + self._retry_s
        log.warning("%s cannot be used (%s): trying again in %g s", self._path, error, self._retry_s)

    def _is_damaged(self, error: Exception) -> bool:
        if self._path.exists() and not self._path.is_file():
            return True
        return isinstance(error, sqlite3.DatabaseError) and any(word in str(error) for word in _DAMAGED)

    def _move_aside(self) -> bool:
        """Keep one bad file for whoever wants to look. False when even that fails."""
        aside = self._path.with_name(self._path.name + ".bad")
        try:
            self._path.replace(aside)
            for suffix in ("-wal", "-shm"):
                self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
        except OSError:
            return False
        self._set_aside += 1
        return True


def used_bytes(database: sqlite3.Connection) -> int:
    """What the rows cost, in whole pages; free to ask, and pages that were freed are used again."""
    pages, free, size = (
        int(database.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size
