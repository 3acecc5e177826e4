"""Run the programs of a page as a reader would: in one shell session, in an empty folder, with our commands on PATH.

Where the system allows it, a page runs in a network namespace of its own, so that its ports are free whatever else runs
on this machine; elsewhere it runs on the machine's own ports.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

from .pages import Block
from .tables import ROOT

TIMEOUT_S = 300.0


class PageRun(msgspec.Struct, frozen=True):
    """`status` None: the page did not end in time."""

    status: int | None
    output: str


@functools.cache
def _namespace() -> tuple[str, ...]:
    """The command in front of a page that gives it a network of its own; empty where the system refuses one."""
    for flags in (("--net",), ("--user", "--map-root-user", "--net")):
        command = ("unshare", *flags, "sh", "-c", 'ip link set lo up 2>/dev/null || ifconfig lo up; exec "$@"', "sh")
        tool = shutil.which("unshare") and (shutil.which("ip") or shutil.which("ifconfig"))
        if tool and subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0:
            return command
    return ()


def script_of(blocks: Iterable[Block], folder: Path) -> str:
    """One shell script of all blocks that can run here. Python programs and files are written into `folder`."""
    lines = ["set -euo pipefail"]
    for block in blocks:
        if block.needs:
            continue
        if block.file:
            (folder / f"block-{block.line}").write_text(block.text, encoding="utf-8")
            lines.append(f"mkdir -p $(dirname '{block.file}'); cp block-{block.line} '{block.file}'")
        elif block.language == "sh":
            lines += [f"echo '--- line {block.line}'", block.text]
        elif block.language == "python":
            (folder / f"block-{block.line}.py").write_text(block.text, encoding="utf-8")
            lines += [f"echo '--- line {block.line}'", f"python block-{block.line}.py"]
    return "\n".join(lines) + "\n"


def run_page(blocks: Iterable[Block], folder: Path) -> PageRun:
    """Run the blocks in order; afterwards nothing that they started is left."""
    script = folder / "page.sh"
    script.write_text(script_of(blocks, folder), encoding="utf-8")
    environment = {
        "HOME": str(folder),
        "LANG": "C.UTF-8",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "TERM": "dumb",
    }
    log = folder / "page.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*_namespace(), "bash", str(script)],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
    return PageRun(status, log.read_text(encoding="utf-8", errors="replace"))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the page's whole session: first politely, so that Triton's launcher takes its server along."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(1.0)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
