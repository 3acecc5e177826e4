"""Files of the state folder that another program has locked: a backup, or somebody's `sqlite3`. Nothing is lost."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from causeway_server.edge_node.clock import Clock
from causeway_server.edge_node.storage.background_sqlite import BackgroundSqlite, Write
from causeway_server.edge_node.storage.spend import FILE, SpendStore
from tests.waiting import until

SCHEMA = "CREATE TABLE IF NOT EXISTS numbers (number INTEGER);"
INSERT = "INSERT INTO numbers VALUES (?)"


@contextmanager
def locked(path: Path, how: str) -> Iterator[None]:
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("PRAGMA locking_mode=EXCLUSIVE" if how == "whole" else "SELECT 1")
    database.execute("BEGIN IMMEDIATE")
    yield
    database.rollback()
    database.close()


def numbers(path: Path) -> list[int]:
    with closing(sqlite3.connect(path)) as database:
        return [row[0] for row in database.execute("SELECT number FROM numbers ORDER BY rowid")]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["for writing", "whole"])
async def test_writes_wait_until_the_file_is_free(tmp_path: Path, how: str) -> None:
    """In order, also those that come meanwhile and those of a file that is opened while it is locked."""
    path = tmp_path / "test.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.executescript(f"PRAGMA journal_mode=WAL; {SCHEMA}")
    file = BackgroundSqlite(path, SCHEMA, retry_s=3600.0, linger_s=0.0)
    with locked(path, how):
        file.start()
        file.write(Write(INSERT, (1,)))
        await until(lambda: "locked by another program" in file.stats().problem)
        file.write(Write(INSERT, (2,)))
        file.write(Write(INSERT, (3,)))
    await until(lambda: not file.stats().queued_writes and not file.stats().problem)
    file.close()
    assert numbers(path) == [1, 2, 3]
    assert file.stats().lost_writes == 0


@pytest.mark.slow
async def test_a_file_that_stays_locked_ends_with_the_daemon_and_what_is_lost_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "test.sqlite"
    file = BackgroundSqlite(path, SCHEMA, linger_s=0.0)
    file.start()
    file.write(Write(INSERT, (1,)))
    await until(lambda: path.exists() and file.stats().available and _rows(path) == 1)
    with locked(path, "for writing"):
        file.write(Write(INSERT, (2,)))
        await until(lambda: "locked" in file.stats().problem)
        file.close(timeout_s=60.0)
        assert file.stats().lost_writes == 1


def _rows(path: Path) -> int:
    with closing(sqlite3.connect(path)) as database:
        (count,) = database.execute("SELECT count(*) FROM numbers").fetchone()
    return int(count)


def _problem(spend: SpendStore) -> str:
    stats = spend.disk()
    return "" if stats is None else stats.problem


@pytest.mark.slow
async def test_a_locked_file_at_the_start_forgets_no_spending(tmp_path: Path) -> None:
    clock = Clock(unix=lambda: 1_780_000_000.0)
    spend = SpendStore(tmp_path, clock)
    await spend.load()
    spend.add(7.0)
    spend.close()
    again = SpendStore(tmp_path, clock)
    with locked(tmp_path / FILE, "whole"):
        starting = asyncio.create_task(again.load())
        await until(lambda: "locked" in _problem(again))
    await starting
    assert again.current.usd_today == 7.0
    again.close()
