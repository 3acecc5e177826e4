"""The device's own time, and jobs whose clocks jump; a month without a network; when a cloud that comes back gets
jobs."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from causeway_server.edge_node.clock import Clock, ClockMark, DeviceTime, is_synchronised, system_clock
from causeway_server.edge_node.config.schema import DeviceFilesConfig, OutboxConfig
from causeway_server.edge_node.files.store import DeviceFileStore
from causeway_server.edge_node.jobs.runner import CloudGate
from causeway_server.router.parts.uploads import UploadTerms
from causeway_server.router.types import RoutingHints

from ..device import running
from .cloud import JobCloud
from .killed_outbox import new_job
from .support import PROMPT, accepted, away, ended, opened, submit, text_of, view

DAY_S = 86400.0
STEP_S = 0.01


class Clocks:
    """Both clocks of a device and its boot."""

    def __init__(self) -> None:
        self.monotonic = 1000.0
        self.unix = 1.7e9
        self.boot = "one"
        self.synchronised = True

    def clock(self) -> Clock:
        return Clock(lambda: self.monotonic, lambda: self.unix, self.boot, lambda: self.synchronised)

    def reboot(self, off_s: float, *, unix: float | None = None) -> None:
        """Start the device again after `off_s`; the wall clock is then right, or as given, and not synchronised."""
        self.monotonic, self.boot, self.synchronised = 20.0, self.boot + "'", False
        self.unix = self.unix + off_s + 20.0 if unix is None else unix

    def pass_s(self, seconds: float) -> None:
        self.monotonic += seconds
        self.unix += seconds


def restarted(clocks: Clocks, earlier: DeviceTime) -> DeviceTime:
    """The device's time in the next run of the daemon, `pass` later."""
    mark = msgspec.json.decode(msgspec.json.encode(earlier.mark()), type=type(earlier.mark()))
    clocks.pass_s(5.0)
    later = DeviceTime(clocks.clock())
    later.restore(mark)
    return later


def test_the_wall_clock_may_jump_while_the_daemon_runs_and_over_its_restart() -> None:
    clocks = Clocks()
    device = DeviceTime(clocks.clock())
    device.restore(None)
    clocks.pass_s(100.0)
    clocks.unix -= 30 * DAY_S
    assert device.now() == pytest.approx(100.0)
    assert restarted(clocks, device).now() == pytest.approx(105.0)


@pytest.mark.parametrize(
    ("off_s", "counted_s"), [(3600.0, 3600.0), (-30 * DAY_S, 0.0)], ids=["off", "no battery clock"]
)
def test_a_reboot_counts_what_the_wall_clock_says_and_never_backwards(off_s: float, counted_s: float) -> None:
    clocks = Clocks()
    device = DeviceTime(clocks.clock())
    device.restore(None)
    clocks.pass_s(100.0)
    mark = device.mark()
    clocks.monotonic, clocks.boot = 20.0, "two"
    clocks.unix += off_s + 20.0
    later = DeviceTime(clocks.clock())
    later.restore(mark)
    assert later.now() == pytest.approx(100.0 + counted_s + 20.0)
    clocks.unix += 365 * DAY_S  # the time is set over the network
    assert later.now() == pytest.approx(100.0 + counted_s + 20.0)


def test_a_wall_clock_that_was_never_right_before_a_reboot_expires_nothing() -> None:
    """A device without a battery clock accepts jobs in 1970, or where it was switched off, and gets the time later."""
    clocks = Clocks()
    clocks.unix, clocks.synchronised = 100.0, False
    device = DeviceTime(clocks.clock())
    device.restore(None)
    clocks.pass_s(100.0)
    mark = device.mark()
    clocks.reboot(10.0, unix=1.7e9)
    clocks.synchronised = True
    later = DeviceTime(clocks.clock())
    later.restore(mark)
    assert later.now() == pytest.approx(120.0)


@pytest.mark.parametrize("restarts", [0, 1], ids=["one run", "another run before the clock is right"])
def test_the_time_off_is_counted_once_the_clock_is_right_again(restarts: int) -> None:
    clocks = Clocks()
    device = DeviceTime(clocks.clock())
    device.restore(None)
    clocks.pass_s(100.0)
    mark = device.mark()
    right = clocks.unix + 3600.0
    clocks.reboot(3600.0, unix=5.0)
    later = DeviceTime(clocks.clock())
    later.restore(mark)
    assert later.now() == pytest.approx(120.0)
    passed_s = 20.0
    for _ in range(restarts):
        later, passed_s = restarted(clocks, later), passed_s + 5.0
    clocks.unix, clocks.synchronised = right + passed_s, True
    for _ in range(2):
        assert later.now() == pytest.approx(100.0 + 3600.0 + passed_s)
    clocks.unix += 365 * DAY_S  # it jumps
    assert restarted(clocks, later).now() == pytest.approx(100.0 + 3600.0 + passed_s + 5.0)


