"""`python -m tests`: run the folders of tests in pytests, four at a time.

`--quick` runs the tests that need no services in two pytests, each of which imports its part of the product only.
The servers of a folder end with it. A folder's output is printed whole when it ends and is kept in `.run/tests`.
Temporary files are in memory where that has room, because tests write what must be on the disk before they go on.
Ctrl-C and SIGTERM let the running folders stop their servers and begin no more; a second one kills them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

TESTS = Path(__file__).parent
LOGS = TESTS.parent / ".run" / "tests"
WORKERS = 4  # on two cores or more: rooms wait for time-outs and for servers that start
# Names in one string share a pytest, because each pytest imports the product again: about five seconds of a processor.
# A room that is named here leaves the pytest of its package. The longest begin first, so that none is alone at the end.
TOGETHER = (
    *("cloud_pool", "edge_node", "bed", "fleet/operators", "edge_node/agent", "e2e/identity e2e/console"),
    *("models", "cloud_pool/dispatch cloud_pool/jobs cloud_pool/streams", "check docs policies", "e2e"),
    *("conformance clients", "cloud_pool/http cloud_pool/redis cloud_pool/storage", "fleet"),
    *("attacks bench edge_node/jobs router", "models/train"),
)
APART = tuple(name for names in TOGETHER for name in names.split() if "/" in name)
# Of about the same time each; the other rooms have few tests of the fast tier, and to import them takes long.
QUICK = ("edge_node attacks", "models router cloud_pool fleet policies bench")
NOT_QUICK = ("edge_node/agent", "fleet/operators", "fleet/server", "models/train")
QUICK_ARGUMENTS = (
    "--quiet",
    "--hypothesis-profile=quick",
    *("-m", "not (triton or redis or nats or kafka or mosquitto or postgres or chromium or engine or slow)"),
)
NOTHING_SELECTED = 5  # pytest's exit status
_MEMORY = Path("/dev/shm")
_ROOM_BYTES = 4 << 30
_SUMMARY = "short test summary info"


class Suite:
    """Runs folders. `failures` are lines for the end of the output; `counts` are pytest's words: passed, skipped.

    Folders with a space between them share a pytest, which gets `arguments`. Rooms of `apart` are left out of others.
    `temporary` is the folder of their temporary files.
    """

    def __init__(
        self,
        folders: Sequence[str],
        workers: int,
        logs: Path,
        temporary: Path,
        *,
        apart: Sequence[str] = (),
        arguments: Sequence[str] = (),
    ) -> None:
        self.failures: list[str] = []
        self.counts: Counter[str] = Counter()
        self.interrupted = 0
        """The first signal that stopped the suite, or 0."""
        self._waiting = deque(folders)
        self._workers = workers
        self._logs = logs
        self._temporary = temporary
        self._apart = apart
        self._arguments = arguments
        self._running: set[asyncio.subprocess.Process] = set()

    async def run(self) -> None:
        """Run all folders. Returns when the last one has ended."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self.stop, number)
        self._logs.mkdir(parents=True, exist_ok=True)
        async with asyncio.TaskGroup() as workers:
            for _ in range(self._workers):
                workers.create_task(self._work())

    def stop(self, number: int) -> None:
        """Interrupt the running folders; the second time kill them."""
        self._waiting.clear()
        for process in self._running:
            with suppress(ProcessLookupError):
                if self.interrupted:
                    os.killpg(process.pid, signal.SIGKILL)
                else:
                    process.send_signal(signal.SIGINT)
        self.interrupted = self.interrupted or number

    async def _work(self) -> None:
        while self._waiting:
            folder = self._waiting.popleft()
            print(f"{folder} begins", flush=True)
            began = time.monotonic()
            status, output = await self._run(folder)
            print(f"\n{output.rstrip()}\n{folder} ended after {time.monotonic() - began:.0f} s\n", flush=True)
            self._count(folder, status, output)

    async def _run(self, folder: str) -> tuple[int, str]:
        """Return pytest's exit status and its output."""
        log = self._logs / f"{folder.strip('/').replace('/', '-').replace(' ', '+')}.log"
        with log.open("wb") as out:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "pytest", "--no-header", *folder.split(), *self._ignored_below(folder)),
                *self._arguments,
                # Short: the path of a Unix socket has at most 107 bytes.
                f"--basetemp={tempfile.mkdtemp(prefix='', dir=self._temporary)}",
                env={**os.environ, "TMPDIR": str(self._temporary)},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,  # the terminal's Ctrl-C reaches it once, through `stop`
            )
        self._running.add(process)
        if self.interrupted:
            process.send_signal(signal.SIGINT)
        try:
            status = await process.wait()
        except asyncio.CancelledError:  # the other worker cannot write its output
            process.send_signal(signal.SIGINT)
            await process.wait()
            raise
        self._running.discard(process)
        return status, log.read_text(encoding="utf-8", errors="replace")

    def _ignored_below(self, folder: str) -> list[str]:
        named = {Path(one).resolve() for one in folder.split()}
        return [f"--ignore={TESTS / room}" for room in self._apart if TESTS / room not in named]

    def _count(self, folder: str, status: int, output: str) -> None:
        last = output.rstrip().rpartition("\n")[2].partition(" in ")[0]
        self.counts.update({word.removesuffix("s"): int(number) for number, word in re.findall(r"(\d+) (\w+)", last)})
        if status != 0 and not (status == NOTHING_SELECTED and self._arguments):
            lines = output.rpartition(_SUMMARY)[2].splitlines() if _SUMMARY in output else []
            failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
            self.failures += failed or [f"{folder}: pytest ended with status {status}"]


