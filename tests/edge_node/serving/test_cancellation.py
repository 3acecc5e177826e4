"""A cancellation in the same loop turn in which the awaited event happens is not swallowed."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import threading
from pathlib import Path

import pytest

from causeway_server.edge_node.backends.engine.supervisor import Supervisor
from causeway_server.edge_node.cli.up.child_process import ChildProcess
from causeway_server.edge_node.storage.background_sqlite import BackgroundSqlite, Write
from causeway_server.models.llama_cpp.protocol import EngineOptions


async def tasks_started() -> None:
    """Let the tasks that were started reach their first wait."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_wait_for_readiness(tmp_path: Path) -> None:
    """The ready line arrives while the waiting task is cancelled."""
    child = ChildProcess("program", [sys.executable, "-c", "print('ready url=x')"], tmp_path / "log", {})

    async def cancel_the_other() -> None:
        await child.ready(20.0)
        waiting.cancel()  # its result is there, and it has not run yet

    cancelling = asyncio.create_task(cancel_the_other())
    waiting = asyncio.create_task(child.ready(20.0))
    await tasks_started()
    await child.start()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await cancelling
    assert await child.stop(20.0)


async def test_a_wait_for_the_end(tmp_path: Path) -> None:
    """The program ends while the stopping task is cancelled."""
    child = ChildProcess("program", ["sleep", "600"], tmp_path / "log", {})
    await child.start()

    async def cancel_at_the_end() -> None:
        await child.wait()
        stopping.cancel()

    watching = asyncio.create_task(cancel_at_the_end())
    await tasks_started()  # it waits first, so it is woken first
    stopping = asyncio.create_task(child.stop(20.0))
    with pytest.raises(asyncio.CancelledError):
        await stopping
    await watching
    assert await child.stop(20.0)


async def test_a_read_from_disk(tmp_path: Path) -> None:
    """The rows arrive while the reading task is cancelled."""
    served = threading.Event()

    def tell(_: sqlite3.Connection) -> None:
        served.set()

    journal = BackgroundSqlite(tmp_path / "j.sqlite", "CREATE TABLE t (a)", trim=tell, linger_s=0.0)
    reading = asyncio.create_task(journal.read("SELECT 1", timeout_s=60.0))
    await tasks_started()
    journal.write(Write("INSERT INTO t VALUES (1)", ()))  # written after the read is served
    journal.start()
    try:
        assert served.wait(60.0)  # without a turn of the loop: the rows are on their way
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    finally:
        journal.close()


async def test_a_wait_for_the_engines_end() -> None:
    """The task that closes the supervisor is cancelled as well."""
    keeper = Supervisor(EngineOptions(model_path="/nowhere.gguf"), "model")
    await keeper.start()
    await tasks_started()
    closing = asyncio.create_task(keeper.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