def test_a_date_that_was_set_by_hand_before_a_reboot_is_not_counted() -> None:
    """The kernel takes the clock for one that is not synchronised then."""
    clocks = Clocks()
    device = DeviceTime(clocks.clock())
    device.restore(None)
    device.mark()
    clocks.pass_s(100.0)
    right = clocks.unix
    clocks.unix, clocks.synchronised = right - 365 * DAY_S, False
    mark = device.mark()
    clocks.reboot(0.0, unix=right + 20.0)
    clocks.synchronised = True
    later = DeviceTime(clocks.clock())
    later.restore(mark)
    assert later.now() == pytest.approx(120.0)


def test_a_note_of_an_older_version_says_nothing_of_the_time_off() -> None:
    clocks = Clocks()
    device = DeviceTime(clocks.clock())
    device.restore(None)
    clocks.pass_s(100.0)
    fields = msgspec.to_builtins(device.mark())
    del fields["anchor"]
    clocks.reboot(DAY_S)
    clocks.synchronised = True
    later = DeviceTime(clocks.clock())
    later.restore(msgspec.convert(fields, ClockMark))
    assert later.now() == pytest.approx(120.0)


def test_the_kernel_tells_whether_its_clock_is_synchronised() -> None:
    assert is_synchronised() in (False, True)
    assert system_clock().synchronised is is_synchronised


@pytest.mark.parametrize("jump_s", [40 * DAY_S, -40 * DAY_S])
async def test_a_reboot_with_an_old_clock_expires_neither_jobs_nor_files(tmp_path: Path, jump_s: float) -> None:
    """The wall clock is wrong before the reboot and right after it."""
    clocks = Clocks()
    clocks.unix, clocks.synchronised = 1.7e9 - jump_s, False
    store = await opened(tmp_path, clock=clocks.clock())
    await store.accept(new_job(store, "job"), b"{}")
    store.close()
    files = DeviceFileStore(tmp_path, DeviceFilesConfig(accept=True, ttl_s=DAY_S), 1000, clocks.clock())
    async with files.write("me", 4) as writer:
        await writer.write(b"text")
        kept = await writer.finish("note.txt", UploadTerms(purpose="user_data"), RoutingHints())
    files.close()
    clocks.reboot(0.0, unix=1.7e9)
    clocks.synchronised = True
    store = await opened(tmp_path, clock=clocks.clock())
    assert await store.expire() == 0
    assert len(await store.claim("edge", 1)) == 1
    store.close()
    files = DeviceFileStore(tmp_path, DeviceFilesConfig(accept=True, ttl_s=DAY_S), 1000, clocks.clock())
    await files.start()
    await files.sweep()
    assert await files.read(files.get(kept.id, "me")) == b"text"
    files.close()


@pytest.mark.slow
async def test_after_a_month_offline_the_rest_arrives_once_and_what_expired_is_told(tmp_path: Path) -> None:
    """What was private never left, though the policy would have sent it."""
    passed_s = 0.0
    clock = Clock(lambda: time.monotonic() + passed_s, lambda: time.time() - passed_s, "one")
    cloud = away()
    async with running(tmp_path, cloud=cloud, jobs=PROMPT, clock=clock, probe_interval_s=0.02) as device:
        device.engine.fault = "refuse"
        private = await accepted(device, "private", tags="cloud,private", deadline_ms=int(45 * DAY_S * 1000))
        short = await accepted(device, "short", tags="cloud")
        long = [
            await accepted(device, f"long-{number}", tags="cloud", deadline_ms=int(45 * DAY_S * 1000), key=f"k{number}")
            for number in range(5)
        ]
        passed_s = 30 * DAY_S
        expired = await ended(device, short)
        assert (expired["status"], expired["error"]["code"]) == ("expired", "deadline_exceeded")
        assert 'causeway_edge_jobs_ended_total{state="expired"} 1.0' in (await device.get("/metrics")).body.decode()
    async with running(tmp_path, cloud=cloud, jobs=PROMPT, clock=clock, probe_interval_s=0.02) as device:
        assert {(await view(device, job))["status"] for job in long} == {"queued"}
        await cloud.come_back()
        for job in long:
            assert text_of(await ended(device, job)) == "cloud says so"
        assert text_of(await ended(device, private)) == "edge says so"
    assert cloud.effects == {f"long-{number}": 1 for number in range(5)}


