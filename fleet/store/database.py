"""`Store`: the database of a control plane, its transactions, and the errors of a lost database. `GroupCommit` commits
many items at once: while a transaction runs, further items wait, and the next one takes all of them.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shlex
import sqlite3
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Generic, TypeVar

import anyio
import msgspec
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from anyio import to_thread
from asyncpg import InterfaceError as AsyncpgInterfaceError
from asyncpg import PostgresError
from sqlalchemy import (
    URL,
    Column,
    ColumnElement,
    Connection,
    Dialect,
    Table,
    Text,
    bindparam,
    event,
    func,
    make_url,
    select,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from causeway_server.router.errors import CausewayError, ConfigError

from .tables import metadata

_WRITES = "causeway_writes"
_DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg"}
_CONNECT_S, _BUSY_S = 5.0, 5.0
STATEMENT_S = 10.0
_POOL = 8
_RETRY_S = 5.0
# Advisory locks of PostgreSQL: only one of several starting processes migrates, and only one runs the controller.
_MIGRATION_LOCK, _LEADERSHIP_LOCK = 0x63617573, 0x63747264

Still = Callable[[], Awaitable[None]]
"""Checks that a lock is still held. It raises StoreUnavailable if the lock was lost with its connection."""
Item = TypeVar("Item")
Result = TypeVar("Result")
Transaction = Callable[[], AbstractAsyncContextManager[AsyncConnection]]
Work = Callable[[AsyncConnection, Sequence[Item]], Awaitable[Sequence[Result | CausewayError]]]
MAX_ITEMS = 500  # in a transaction
MAX_WAITING = 20_000
log = logging.getLogger(__name__)


class StoreUnavailable(CausewayError, status=503, code="database_unavailable", retryable=True):
    """The control plane's database cannot be reached. The change was not made, or can safely be repeated."""


class Store:
    """A database, accessed only through `read` and `write`, which raise StoreUnavailable while it is unreachable. The
    next transaction connects again; a running one is shielded from cancellation, as it ends within seconds and a
    cancelled statement would break its connection.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        """Create the store. Use `Store.open` instead."""
        self._engine = engine
        self.is_sqlite = engine.dialect.name == "sqlite"
        # SQLite has one writer: writers of this process wait here in order, others by the busy timeout.
        self._turn = anyio.Lock() if self.is_sqlite else None

    @classmethod
    async def open(cls, url: str, statement_s: float = STATEMENT_S, downgrade: str | None = None) -> Store:
        """Connect, and bring the tables up to date. Raises ConfigError for the URL or a newer version's
        database, or StoreUnavailable.

        Args:
            url: ``sqlite:///PATH`` or ``postgresql://USER:PASSWORD@HOST/NAME``.
            statement_s: PostgreSQL's limit for a statement, and the maximum wait for a lock or a connection.
            downgrade: The revision of an earlier version, to which the database is taken back instead; None: none.
        """
        engine = _engine(_with_driver(url), statement_s)
        store = cls(engine)
        try:
            with _translated():
                if store.is_sqlite:
                    await to_thread.run_sync(_try_sqlite, engine.url.database or "")
                async with engine.connect() as connection:
                    await connection.execution_options(**{_WRITES: True})
                    await connection.run_sync(_migrate, downgrade)
        except BaseException:
            await engine.dispose()
            raise
        return store

    async def close(self) -> None:
        """Close every connection."""
        await self._engine.dispose()

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """Open a transaction that only reads. Raises StoreUnavailable: the database is unreachable."""
        with anyio.CancelScope(shield=True), _translated():
            async with self._engine.connect() as connection, connection.begin():
                yield connection

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """Open a transaction that is committed, and durable, after the block.

        Raises StoreUnavailable; the commit may still have happened.
        """
        async with self._turn or nullcontext():
            with anyio.CancelScope(shield=True), _translated():
                async with self._engine.connect() as connection:
                    await connection.execution_options(**{_WRITES: True})
                    async with connection.begin():
                        yield connection

    @asynccontextmanager
    async def leadership(self) -> AsyncIterator[Still | None]:
        """Try to become the leader, the process that runs the controller, for the block. Raises StoreUnavailable.

        The lock ends with the process (with SQLite it is on a file beside the database), and only saves work: two
        controllers could not both change a rollout, see `change_rollout`. Yields None if another process leads;
        otherwise a function that raises StoreUnavailable once the lock is lost.
        """
        if self.is_sqlite:
            async with _file_lock(f"{self._engine.url.database}.controller") as leads:
                yield _nothing_lost if leads else None
            return
        with _translated():
            async with self._engine.connect() as connection:

                async def still() -> None:
                    with anyio.CancelScope(shield=True), _translated():
                        await connection.scalar(text("SELECT 1"))

                try:
                    await connection.execution_options(isolation_level="AUTOCOMMIT")
                    taking = text("SELECT pg_try_advisory_lock(:lock)")  # held until the connection closes
                    yield still if await connection.scalar(taking, {"lock": _LEADERSHIP_LOCK}) else None
                finally:
                    with anyio.CancelScope(shield=True):
                        await connection.invalidate()  # closing the connection releases the lock


async def _nothing_lost() -> None:
    """Do nothing, because a file lock cannot be lost."""


def insert_of(connection: AsyncConnection, table: Table) -> sqlite.Insert | postgresql.Insert:
    """Return the INSERT construct of the database's dialect, which supports conflict clauses."""
    return sqlite.insert(table) if connection.dialect.name == "sqlite" else postgresql.insert(table)


