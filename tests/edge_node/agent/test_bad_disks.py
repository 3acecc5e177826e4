"""Power cuts and full disks at each operation of a change, of one that commits and of one that is undone."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from causeway_server.router.bundle.protocol import DeviceState

from .disks import FullDisk, PowerCuts
from .fleet import Publisher, TestDevice

pytestmark = pytest.mark.slow

IDLE, TRIAL = DeviceState.IDLE, DeviceState.TRIAL
STATES_PER_CUT, STATES_AT_THE_END = 2, 12


async def finish(device: TestDevice, bundle: str, *, steps: int = 60) -> None:
    """Let the device go on, with as many healthy requests as it needs, until it runs a bundle and is idle."""
    for _ in range(steps):
        await device.agent.advance()
        if (device.agent.state, device.agent.running) == (IDLE, bundle):
            return
        if device.agent.state is TRIAL:
            device.host.serve(100)
            device.time.pass_s(300.0)
    raise AssertionError(f"stuck in {device.agent.row}")


async def fail(device: TestDevice) -> None:
    """Let the trial fail."""
    await device.until(TRIAL)
    await device.agent.advance()
    device.host.serve(200, errors=20)
    await device.until(IDLE)


def serves_verified(device: TestDevice, bundles: set[str]) -> None:
    assert device.booted.bundle is not None
    assert device.booted.bundle.id in bundles
    device.booted.store.load(device.booted.bundle.id)


@pytest.mark.parametrize("good", [True, False])
async def test_a_power_cut_at_each_write(publisher: Publisher, device: TestDevice, tmp_path: Path, good: bool) -> None:
    """Whatever the file system may have kept, the device starts with a verified bundle and gets to the wanted one.

    What it has decided and said to others (committed, quarantined) is not forgotten.
    """
    first = publisher.release()
    await device.change()
    cuts = PowerCuts(device.folder)
    device.disk = cuts.disk
    device.start()
    cuts.start()
    second = publisher.release()
    await (finish(device, second) if good else fail(device))
    shutil.rmtree(device.folder / "tuf")
    total = len(cuts.operations)
    assert total > 30
    for cut in range(total):
        for state in range(STATES_PER_CUT):
            after = TestDevice(
                cuts.build(tmp_path / f"cut-{cut}-{state}", cut, random.Random(1000 * cut + state)), publisher
            )
            serves_verified(after, {first, second})
            if second in after.agent.row.quarantined:
                assert after.agent.running == first
            else:
                await finish(after, second)
            shutil.rmtree(after.state)
    for state in range(STATES_AT_THE_END):
        after = TestDevice(cuts.build(tmp_path / f"end-{state}", total, random.Random(state)), publisher)
        assert (after.agent.running, after.agent.state) == (second if good else first, IDLE)
        assert list(after.agent.row.quarantined) == ([] if good else [second])


@pytest.mark.parametrize("good", [True, False])
async def test_a_disk_that_is_full_from_each_write_on(
    publisher: Publisher, device: TestDevice, tmp_path: Path, good: bool
) -> None:
    """The device serves a verified bundle all the time, also over a restart, and goes on when there is room."""
    first = publisher.release()
    await device.change()
    second = publisher.release()
    shutil.copytree(device.state, tmp_path / "saved", symlinks=True)
    refused = 1
    at = 0
    while refused:
        place = tmp_path / f"full-{at}"
        shutil.copytree(tmp_path / "saved", place, symlinks=True)
        full = TestDevice(place, publisher)
        disk = full.disk = FullDisk(at)
        full.start()
        for _ in range(12):
            await full.agent.advance()
            assert full.host.bundle in (first, second)
            if full.agent.state is TRIAL:
                full.host.serve(100, errors=0 if good else 50)
                full.time.pass_s(300.0)
        full.start()
        serves_verified(full, {first, second})
        refused, disk.room = disk.refused, True
        if good or second not in full.agent.row.quarantined:
            await finish(full, second)
        shutil.rmtree(place)
        at += 1
    assert at > 20
