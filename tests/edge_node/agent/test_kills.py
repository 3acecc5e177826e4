"""SIGKILL of a real process before each operation of its disk, and in the middle of each write, twice in a row."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from .fleet import Publisher, TestDevice
from .killed_device import Death, Life

pytestmark = pytest.mark.slow

SECOND_KILLS = (0, 2, 5, 11)
"""Where the next life ends as well, in turn; some are the first things that a start does."""


class Devices:
    """A program that runs one life after the other."""

    def __init__(self, publisher: Publisher) -> None:
        self._program = subprocess.Popen(
            [sys.executable, "-m", "tests.edge_node.agent.killed_device", str(publisher.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def live(self, state: Path, *, good: bool, kill_at: int | None = None, torn: bool = False) -> Death:
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        self._program.stdin.write(msgspec.json.encode(Life(str(state), good, kill_at, torn)).decode() + "\n")
        self._program.stdin.flush()
        return msgspec.json.decode(self._program.stdout.readline(), type=Death)

    def close(self) -> None:
        assert self._program.stdin is not None
        self._program.stdin.close()
        self._program.wait()


@pytest.fixture
def devices(publisher: Publisher) -> Iterator[Devices]:
    program = Devices(publisher)
    yield program
    program.close()


@pytest.mark.parametrize(("good", "torn"), [(True, False), (False, True)])
async def test_a_device_that_is_killed_twice(
    publisher: Publisher, device: TestDevice, devices: Devices, tmp_path: Path, good: bool, torn: bool
) -> None:
    """It always starts with a verified bundle, and ends with the wanted one, or with the old one and the reason."""
    first = publisher.release()
    await device.change()
    second = publisher.release()
    killed, at = True, 0
    while killed:
        place = tmp_path / f"life-{at}"
        shutil.copytree(device.state, place, symlinks=True)
        death = devices.live(place, good=good, kill_at=at, torn=torn)
        killed = death.died
        assert death.booted == first
        if killed:
            death = devices.live(place, good=good, kill_at=SECOND_KILLS[at % len(SECOND_KILLS)], torn=torn)
            assert death.booted in ((first, second) if death.booted else ("",))
        last = devices.live(place, good=good) if death.died else death
        assert last.booted in (first, second)
        if good:
            assert (last.running, last.quarantined) == (second, ())
        else:
            assert (last.running, last.quarantined) == (first, (second,))
        shutil.rmtree(place)
        at += 1
    assert at > 30
