"""A SQLite file that is used by one background thread and never by the event loop.

Writes are queued in memory (limited in bytes) and written in batches; writes that cannot be queued or stored are
dropped and counted. Reads run in the same thread, ahead of writes. Disk faults:

1. The file is corrupt or not a database: it is renamed to ``<name>.bad`` (one is kept) and replaced by a new file.
2. The disk is full or cannot be written: nothing is stored for `retry_s`, then the file is opened again.
3. The disk is slow: a read ends with a timeout, writes queue up to the limit.
4. Another program has locked the file: reads and writes wait for it, as with a slow disk.

A row that cannot be encoded is lost with its batch.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import lru_cache
from itertools import chain, groupby
from pathlib import Path

import msgspec

from causeway_server.router.errors import JobStoreUnavailable
from causeway_server.router.serving.at_rest.state_keys import LAYOUT, StateKeys
from causeway_server.router.serving.logs import redacted

from ..observability.logs import Fault
from .sealed import SEALED, encrypt_earlier, register

log = logging.getLogger(__name__)

Value = str | bytes | int | float | None
Row = tuple[Value, ...]
_LINGER_S = 0.25  # time in which a batch collects writes: fewer commits, less flash wear, fewer thread switches
_PENDING_BYTES = 8 * 1024 * 1024
_BATCH_BYTES = 256 * 1024
_ROWS = 32  # that one statement inserts
_TRIM_BYTES = 256 * 1024  # excess over a file's limit after which it is trimmed, approximately
_TRIM_S = 60.0
_PRAGMAS = "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA journal_size_limit=4194304;"
_BUSY_S = 1.0  # time that SQLite waits for a lock
_CLOSING_TRIES = 3  # attempts of a batch while the file is locked
_ERASURE_S = 60.0
_LOCKED = ("SQLITE_BUSY", "SQLITE_LOCKED")
_CORRUPT_MESSAGES = ("not a database", "malformed", "unsupported file format")


class Write(msgspec.Struct, gc=False, frozen=True):
    """A write. `values` may be a function: the background thread calls it, so that encoding blocks no request."""

    statement: str
    values: Row | Callable[[], Row]
    size_bytes: int = 0  # approximate size


class _Read(msgspec.Struct, frozen=True):
    statement: str
    values: Row
    rows: Future[list[Row] | None]
    until: float  # time until which the caller waits, monotonic seconds
    erases: bool = False


class SqliteStats(msgspec.Struct, frozen=True):
    """State of one file."""

    lost_writes: int  # writes that were dropped
    corrupt_files: int  # corrupt files that were set aside and replaced
    available: bool  # whether the file is open and can be written. If not, data is only in memory for now.
    problem: str = ""  # why it cannot be written; "" if it can
    queued_writes: int = 0  # writes that wait for the background thread
    queued_reads: int = 0  # reads that wait for the background thread


class SqliteThread:
    """A SQLite file and the one thread that uses it: opened with mode 0600, and renamed to ``<name>.bad`` if corrupt.
    `script` (pragmas and tables) runs at each opening; `keys` seal a file in `SEALED`; None: the key beside its folder.
    """

    def __init__(self, path: Path, script: str, monotonic: Callable[[], float], keys: StateKeys | None = None) -> None:
        self._path = path
        self._script = script
        self.keys: StateKeys | None = None
        if path.name in SEALED:
            self.keys = keys or StateKeys(path.parent)
        self._lock = threading.RLock()  # of `_ready`, whose own `with` takes two calls more
        self._ready = threading.Condition(self._lock)
        self._closing = False  # guarded by `_ready`
        self._database: sqlite3.Connection | None = None  # used by the thread only
        self._fault = Fault(log, logging.ERROR, monotonic)
        self._thread = threading.Thread(target=self._run, name=f"sqlite-{path.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what waits and stop. Blocks for up to `timeout_s`: call it in a thread under an event loop."""
        with self._ready:
            self._closing = True
            self._ready.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        raise NotImplementedError

    def _prepare(self, database: sqlite3.Connection) -> None:
        script = self._script
        if self.keys is not None:
            database.execute("PRAGMA temp_store=MEMORY")  # temporary files would have readable content
            if database.execute("PRAGMA user_version").fetchone()[0] != LAYOUT:
                script += f"; PRAGMA user_version={LAYOUT};"
        database.executescript(script)

    def _connect(self) -> sqlite3.Connection:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self.keys is not None:
            encrypt_earlier(self._path, self.keys)
            self.keys.check_made()  # before there is a file without tables
        # SQLite gives the files beside it the same rights.
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        database = sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None)
        try:
            if self.keys is not None:
                register(database, self.keys)
            self._prepare(database)
        except BaseException:
            database.close()
            raise
        return database

    def _close_database(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None

    def _is_corrupt(self, error: Exception) -> bool:
        if self._path.exists() and not self._path.is_file():
            return True
        return isinstance(error, sqlite3.DatabaseError) and any(text in str(error) for text in _CORRUPT_MESSAGES)

    def _set_aside(self) -> OSError | None:
        """Rename the corrupt file, to be examined later. Return the error if that fails, too."""
        try:
            self._path.replace(self._path.with_name(self._path.name + ".bad"))
            for suffix in ("-wal", "-shm"):
                self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
        except OSError as fault:
            return fault
        return None


class BackgroundSqlite(SqliteThread):
    """A SQLite file and its background thread. Statements may call `functions` of one value, by name; `trim` keeps the
    file within its limits, in that thread and a transaction of its own. A file that cannot be used is opened again
    after `retry_s`; a batch collects writes for `linger_s`. `schema`, `keys`: as for `SqliteThread`.
    """

    def __init__(
        self,
        path: Path,
        schema: str,
        *,
        trim: Callable[[sqlite3.Connection], None] = lambda _: None,
        functions: Mapping[str, Callable[[object], Value]] = {},
        retry_s: float = 30.0,
        linger_s: float = _LINGER_S,
        monotonic: Callable[[], float] = time.monotonic,
        keys: StateKeys | None = None,
    ) -> None:
        super().__init__(path, _PRAGMAS + schema, monotonic, keys)
        self._trim_file = trim
        self._functions = functions
        self._retry_s = retry_s
        self._linger_s = linger_s
        self._monotonic = monotonic
        # Guarded by `_ready`:
        self._writes: deque[Write] = deque()
        self._reads: deque[_Read] = deque()
        self._pending_bytes = 0
        self._lost_writes = 0
        # Used by the background thread only:
        self._retry_at = float("-inf")
        self._replace_at = float("-inf")
        self._untrimmed_bytes = 0
        self._trim_at = float("-inf")
        self._corrupt_files = 0
        self._locked = False
        self._closing_tries = _CLOSING_TRIES

    # --- any thread --------------------------------------------------------------------------------------------------

    def stats(self) -> SqliteStats:
        return SqliteStats(
            lost_writes=self._lost_writes,
            corrupt_files=self._corrupt_files,
            available=self._database is not None and not self._fault.problem,
            problem=self._fault.problem,
            queued_writes=len(self._writes),
            queued_reads=len(self._reads),
        )

    def write(self, write: Write) -> bool:
        """Queue one write. Returns False if it was dropped because the queue is full or closed."""
        with self._lock:
            if self._closing or self._pending_bytes + write.size_bytes > _PENDING_BYTES:
                self._lost_writes += 1
                return False
            self._writes.append(write)
            self._pending_bytes += write.size_bytes
            if len(self._writes) == 1:
                self._ready.notify()
        return True

    async def read(self, statement: str, values: Row = (), *, timeout_s: float = 1.0) -> list[Row]:
        """Run a query in the background thread; return no rows if the file is unreadable. Raises TimeoutError."""
        return await self._ask(statement, values, timeout_s) or []

    async def erase(self, statement: str, values: Row) -> list[Row]:
        """Run a DELETE that returns its rows, after the writes that wait, and leave no copy in file and log. Raises
        JobStoreUnavailable: something of them may be left.
        """
        try:
            rows = await self._ask(statement, values, _ERASURE_S, erases=True)
        except TimeoutError:
            rows = None
        if rows is None:
            raise JobStoreUnavailable(f"{self._path.name} cannot be written. Erase again later.", retry_after_s=5.0)
        return rows

    async def _ask(self, statement: str, values: Row, timeout_s: float, *, erases: bool = False) -> list[Row] | None:
        """Return the rows of a statement; None if the file cannot be used. Raises TimeoutError."""
        rows: Future[list[Row] | None] = Future()
        with self._ready:
            if self._closing:
                return None
            self._reads.append(_Read(statement, values, rows, self._monotonic() + timeout_s, erases))
            self._ready.notify()
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(rows)

    # --- background thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._open()
        while True:
            reads, writes, closing = self._next_work()
            for read in reads:
                self._run_read(read)
            if writes:
                self._run_writes(writes)
            if closing and not writes:
                break
        self._close_database()

    def _next_work(self) -> tuple[list[_Read], list[Write], bool]:
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

    def _run_read(self, read: _Read) -> None:
        if not (read.rows.running() or read.rows.set_running_or_notify_cancel()):
            return
        rows: list[Row] | None = None
        if read.erases:
            with self._ready:
                writes, self._pending_bytes = list(self._writes), 0
                self._writes.clear()
            if writes:
                self._run_writes(writes)
        try:
            database = self._open_database()
            if database is not None:
                database.execute(f"PRAGMA secure_delete={read.erases:d}")
                rows = database.execute(read.statement, read.values).fetchall()
                if read.erases and truncate_log(database):
                    rows = None  # another program reads the log
        except sqlite3.Error as error:
            self._handle_failure(error)
        except Exception as error:
            log.error("%s: a query failed: %s", self._path, redacted(error))
        if self._locked and self._monotonic() < read.until:
            with self._ready:
                self._reads.append(read)  # (4)
            return
        read.rows.set_result(rows)

    def _run_writes(self, writes: Sequence[Write]) -> None:
        try:
            database = self._open_database()
            if database is None:
                self._lose(writes)
                return
            with database:
                database.execute("BEGIN IMMEDIATE")
                for statement, group in groupby(writes, key=lambda write: write.statement):
                    rows = [one.values() if callable(one.values) else one.values for one in group]
                    many = _of_many_rows(statement)
                    while many and len(rows) >= _ROWS:
                        database.execute(many, [*chain.from_iterable(rows[:_ROWS])])
                        del rows[:_ROWS]
                    database.executemany(statement, rows)
            # Opening or reading it proves nothing: the disk may be full, or read-only.
            self._fault.end(f"{self._path} can be written again; {self._lost_writes} writes were lost")
            self._untrimmed_bytes += sum(write.size_bytes for write in writes)
            writes = ()  # stored, even if the trimming fails
            if self._untrimmed_bytes >= _TRIM_BYTES or self._monotonic() >= self._trim_at:
                self._trim(database)
        except sqlite3.Error as error:
            self._handle_failure(error)
            self._lose(writes)
        except Exception as error:
            self._lose(writes)
            log.error("%s: %d writes were lost: %s", self._path, len(writes), redacted(error))

    def _trim(self, database: sqlite3.Connection) -> None:
        with database:
            database.execute("BEGIN IMMEDIATE")
            self._trim_file(database)
        self._untrimmed_bytes = 0
        self._trim_at = self._monotonic() + _TRIM_S

    def _lose(self, writes: Sequence[Write]) -> None:
        """Count writes that could not be stored as lost, except those of a locked file, which are tried again (4)."""
        with self._ready:
            self._closing_tries -= self._closing
            if self._locked and self._closing_tries >= 0:
                self._writes.extendleft(reversed(writes))
                self._pending_bytes += sum(write.size_bytes for write in writes)
                return
            self._lost_writes += len(writes)

    def _open_database(self) -> sqlite3.Connection | None:
        if self._database is None and self._monotonic() >= self._retry_at:
            self._open()
        return self._database

    def _open(self) -> None:
        self._locked = False
        try:
            self._database = self._connect()
        except (sqlite3.Error, OSError) as error:
            self._handle_failure(error)

    def _prepare(self, database: sqlite3.Connection) -> None:
        for name, function in self._functions.items():
            database.create_function(name, 1, function, deterministic=True)
        super()._prepare(database)

    def _handle_failure(self, error: Exception) -> None:
        """Close the file. (1) Replace a corrupt file at once, (4) open a locked one again, (2) else wait `retry_s`."""
        self._close_database()
        now = self._monotonic()
        self._locked = getattr(error, "sqlite_errorname", "").startswith(_LOCKED)
        if self._locked:
            self._fault.begin(f"{self._path} is locked by another program: new entries wait in memory until it ends.")
            return
        # (1) At most once per `retry_s`: the disk may corrupt the new file too.
        if now >= self._replace_at and self._is_corrupt(error) and self._set_aside() is None:
            self._corrupt_files += 1
            self._replace_at = now + self._retry_s
            log.warning("%s is corrupt (%s). It was renamed to .bad and replaced by a new file.", self._path, error)
            self._open()
            return
        self._retry_at = now + self._retry_s  # (2)
        self._fault.begin(
            f"{self._path} cannot be used ({error}): new entries stay in memory. Retry every {self._retry_s:g} s."
        )


class SqliteStore:
    """A store of the daemon in one file, which its thread reads and writes. `database`: None: only in memory."""

    def __init__(self, database: BackgroundSqlite | None) -> None:
        self.database = database

    def start(self) -> None:
        if self.database is not None:
            self.database.start()

    def close(self) -> None:
        """Write queued records. Blocks for a limited time: call it in a thread."""
        if self.database is not None:
            self.database.close()

    def disk(self) -> SqliteStats | None:
        """Return the state of the file; None without one."""
        return None if self.database is None else self.database.stats()

    def write(self, write: Write) -> None:
        if self.database is not None:
            self.database.write(write)


@lru_cache(16)
def _of_many_rows(statement: str) -> str:
    """Return a statement that inserts `_ROWS` rows like `statement`; "" if it is not an insertion of values. Each
    statement releases the interpreter's lock and takes it again, while the event loop waits for it.
    """
    head, _, row = statement.rpartition(" VALUES ")
    return f"{head} VALUES {', '.join([row] * _ROWS)}" if head else ""


def evict(database: sqlite3.Connection, limit_bytes: int, statement: str) -> None:
    """Run a statement that deletes the oldest rows until the used pages have at most `limit_bytes`. The query of the
    size is cheap, and freed pages are reused before the file grows.
    """
    while True:
        pages, free, size = (
            int(database.execute(f"PRAGMA {name}").fetchone()[0])
            for name in ("page_count", "freelist_count", "page_size")
        )
        if (pages - free) * size <= limit_bytes or database.execute(statement).rowcount == 0:
            return


def truncate_log(database: sqlite3.Connection) -> str:
    """Truncate the write-ahead log; return the error, or "" if it succeeded."""
    (waits_ms,) = database.execute("PRAGMA busy_timeout").fetchone()
    database.execute("PRAGMA busy_timeout=0")
    try:
        is_blocked = database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
    except sqlite3.Error as error:
        return str(error)
    finally:
        database.execute(f"PRAGMA busy_timeout={waits_ms}")
    return "another program reads the file" if is_blocked else ""
