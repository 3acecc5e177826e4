"""SIGKILL and power cuts at the operations of the outbox's file, and full disks: what was acknowledged is there."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from causeway_server.router.jobs.job import JobState
from causeway_server.router.serving.at_rest.state_keys import FILE as KEYS

from .killed_outbox import AT_ONCE, NOTES, WAVES, Death, Life, said
from .power_cuts import build, read_log
from .support import erased, opened

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("cc") is None or sys.platform != "linux", reason="needs a C compiler on Linux"),
]
KILLS = 24
CUTS = 50


class Outboxes:
    """A program that runs one life after the other, with the shim preloaded."""

    def __init__(self, shim: Path) -> None:
        self._program = subprocess.Popen(
            [sys.executable, "-m", "tests.edge_node.jobs.killed_outbox"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "LD_PRELOAD": str(shim)},
        )

    def live(self, life: Life) -> Death:
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        Path(life.folder).mkdir(parents=True, exist_ok=True)
        self._program.stdin.write(msgspec.json.encode(life).decode() + "\n")
        self._program.stdin.flush()
        return msgspec.json.decode(self._program.stdout.readline(), type=Death)

    def close(self) -> None:
        assert self._program.stdin is not None
        self._program.stdin.close()
        self._program.wait()


@pytest.fixture(scope="module")
def outboxes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outboxes]:
    shim = tmp_path_factory.mktemp("shim") / "disk_shim.so"
    source = Path(__file__).with_name("disk_shim.c")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(shim), str(source), "-ldl"], check=True)
    program = Outboxes(shim)
    yield program
    program.close()


async def assert_kept(folder: Path, notes: Sequence[str]) -> None:
    """Each acknowledged job is there once, in its last acknowledged state or a later one; running ones are taken back.
    Webhooks wait for each end, no more and no fewer.

    A request is there as long as it may run, and then in no file; a result if and only if the job succeeded.
    """
    store = await opened(folder)
    await store.recover()
    assert store.problems == ()
    jobs = await store.list_owned("me", "", 1000)
    by_text = {job.key: job for job in jobs}
    assert len(by_text) == len(jobs)
    last = {text: what for what, _, text in (note.partition(" ") for note in notes)}
    for text, state in last.items():
        found = by_text[text].state.value
        assert found == state or state in ("accepted", "queued"), (text, state, found)
    assert store.stats.unfinished == sum(not job.has_ended for job in jobs)
    for job in jobs:
        _, result = await store.get(job.id, "me")
        assert result == (b"answer" if job.state.value == "succeeded" else b"")
    told = [job for job in jobs if job.webhook and job.has_ended]
    assert [job.webhook_status for job in told] == ["pending"] * len(told)
    assert {due.job for due in await store.run(store.webhooks.due, 1000, (), ())} == {job.id for job in told}
    assert store.stats.webhooks_due == len(told)
    assert store.stats.bytes == sum(job.body_bytes + job.result_bytes for job in jobs)
    claimed = await store.claim("edge", 1000)
    assert [one.body for one in claimed] == [said(one.job.key) for one in claimed]
    ended = [said(job.key) for job in jobs if job.has_ended and job.state is not JobState.DEAD]
    await erased(folder, ended)
    store.close()


def notes_of(folder: Path) -> list[str]:
    notes = folder / NOTES
    return notes.read_text().splitlines() if notes.exists() else []


def recorded(outboxes: Outboxes, folder: Path) -> tuple[int, Path]:
    """The number of operations of a whole life, and their log."""
    log = folder / "log"
    assert not outboxes.live(Life(str(folder / "whole"), log=str(log))).killed
    return len(read_log(log)), log


async def test_what_was_acknowledged_survives_a_kill_at_each_commit_boundary(
    outboxes: Outboxes, tmp_path: Path
) -> None:
    for boundary in itertools.count():
        folder = tmp_path / str(boundary)
        death = outboxes.live(Life(str(folder), kill_boundary=boundary))
        await assert_kept(folder, notes_of(folder))
        if not death.killed:
            break
    assert boundary > 2 * WAVES


async def test_what_was_acknowledged_survives_a_kill_between_commits(outboxes: Outboxes, tmp_path: Path) -> None:
    count, _ = recorded(outboxes, tmp_path)
    for at in range(0, count, max(1, count // KILLS)):
        folder = tmp_path / str(at)
        outboxes.live(Life(str(folder), kill_at=at))
        await assert_kept(folder, notes_of(folder))


async def test_what_was_acknowledged_survives_a_power_cut(outboxes: Outboxes, tmp_path: Path) -> None:
    _, log = recorded(outboxes, tmp_path)
    operations, chance = read_log(log), random.Random(7)
    acknowledged = 0
    for number in range(CUTS):
        place = tmp_path / f"cut-{number}"
        notes = build(place, operations, chance.randrange(len(operations) + 1), chance)
        shutil.copy(tmp_path / "whole" / KEYS, place)  # synced before the first content
        acknowledged += len(notes)
        await assert_kept(place, notes)
    assert acknowledged > CUTS


async def test_a_full_disk_refuses_and_loses_nothing(outboxes: Outboxes, tmp_path: Path) -> None:
    """Callers try again until there is room: in the end each job is there once."""
    count, _ = recorded(outboxes, tmp_path)
    for start in range(0, count, count // 8):
        folder = tmp_path / str(start)
        assert not outboxes.live(Life(str(folder), full_from=start, full_until=start + 40)).killed
        notes = (folder / NOTES).read_text().splitlines()
        assert sum(note.startswith("accepted") for note in notes) == WAVES * AT_ONCE
        await assert_kept(folder, notes)
