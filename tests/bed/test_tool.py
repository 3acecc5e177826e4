"""Beds and benchmarks end what they start: at their end, after a fault, on Ctrl-C and on SIGTERM."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

Found = TypeVar("Found")
ROOT = Path(__file__).parents[2]
TOOL = """
import asyncio, subprocess, sys
from tests.tool import run_tool

SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
DEAF = [*SLEEP[:2], "import signal; signal.signal(15, signal.SIG_IGN); " + SLEEP[2]]
PARENT = [sys.executable, "-c", f"import subprocess as s; print(s.Popen({SLEEP!r}, stdout=s.DEVNULL).pid, flush=True)"]

async def work(how):
    children = [subprocess.Popen(one, stdout=subprocess.PIPE, start_new_session=True) for one in (SLEEP, DEAF, PARENT)]
    for child in children[:2]:
        child.stdout.readline()
    orphan = int(children[2].stdout.readline())
    children[2].wait()
    print("pids", children[0].pid, children[1].pid, orphan, flush=True)
    try:
        if how == "fault":
            raise RuntimeError("a bug")
        if how == "wait":
            await asyncio.sleep(600)
        if how in ("raise", "return"):
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                if how == "raise":
                    sys.exit("what the tool started has ended")
    finally:
        print("cleaned up", flush=True)
    return 3

sys.exit(run_tool(lambda: asyncio.run(work(sys.argv[1])), grace_s=0.5))
"""  # fmt: skip


@pytest.mark.parametrize(
    ("start", "how", "number", "status"),
    [
        ("", "wait", signal.SIGTERM, 143),
        ("", "wait", signal.SIGINT, 130),
        ("import signal; signal.signal(2, signal.SIG_IGN)", "wait", signal.SIGTERM, 143),  # in a shell's background
        ("", "raise", signal.SIGTERM, 143),  # its own children got the signal first
        ("", "return", signal.SIGTERM, 143),
        ("", "fault", None, 1),
        ("", "end", None, 3),
    ],
)
def test_nothing_that_a_tool_started_outlives_it(start: str, how: str, number: int | None, status: int) -> None:
    """Also a process whose parent is gone, and one that ignores SIGTERM; and the tool's own clean-up runs."""
    tool = subprocess.Popen([sys.executable, "-c", start + TOOL, how], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert tool.stdout is not None
    pids = [int(pid) for pid in tool.stdout.readline().split()[1:]]
    assert len(pids) == 3
    if number is not None:
        tool.send_signal(number)
    assert (tool.stdout.read(), tool.wait(60)) == ("cleaned up\n", status)
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []


@pytest.mark.slow
def test_a_real_bed_ends_its_control_plane(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.bench", "rollouts", "--devices", "2"]
    with (tmp_path / "log").open("wb") as log:
        bed = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env={**os.environ, "TMPDIR": str(tmp_path)})
    plane = until(lambda: next((one for one in psutil.Process(bed.pid).children() if "serve" in _command(one)), None))
    bed.send_signal(signal.SIGTERM)
    assert bed.wait(60) == 128 + signal.SIGTERM
    assert not plane.is_running()
    assert list(tmp_path.glob("fleet-bed-*")) == []


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # a command of the bed's that has ended meanwhile
        return []


def until(find: Callable[[], Found | None]) -> Found:
    deadline = time.monotonic() + 120.0
    while (found := find()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


PROGRAMS_OF_TOOLS = {
    "bed/ledger.py",
    "bed/replica.py",
    "bench/decoding/xllamacpp_server.py",
    "bench/fleet/load.py",
    "bench/fleet/server.py",
    "bench/http_upstream.py",
    "bench/peers/load.py",
    "bench/streaming/load.py",
    "bench/streaming/servers.py",
    "bench/whole/bare.py",
    "bench/whole/load.py",
}
"""What tools start: their tool ends them."""


def test_every_tool_runs_so() -> None:
    files = [path for room in ("bed", "bench") for path in sorted((ROOT / "tests" / room).rglob("*.py"))]
    starts = {str(path.relative_to(ROOT / "tests")): _start(path.read_text()) for path in files}
    bare = {name for name, start in starts.items() if start and "run_tool(" not in start}
    assert bare == PROGRAMS_OF_TOOLS


def _start(text: str) -> str:
    found = re.search(r'^if __name__ == "__main__":\n(?s:.*)', text, re.MULTILINE)
    return "" if found is None else found[0]
