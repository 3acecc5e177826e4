"""The box's own time, and jobs whose clocks jump; a month without a network."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from edge_node.clock import Clock
from edge_node.jobs.box_time import BoxTime

from ..edge.box import running
from .cloud import JobCloud
from .support import PROMPT, accepted, away, ended, text_of, view

DAY_S = 86400.0


class Clocks:
    """Both clocks of a box and its boot."""

    def __init__(self) -> None:
        self.monotonic = 1000.0
        self.unix = 1.7e9
        self.boot = "one"

    def clock(self) -> Clock:
        return Clock(lambda: self.monotonic, lambda: self.unix, self.boot)

    def pass_s(self, seconds: float) -> None:
        self.monotonic += seconds
        self.unix += seconds


def restarted(clocks: Clocks, earlier: BoxTime) -> BoxTime:
    """The box's time in the next run of the daemon, `pass` later."""
    mark = msgspec.json.decode(msgspec.json.encode(earlier.mark()), type=type(earlier.mark()))
    clocks.pass_s(5.0)
    later = BoxTime(clocks.clock())
    later.restore(mark)
    return later


def test_the_wall_clock_may_jump_while_the_daemon_runs_and_over_its_restart() -> None:
    clocks = Clocks()
    box = BoxTime(clocks.clock())
    box.restore(None)
    clocks.pass_s(100.0)
    clocks.unix -= 30 * DAY_S
    assert box.now() == pytest.approx(100.0)
    assert restarted(clocks, box).now() == pytest.approx(105.0)


@pytest.mark.parametrize(
    ("off_s", "counted_s"), [(3600.0, 3600.0), (-30 * DAY_S, 0.0)], ids=["off", "no battery clock"]
)
def test_a_reboot_counts_what_the_wall_clock_says_and_never_backwards(off_s: float, counted_s: float) -> None:
    clocks = Clocks()
    box = BoxTime(clocks.clock())
    box.restore(None)
    clocks.pass_s(100.0)
    mark = box.mark()
    clocks.monotonic, clocks.boot = 20.0, "two"
    clocks.unix += off_s + 20.0
    later = BoxTime(clocks.clock())
    later.restore(mark)
    assert later.now() == pytest.approx(100.0 + counted_s + 20.0)
    clocks.unix += 365 * DAY_S  # the time is set over the network
    assert later.now() == pytest.approx(100.0 + counted_s + 20.0)


@pytest.mark.slow
async def test_after_a_month_offline_the_rest_arrives_once_and_what_expired_is_told(tmp_path: Path) -> None:
    """What was private never left, though the policy would have sent it."""
    passed_s = 0.0
    clock = Clock(lambda: time.monotonic() + passed_s, lambda: time.time() - passed_s, "one")
    cloud = away()
    async with running(tmp_path, cloud=cloud, jobs=PROMPT, clock=clock, probe_interval_s=0.02) as box:
        box.engine.fault = "refuse"
        private = await accepted(box, "private", tags="cloud,private", deadline_ms=int(45 * DAY_S * 1000))
        short = await accepted(box, "short", tags="cloud")
        long = [
            await accepted(box, f"long-{number}", tags="cloud", deadline_ms=int(45 * DAY_S * 1000), key=f"k{number}")
            for number in range(5)
        ]
        passed_s = 30 * DAY_S
        expired = await ended(box, short)
        assert (expired["status"], expired["error"]["code"]) == ("expired", "deadline_exceeded")
        assert 'causeway_edge_jobs_ended_total{state="expired"} 1.0' in (await box.get("/metrics")).body.decode()
    async with running(tmp_path, cloud=cloud, jobs=PROMPT, clock=clock, probe_interval_s=0.02) as box:
        assert {(await view(box, job))["status"] for job in long} == {"queued"}
        await cloud.come_back()
        for job in long:
            assert text_of(await ended(box, job)) == "cloud says so"
        assert text_of(await ended(box, private)) == "edge says so"
    assert cloud.effects == {f"long-{number}": 1 for number in range(5)}


async def test_a_job_does_not_run_before_its_time(tmp_path: Path) -> None:
    passed_s = 0.0
    clock = Clock(lambda: time.monotonic() + passed_s, lambda: time.time() - passed_s, "one")
    async with running(tmp_path, cloud=JobCloud(), jobs=PROMPT, clock=clock) as box:
        job = await accepted(box, not_before_ms=3600_000)
        assert (await view(box, job))["not_before_at"] is not None
        assert box.engine.calls == []
        passed_s = 3600.0
        assert (await ended(box, job))["status"] == "succeeded"
