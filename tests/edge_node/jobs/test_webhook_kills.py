"""SIGKILL between the end of a job and its webhook, and between a webhook and its note, on real processes."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from causeway_server.edge_node.jobs import FILE
from tests.cloud_pool.jobs.webhook_receiver import Receiver, receiving
from tests.waiting import until

from .support import opened

pytestmark = pytest.mark.slow


async def started(*arguments: str) -> asyncio.subprocess.Process:
    program = (sys.executable, "-m", "tests.edge_node.jobs.webhook_process", *arguments)
    return await asyncio.create_subprocess_exec(*program, stdout=asyncio.subprocess.PIPE)


async def killed(process: asyncio.subprocess.Process) -> None:
    process.kill()
    await process.wait()


async def test_a_webhook_survives_three_kills_and_keeps_its_id(tmp_path: Path) -> None:
    """Killed after the end of the job, then twice while the receiver had the webhook and had not answered."""
    async with receiving() as receiver:
        first = await started(str(tmp_path), f"http://127.0.0.1:{receiver.port}/hook")
        assert first.stdout is not None
        async with asyncio.timeout(60.0):
            assert await first.stdout.readline() == b"ended\n"
        await killed(first)
        assert receiver.deliveries == 0
        receiver.go_on.clear()
        for number in (1, 2):
            sender = await started(str(tmp_path))
            await until(partial(arrived, receiver, number))
            await killed(sender)
        receiver.go_on.set()
        last = await started(str(tmp_path))
        await until(lambda: receiver.deliveries == 3)
        await killed_once_noted(last, tmp_path)
        assert len({headers["webhook-id"] for headers, _ in receiver.arrived}) == 1
        assert len({body for _, body in receiver.arrived}) == 1


def arrived(receiver: Receiver, count: int) -> bool:
    return receiver.deliveries >= count


async def killed_once_noted(process: asyncio.subprocess.Process, folder: Path) -> None:
    """Wait for the note in the file, and kill; the next start has nothing to send."""

    def waiting() -> int:
        with closing(sqlite3.connect(folder / FILE)) as database:
            return int(database.execute("SELECT count(*) FROM webhooks").fetchone()[0])

    await until(lambda: waiting() == 0)
    await killed(process)
    store = await opened(folder)
    (job,) = await store.list_owned("me", "", 10)
    assert (store.stats.webhooks_due, job.webhook_status) == (0, "delivered")
    store.close()
