"""What was deleted is in no file of the outbox's folder, byte for byte."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import shutil
import sqlite3
from pathlib import Path

import pytest

from causeway_server.edge_node.clock import Clock, system_clock
from causeway_server.edge_node.jobs import FILE
from causeway_server.edge_node.jobs.record import JobAnswer
from causeway_server.edge_node.jobs.schema import SCHEMA
from causeway_server.edge_node.jobs.store import JobOutbox
from causeway_server.edge_node.storage.group_commit import LogErasure
from causeway_server.edge_node.storage.sealed import PAGE_BYTES, padded, unpadded
from tests.waiting import until

from .killed_outbox import new_job
from .support import erased, opened, readable

NEVER_S = 1e9
SAID = b"the patient's name is Ada"
ANSWER = b"Ada is well"


async def cancelled(store: JobOutbox, body: bytes) -> None:
    accepted = await store.accept(new_job(store, "one"), body)
    await store.cancel(accepted.job.id, "me")


async def test_nothing_is_left_of_jobs_that_were_cancelled_or_purged(tmp_path: Path) -> None:
    store = await opened(tmp_path, is_readable=True)
    accepted = await store.accept(new_job(store, "two"), SAID)
    assert readable(tmp_path, [SAID])
    (claimed,) = await store.claim("edge", 1)
    await store.succeed(claimed.job, JobAnswer(ANSWER, "miss", "edge", "d"))
    await erased(tmp_path, [SAID])
    assert (await store.get(accepted.job.id, "me"))[1] == ANSWER
    await store.purge(accepted.job.id, "me")
    await erased(tmp_path, [ANSWER])
    await cancelled(store, SAID)
    await erased(tmp_path, [SAID])
    store.close()


async def test_nothing_is_left_after_a_kill_and_a_restart(tmp_path: Path) -> None:
    """The copy is what a kill leaves before the log was truncated."""
    store = await opened(tmp_path / "first", erase_after_s=NEVER_S, is_readable=True)
    await cancelled(store, SAID)
    shutil.copytree(tmp_path / "first", tmp_path / "killed")
    store.close()
    assert readable(tmp_path / "killed", [SAID])
    restarted = await opened(tmp_path / "killed", is_readable=True)
    await erased(tmp_path / "killed", [SAID])
    restarted.close()


async def test_a_stopped_daemon_leaves_nothing_although_another_program_has_the_file_open(tmp_path: Path) -> None:
    store = await opened(tmp_path, erase_after_s=NEVER_S, is_readable=True)
    await cancelled(store, SAID)
    other = sqlite3.connect(tmp_path / FILE)
    other.execute("SELECT count(*) FROM jobs").fetchall()
    store.close()
    assert not readable(tmp_path, [SAID])
    other.close()


async def test_a_reader_delays_the_erasure_and_nothing_else(tmp_path: Path) -> None:
    """It is told, and tried again."""
    passed_s = 0.0
    system = system_clock()
    store = await opened(
        tmp_path, clock=Clock(lambda: system.monotonic() + passed_s, system.unix, system.boot_id), is_readable=True
    )
    reader = sqlite3.connect(tmp_path / FILE, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM jobs").fetchall()
    await cancelled(store, SAID)
    await until(lambda: any("another program" in problem for problem in store.problems))
    accepted = await store.accept(new_job(store, "while it reads"), b"body")
    assert readable(tmp_path, [SAID])
    reader.close()
    passed_s = 60.0
    await store.get(accepted.job.id, "me")
    await erased(tmp_path, [SAID])
    await until(lambda: not store.problems)
    store.close()


@pytest.mark.slow
async def test_no_copy_stays_where_rows_moved_between_pages(tmp_path: Path) -> None:
    """Jobs of many sizes end in another order than they came."""
    chance, store = random.Random(7), await opened(tmp_path, erase_after_s=NEVER_S, is_readable=True)
    sizes = chance.choices((20, 100, 300, 900, 5000), k=1500)
    bodies = [f"<{number:06}>".encode() * (size // 8) for number, size in enumerate(sizes)]
    accepted = await asyncio.gather(
        *[store.accept(new_job(store, str(number)), body) for number, body in enumerate(bodies)]
    )
    cancelled = chance.sample(range(len(bodies)), 1400)
    for start in range(0, len(cancelled), 50):
        await asyncio.gather(*[store.cancel(accepted[number].job.id, "me") for number in cancelled[start : start + 50]])
    kept = {number: body for number, body in enumerate(bodies) if number not in cancelled}
    assert {int(claimed.job.key): claimed.body for claimed in await store.claim("edge", 200)} == kept
    store.close()
    found = re.findall(rb"<([0-9]{6})>", (tmp_path / FILE).read_bytes())
    assert {int(number) for number in found} == kept.keys()


def test_no_byte_of_a_body_lies_in_a_page_that_rows_share() -> None:
    """The sizes are around those at which a page is full, and at which a row's header grows."""
    sizes = (7, 915, 916, 923, 1015, 1016, 1023, 2036, 7136, 8155, 8156, 8163, 1_048_556, 1_048_563, 2_999_996)
    with contextlib.closing(sqlite3.connect(":memory:")) as database:
        database.execute(f"PRAGMA page_size={PAGE_BYTES}")
        database.executescript(SCHEMA)
        for seq, size in enumerate(sizes):
            database.execute("INSERT INTO requests VALUES (?, ?)", (seq, padded(size * b"\xee")))
        for seq, size in enumerate(sizes):
            (stored,) = database.execute("SELECT body FROM requests WHERE seq = ?", (seq,)).fetchone()
            assert unpadded(stored) == size * b"\xee"
        content = database.serialize()
    pages = [content[start : start + PAGE_BYTES] for start in range(0, len(content), PAGE_BYTES)]
    holding = [page for page in pages if 7 * b"\xee" in page]
    assert len(holding) == sum(-(-(size + 4) // (PAGE_BYTES - 4)) for size in sizes)
    assert {page[0] for page in holding} == {0}, "a page of rows begins with 13"


def test_the_log_is_truncated_where_nobody_calls_and_soon_in_any_case(tmp_path: Path) -> None:
    now = 100.0
    erasure = LogErasure(tmp_path / FILE, 1.0, lambda: now)
    assert erasure.wait_s() is None
    erasure.note()
    assert erasure.wait_s() == pytest.approx(1.0)
    now = 100.9
    erasure.note()
    assert erasure.wait_s() == pytest.approx(0.1)
    now = 105.0
    assert erasure.wait_s() == pytest.approx(0.02)
    now = 110.0
    assert erasure.wait_s() == 0.0