def one_of(connection: AsyncConnection, column: Column[str], values: Iterable[str]) -> ColumnElement[bool]:
    """Return the condition that a column has one of these values; the SQL does not depend on their number."""
    return among(connection.dialect, column, None, as_list(connection.dialect, values))


def among(dialect: Dialect, column: Column[str], name: str | None, value: Any = None) -> ColumnElement[bool]:
    """Return the condition that a column has one of the values of the parameter `name`, which `as_list` creates."""
    if dialect.name == "sqlite":
        each = func.json_each(bindparam(name, value, type_=Text)).table_valued("value")
        return column.in_(select(each.c.value))
    return column == func.any(bindparam(name, value, type_=postgresql.ARRAY(Text)))


def as_list(dialect: Dialect, values: Iterable[str]) -> Any:
    """Return strings in the form of a single parameter of a statement."""
    chosen = list(values)
    return msgspec.json.encode(chosen).decode() if dialect.name == "sqlite" else chosen


def _with_driver(url: str) -> URL:
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise ConfigError(f"{url!r} is not a database URL.", where="--database") from error
    driver = _DRIVERS.get(parsed.get_backend_name())
    if driver is None:
        raise ConfigError(
            f"{parsed.get_backend_name()} is not supported. Give sqlite:///PATH or postgresql://HOST/NAME.",
            where="--database",
        )
    return parsed.set(drivername=driver)


def _engine(url: URL, statement_s: float) -> AsyncEngine:
    if url.get_backend_name() == "postgresql":
        arguments: dict[str, Any] = {"timeout": min(_CONNECT_S, statement_s), "command_timeout": statement_s}
        return create_async_engine(url, connect_args=arguments, pool_size=_POOL, pool_timeout=statement_s)
    engine = create_async_engine(url, pool_size=_POOL, pool_timeout=STATEMENT_S)
    busy_s = min(_BUSY_S, statement_s)
    event.listen(engine.sync_engine, "connect", lambda connection, _: _prepare_sqlite(connection, busy_s))
    event.listen(engine.sync_engine, "begin", _begin_sqlite)
    return engine


