from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Coroutine
from pathlib import Path

import pytest

from causeway_server.edge_node.storage.group_commit import GroupCommit, TableHooks
from causeway_server.router.errors import CausewayError, JobStoreUnavailable

CALLERS = 8


async def begun(wave: Coroutine[None, None, int]) -> asyncio.Task[int]:
    """Return when all callers of a wave wait."""
    task = asyncio.create_task(wave)
    for _ in range(3):
        await asyncio.sleep(0.0)
    return task


async def test_callers_that_come_again_together_share_a_commit(tmp_path: Path) -> None:
    """One that comes alone after them is answered, too."""
    commits: list[int] = []
    file = GroupCommit(
        tmp_path / "test.sqlite",
        "CREATE TABLE rows (number INTEGER)",
        TableHooks(lambda _: None, seal=lambda database: commits.append(database.total_changes)),
        gather_s=60.0,
    )

    def insert(database: sqlite3.Connection) -> None:
        database.execute("INSERT INTO rows VALUES (1)")

    async def wave(callers: int) -> int:
        before = len(commits)
        await asyncio.gather(*[file.run(insert) for _ in range(callers)])
        return len(commits) - before

    first = await begun(wave(CALLERS))
    file.start()
    assert await first == 1
    assert await wave(CALLERS) == 1
    alone = await begun(wave(1))
    file.close()  # ends the wait
    assert await alone == 1
    assert commits[-1] == 2 * CALLERS + 1


async def test_a_corrupt_file_that_cannot_be_renamed_is_an_error_for_its_callers(tmp_path: Path) -> None:
    """The thread survives, and tries the file again with the next caller."""
    file = GroupCommit(tmp_path / "test.sqlite", "CREATE TABLE IF NOT EXISTS rows (number)", TableHooks(lambda _: None))
    (tmp_path / "test.sqlite.bad" / "in the way").mkdir(parents=True)
    file.start()

    def read(database: sqlite3.Connection) -> int:
        if not file.problems:
            raise sqlite3.DatabaseError("database disk image is malformed")
        return int(database.execute("SELECT count(*) FROM rows").fetchone()[0])

    async with asyncio.timeout(60.0):
        with pytest.raises(JobStoreUnavailable):
            await file.run(read)
        assert await file.run(read) == 0
    file.close()


async def test_a_bug_in_one_transaction_is_told_to_its_caller_alone(tmp_path: Path) -> None:
    """What it wrote is undone, and the others are committed."""
    file = GroupCommit(tmp_path / "test.sqlite", "CREATE TABLE IF NOT EXISTS rows (number)", TableHooks(lambda _: None))

    def insert(database: sqlite3.Connection) -> None:
        database.execute("INSERT INTO rows VALUES (1)")

    def fail(database: sqlite3.Connection) -> None:
        insert(database)
        "\udcff".encode()

    callers = asyncio.gather(*[file.run(work) for work in (insert, fail, insert)], return_exceptions=True)
    await asyncio.sleep(0.0)
    file.start()
    async with asyncio.timeout(60.0):
        first, second, third = await callers
    assert (first, third) == (None, None)
    assert isinstance(second, CausewayError)
    assert second.code == "internal_error"
    assert await file.run(lambda database: database.execute("SELECT count(*) FROM rows").fetchone()) == (2,)
    assert file.problems == ()
    file.close()