def folders_with_tests() -> list[str]:
    """Return the folders with tests in the order in which they begin; those with a space between share a pytest."""
    found = {folder.name for folder in TESTS.iterdir() if any(folder.rglob("test_*.py"))}
    return [*TOGETHER, *sorted(found.difference(*map(str.split, TOGETHER)))]


def in_memory() -> Path | None:
    """Return the file system in memory, if it has room for temporary files."""
    is_there = _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK)
    return _MEMORY if is_there and shutil.disk_usage(_MEMORY).free >= _ROOM_BYTES else None


def main() -> int:
    """Return 0 if every test passed, 1 if not, 128 and the signal's number if one stopped the suite."""
    parser = argparse.ArgumentParser(prog="python -m tests", description=__doc__)
    parser.add_argument("folders", nargs="*", help="default: all")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--quick", action="store_true", help="only the tests that are fast and need no services")
    parser.add_argument("--pytest", default="", metavar="ARGUMENTS", help="with --quick: more arguments of pytest")
    parser.add_argument("--workers", type=int, default=WORKERS if cores > 1 else 1, help="folders at a time")
    parser.add_argument("--logs", type=Path, default=LOGS, help="keep the outputs here (default: .run/tests)")
    chosen = parser.parse_args()
    if chosen.workers < 1:
        parser.error("--workers: at least 1")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="t", dir=in_memory(), ignore_cleanup_errors=True) as temporary:
        Path(temporary).chmod(0o711)  # PostgreSQL does not run as root
        suite = _suite(chosen, Path(temporary))
        asyncio.run(suite.run())
    counts = ", ".join(f"{number} {word}" for word, number in suite.counts.items())
    print(*suite.failures, f"{counts or 'no tests ran'} in {time.monotonic() - began:.0f} s", sep="\n", flush=True)
    if suite.interrupted:
        return 128 + suite.interrupted
    return 1 if suite.failures else 0


def _suite(chosen: argparse.Namespace, temporary: Path) -> Suite:
    if chosen.folders:
        return Suite(chosen.folders, chosen.workers, chosen.logs, temporary)
    if chosen.quick:
        folders = [" ".join(os.path.relpath(TESTS / name) for name in group.split()) for group in QUICK]
        arguments = [*QUICK_ARGUMENTS, *shlex.split(chosen.pytest)]
        return Suite(folders, chosen.workers, chosen.logs, temporary, apart=NOT_QUICK, arguments=arguments)
    folders = [" ".join(os.path.relpath(TESTS / name) for name in names.split()) for names in folders_with_tests()]
    return Suite(folders, chosen.workers, chosen.logs, temporary, apart=APART)


if __name__ == "__main__":
    sys.exit(main())