def _try_sqlite(path: str) -> None:
    """Open the file once synchronously: after a failure aiosqlite's thread would outlive the loop."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA schema_version")


def _prepare_sqlite(connection: Any, busy_s: float) -> None:
    connection.isolation_level = None  # the driver must not begin transactions itself, see `_begin_sqlite`
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=FULL", f"busy_timeout={busy_s * 1000:.0f}"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Any) -> None:
    """Take the write lock at once: a reader that writes later can fail with "busy"."""
    writes = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


_LOST = (DBAPIError, sqlite3.Error, PoolTimeoutError, PostgresError, AsyncpgInterfaceError, OSError)


@contextmanager
def _translated() -> Iterator[None]:
    """Translate errors of an unreachable database to StoreUnavailable. Errors of the statement itself are re-raised."""
    try:
        yield
    except (IntegrityError, ProgrammingError, CausewayError):
        raise
    except _LOST as error:
        silent = "no answer in time" if isinstance(error, TimeoutError) else type(error).__name__
        reason = str(getattr(error, "orig", None) or error).strip().partition("\n")[0] or silent
        message = f"the control plane's database does not answer: {reason}"
        raise StoreUnavailable(message, retry_after_s=_RETRY_S) from error


def _migrate(connection: Connection, downgrade: str | None) -> None:
    """Apply the revisions that the database lacks, or undo those after `downgrade`, in a transaction of its own.

    Raises ConfigError: this version does not know the database's revision, or the database has not reached `downgrade`.
    """
    config = _alembic_config(connection)
    known = [script.revision for script in ScriptDirectory.from_config(config).walk_revisions()]  # newest first
    with connection.begin():
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _MIGRATION_LOCK})
        found = MigrationContext.configure(connection).get_current_revision()
        if found is not None and found not in known:
            url = connection.engine.url.set(drivername=connection.dialect.name)
            place = shlex.quote(url.render_as_string(hide_password=True))
            raise ConfigError(
                f"The database has revision {found}, from a newer version of causeway-fleet; this version knows "
                f"only {known[0]} and older. Start the newer version. Or take the database back with this command of "
                f"the newer version: `causeway-fleet downgrade {known[0]} --database {place}`"
                f"{'. Write the password instead of ***' if url.password else ''}.",
                where="--database",
            )
        if downgrade is None:
            command.upgrade(config, "head")
        elif found is not None and downgrade in known[known.index(found) :]:
            command.downgrade(config, downgrade)
        else:
            raise ConfigError(f"The database has revision {found}, not `{downgrade}` or a later one.", where="REVISION")


def _alembic_config(connection: Connection) -> Config:
    """Return Alembic's configuration for this connection."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    config.attributes["metadata"] = metadata
    return config


@asynccontextmanager
async def _file_lock(path: str) -> AsyncIterator[bool]:
    """Yield whether this process now holds the lock of a file."""
    handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(handle)


class TooManyMessages(CausewayError, status=503, code="overloaded", retryable=True):
    """The control plane gets more messages than its database can handle."""


class GroupCommit(Generic[Item, Result]):
    """Handles many items in one transaction (group commit); `submit` returns when its item is committed, while `run`
    runs.

    `transaction`: `Store.write` or `Store.read`. `work` handles items in order, and returns for each a result or the
    error that refuses it. `transactions` and `items` count the committed ones.
    """

    def __init__(self, transaction: Transaction, work: Work[Item, Result]) -> None:
        self._transaction = transaction
        self._work = work
        self._waiting: deque[tuple[Item, asyncio.Future[Result]]] = deque()
        self._wake = asyncio.Event()
        self.transactions = 0
        self.items = 0

    async def submit(self, item: Item) -> Result:
        """Submit an item, and return its result after the commit.

        Raises CausewayError if it is refused, StoreUnavailable, or TooManyMessages if too many wait.
        """
        if len(self._waiting) >= MAX_WAITING:
            raise TooManyMessages("The control plane is overloaded.", retry_after_s=30.0)
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        self._wake.set()
        return await future

    async def run(self) -> None:
        """Handle submitted items until cancelled."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._waiting:
                    count = min(len(self._waiting), MAX_ITEMS)
                    await self._run_group([self._waiting.popleft() for _ in range(count)])
        finally:
            for _, future in self._waiting:
                future.cancel()

    async def _run_group(self, group: Sequence[tuple[Item, asyncio.Future[Result]]]) -> None:
        try:
            async with self._transaction() as connection:
                results = await self._work(connection, [item for item, _ in group])
        except CausewayError as error:
            results = [error] * len(group)
        except Exception as error:
            if len(group) > 1:  # one item is at fault, so each is handled alone
                for pair in group:
                    await self._run_group([pair])
                return
            log.exception("A database transaction failed.")
            results = [CausewayError(f"The control plane failed: {type(error).__name__}.")]
        except BaseException:  # cancelled: the server stops
            for _, future in group:
                future.cancel()
            raise
        else:
            self.transactions += 1
            self.items += len(group)
        for (_, future), result in zip(group, results, strict=True):
            if future.done():  # its caller was cancelled, because the server stops
                continue
            if isinstance(result, CausewayError):
                future.set_exception(result)
            else:
                future.set_result(result)