@pytest.mark.slow
async def test_a_month_offline_with_a_full_outbox_is_told_and_loses_nothing_else(tmp_path: Path) -> None:
    """What gave way, was refused or expired is told; what expired leaves room; the rest arrives once.

    One client holds eight of nine jobs.
    """
    passed_s = 0.0
    clock = Clock(lambda: time.monotonic() + passed_s, lambda: time.time() + passed_s, "one")
    small = msgspec.structs.replace(PROMPT, max_jobs=9, bulk_share=0.5)
    month: dict[str, Any] = {"tags": "cloud", "deadline_ms": int(45 * DAY_S * 1000)}
    cloud = away()
    async with running(tmp_path, cloud=cloud, jobs=small, clock=clock, probe_interval_s=0.02) as device:
        bulk = [await accepted(device, f"bulk-{number}", priority="bulk", **month) for number in range(4)]
        kept = [await accepted(device, f"kept-{number}", **month) for number in range(6)]
        short = [await accepted(device, f"short-{number}", tags="cloud") for number in range(2)]
        refused = await submit(device, "refused", **month)
        assert (refused.status, refused.code) == (429, "outbox_full")
        for job in bulk:
            dropped = await view(device, job)
            assert (dropped["status"], dropped["error"]["code"]) == ("cancelled", "job_dropped")
        passed_s = 30 * DAY_S
        for job in short:
            expired = await ended(device, job)
            assert (expired["status"], expired["error"]["code"]) == ("expired", "deadline_exceeded")
        metrics = (await device.get("/metrics")).body.decode()
        assert "causeway_edge_jobs_dropped_total 4.0" in metrics
        assert 'causeway_edge_jobs_ended_total{state="expired"} 2.0' in metrics
        kept += [await accepted(device, f"later-{number}", **month) for number in range(2)]
        assert (await submit(device, "refused", **month)).code == "outbox_full"
    async with running(tmp_path, cloud=cloud, jobs=small, clock=clock, probe_interval_s=0.02) as device:
        assert {(await view(device, job))["status"] for job in kept} == {"queued"}
        await cloud.come_back()
        for job in kept:
            assert text_of(await ended(device, job)) == "cloud says so"
    assert cloud.effects == {f"kept-{number}": 1 for number in range(6)} | {"later-0": 1, "later-1": 1}


async def test_a_job_does_not_run_before_its_time(tmp_path: Path) -> None:
    passed_s = 0.0
    clock = Clock(lambda: time.monotonic() + passed_s, lambda: time.time() - passed_s, "one")
    async with running(tmp_path, cloud=JobCloud(), jobs=PROMPT, clock=clock) as device:
        job = await accepted(device, not_before_ms=3600_000)
        assert (await view(device, job))["not_before_at"] is not None
        assert device.engine.calls == []
        passed_s = 3600.0
        assert (await ended(device, job))["status"] == "succeeded"


def sent(gate: CloudGate, seconds: float, *, start: float = 100.0, reachable: bool = True) -> list[float]:
    """Return the times at which a device with a backlog sends, while the cloud is reachable."""
    times = [start + STEP_S * step for step in range(int(seconds / STEP_S))]
    return [now for now in times if gate.may_send(now, reachable=reachable, backlog=True)]


@pytest.mark.slow
def test_a_thousand_devices_do_not_storm_the_cloud_that_comes_back() -> None:
    config = OutboxConfig(jitter_s=30.0, cloud_rate_per_s=1.0)
    first = Counter[int]()
    for seed in range(1000):
        gate = CloudGate(config, random.Random(seed))
        assert not sent(gate, 1.0, start=0.0, reachable=False)
        first[int(sent(gate, 31.0)[0])] += 1
    assert sum(first.values()) == 1000
    assert max(first.values()) < 2 * 1000 / config.jitter_s


def test_a_backlog_is_sent_at_three_times_the_steady_rate_at_most() -> None:
    gate = CloudGate(OutboxConfig(jitter_s=0.0, cloud_rate_per_s=2.0), random.Random(1))
    times = sent(gate, 60.0)
    assert 5.5 < len(times) / 60.0 <= 6.1
    assert min(later - earlier for earlier, later in zip(times, times[2:], strict=False)) >= 1.0 / 6.0


def test_without_a_backlog_there_is_no_pause_at_first() -> None:
    gate = CloudGate(OutboxConfig(jitter_s=30.0), random.Random(1))
    assert gate.may_send(100.0, reachable=True, backlog=False)


@pytest.mark.parametrize(("asked_s", "least_s", "most_s"), [(None, 2.0, 2.5), (5.0, 5.0, 6.25), (3600.0, 60.0, 75.0)])
def test_a_cloud_that_asks_for_a_pause_gets_it(asked_s: float | None, least_s: float, most_s: float) -> None:
    """At most a minute, and each device another one."""
    pauses = []
    for seed in range(100):
        gate = CloudGate(OutboxConfig(jitter_s=0.0), random.Random(seed))
        assert gate.may_send(100.0, reachable=True, backlog=True)
        gate.pause(100.0, asked_s)
        pauses.append(gate.wait_s(100.0))
        assert not gate.may_send(100.0 + least_s - STEP_S, reachable=True, backlog=True)
        assert gate.may_send(100.0 + most_s, reachable=True, backlog=True)
    assert least_s <= min(pauses) < least_s + 0.2 * (most_s - least_s)
    assert max(pauses) > most_s - 0.2 * (most_s - least_s)
