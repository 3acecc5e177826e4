"""Run outboxes that die: a program that reads a `Life` from each line of stdin and answers with how it ended.

Each life is a forked process with a real outbox on a real file. It writes a note after each thing that the outbox
acknowledged; `disk_shim.c` is preloaded and counts every operation on the file, and on the notes.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from causeway_server.edge_node.clock import system_clock
from causeway_server.edge_node.config.schema import OutboxConfig
from causeway_server.edge_node.jobs.record import Claimed, EdgeJob, JobAnswer
from causeway_server.edge_node.jobs.store import JobOutbox
from causeway_server.router.errors import CloudFailed, JobStoreUnavailable
from causeway_server.router.jobs.job import JobEvent

T = TypeVar("T")
NOTES = "notes"
WEBHOOK = "https://example.com/hook"  # of the jobs that are not bulk
WAVES, AT_ONCE = 4, 6


class Life(msgspec.Struct, frozen=True):
    """One run in `folder`. Numbers are of operations: where it is killed, where the disk is full, where it has room.

    `kill_boundary`: of commits; each fsync has one before it and one after it.
    """

    folder: str
    kill_at: int = -1
    kill_boundary: int = -1
    full_from: int = -1
    full_until: int = -1
    log: str = ""  # file for the recorded operations


class Death(msgspec.Struct, frozen=True):
    killed: bool


def new_job(store: JobOutbox, text: str) -> EdgeJob:
    now = store.time.now()
    return EdgeJob(
        owner="me",
        key=text,
        digest=text,
        priority="bulk" if "bulk" in text else "standard",
        endpoint="/v1/chat/completions",
        model="auto",
        may_leave=True,
        lane="edge",
        due=now,
        deadline=now + 1000.0,
        accepted_unix=0.0,
    )


def said(text: str) -> bytes:
    """The request of a job."""
    return f"<{text} said this>".encode()


async def insist(ask: Callable[[], Awaitable[T]]) -> T:
    """Try until the disk has room."""
    while True:
        with contextlib.suppress(JobStoreUnavailable):
            return await ask()


async def live(life: Life) -> None:
    """Accept jobs in waves, and end them in every way. What fails because the disk is full is tried again."""
    notes = os.open(Path(life.folder) / NOTES, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    store = JobOutbox(Path(life.folder), OutboxConfig(), system_clock(), erase_after_s=0.0)
    store.start()

    def note(what: str, text: str) -> None:
        os.write(notes, f"{what} {text}\n".encode())

    async def accept(text: str) -> None:
        job = msgspec.structs.replace(new_job(store, text), webhook="" if "bulk" in text else WEBHOOK)
        await insist(lambda: store.accept(job, said(text)))
        note("accepted", text)

    async def succeed(job: EdgeJob, text: str) -> None:
        answer = JobAnswer(b"answer", "miss", "edge", "d")
        await insist(lambda: store.succeed(job, answer))
        note("succeeded", text)

    async def end(claimed: Claimed, number: int) -> None:
        job, text = claimed.job, claimed.job.key
        if number % 4 == 0:
            await succeed(job, text)
            return
        ends = (
            lambda: store.postpone(job, store.time.now() + 500.0, CloudFailed("again"), decision="d"),
            lambda: store.fail(job, JobEvent.FAIL, CloudFailed("no")),
            lambda: store.release(job, until=store.time.now() + 500.0),
        )
        await insist(ends[number % 4 - 1])
        note(("waiting", "failed", "queued")[number % 4 - 1], text)

    await insist(store.open)
    await insist(store.recover)
    for wave in range(WAVES):
        await asyncio.gather(*[accept(f"{'bulk' if one % 3 else 'job'}-{wave}-{one}") for one in range(AT_ONCE)])
        claimed = await insist(lambda: store.claim("edge", 4))
        await asyncio.gather(*[end(one, number) for number, one in enumerate(claimed)])
    store.close()


def fork(life: Life, shim: ctypes.CDLL) -> Death:
    child = os.fork()
    if child == 0:
        try:
            log = os.open(life.log, os.O_WRONLY | os.O_CREAT) if life.log else -1
            shim.shim_arm(
                life.folder.encode(),
                ctypes.c_long(life.kill_at),
                ctypes.c_long(life.kill_boundary),
                ctypes.c_long(life.full_from),
                ctypes.c_long(life.full_until),
                log,
            )
            asyncio.run(live(life))
            os._exit(0)
        except BaseException as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            os._exit(3)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return Death(killed=True)
    if status:
        raise RuntimeError(f"the outbox ended with {os.waitstatus_to_exitcode(status)}")
    return Death(killed=False)


def main() -> None:
    shim = ctypes.CDLL(os.environ["LD_PRELOAD"])
    for line in sys.stdin:
        sys.stdout.write(msgspec.json.encode(fork(msgspec.json.decode(line, type=Life), shim)).decode() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
