"""`python -m tests.bench.hops`: the files of ours that one streamed answer of the device passes, in order.

Starts a daemon with the default policy, lets it answer once, and traces a second, cacheable, streamed request on a new
connection: `sys.setprofile` in the daemon's event loop, and in every thread of the engine child. A file counts when a
function of it runs; periodic tasks of the daemon do not. Prints the table of router/README.md; `--write` stores it.

A `sitecustomize` module on PYTHONPATH calls `install` in both processes; SIGUSR2 starts and ends the tracing.
"""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import psutil

from tests.tool import run_tool

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "router" / "README.md"
BEGIN, END = "<!-- hops -->\n", "<!-- /hops -->\n"
MAX_DAEMON_FILES = 29
_CHILD = "models.llama_cpp.process.child"
_TIMEOUT_S = 60.0
_PERIODIC = ("_every", "_supervise")  # of the daemon; of an engine's supervisor


class Hops(NamedTuple):
    """Paths relative to the repository, in the order in which their first function ran."""

    daemon: list[str]
    child: list[str]


def measure() -> Hops:
    """Start a daemon, trace one streamed answer, and stop the daemon."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        code = f"from pathlib import Path\n\nfrom tests.bench.hops import install\n\ninstall(Path({name!r}))\n"
        (folder / "sitecustomize.py").write_text(code)
        with _daemon(folder) as (daemon, url):
            _answer(url, "turn on the lamp in the kitchen")
            time.sleep(0.3)  # its bookkeeping is not the next answer's
            (child,) = [one for one in psutil.Process(daemon).children() if _CHILD in one.cmdline()]
            for pid, file in ((daemon, "daemon"), (child.pid, "child")):
                _toggle(pid, folder / f"{file}.on")
            _answer(url, "wake me up at six am")
            time.sleep(0.3)  # the bookkeeping of the request follows in the loop's next turn
            for pid, file in ((daemon, "daemon"), (child.pid, "child")):
                _toggle(pid, folder / f"{file}.json")
        return Hops(*(json.loads((folder / f"{file}.json").read_text()) for file in ("daemon", "child")))


def install(folder: Path) -> None:
    """In a traced process: react to SIGUSR2, and write to `folder`."""
    _Tracer(folder, "child" if _CHILD in sys.orig_argv else "daemon")


class _Tracer:
    def __init__(self, folder: Path, process: str) -> None:
        self._folder = folder
        self._process = process
        self._on = False
        self._files: dict[str, None] = {}
        if process == "child":
            threading.setprofile(self._profile)  # the daemon's threads write to disk after the answer
        signal.signal(signal.SIGUSR2, self._toggle)

    def _toggle(self, *_: object) -> None:
        self._on = not self._on
        sys.setprofile(self._profile if self._on else None)
        target = self._folder / (f"{self._process}.on" if self._on else f"{self._process}.json")
        partial = target.with_suffix(".partial")
        partial.write_text(json.dumps(list(self._files)))
        partial.replace(target)

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if not self._on or event != "call" or file in self._files or not file.startswith(str(ROOT)):
            return
        path = file.removeprefix(f"{ROOT}/")
        if not path.startswith((".", "tests/")) and path not in self._files and not _is_periodic(frame):
            self._files[path] = None


def _is_periodic(frame: FrameType | None) -> bool:
    """Whether one of the daemon's periodic tasks made this call."""
    while frame is not None:
        if frame.f_code.co_name in _PERIODIC:
            return True
        frame = frame.f_back
    return False


@contextmanager
def _daemon(folder: Path) -> Iterator[tuple[int, str]]:
    command = [sys.executable, "-m", "edge_node", "serve", "--port", "0", "--state-dir", str(folder / "state")]
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = next(line.partition("url=")[2].strip() for line in process.stdout if line.startswith("ready "))
            _wait_until_ready(url)
            yield process.pid, url
        finally:
            process.terminate()


def _wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(f"{url}/readyz"):
                return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _answer(url: str, text: str) -> None:
    body = {"model": "small", "stream": True, "temperature": 0, "messages": [{"role": "user", "content": text}]}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
        assert response.headers["x-causeway-route"] == "edge"
        assert response.read().endswith(b"data: [DONE]\n\n")


def _toggle(pid: int, written: Path) -> None:
    os.kill(pid, signal.SIGUSR2)
    deadline = time.monotonic() + _TIMEOUT_S
    while not written.exists():
        assert time.monotonic() < deadline, f"process {pid} does not react"
        time.sleep(0.01)


# --- the table -------------------------------------------------------------------------------------------------------


def table(hops: Hops) -> str:
    """Markdown: the daemon's files, then the child's."""
    lines = [
        f"Measured: {len(hops.daemon)} files in the daemon, {len(hops.child)} in the engine child.",
        "",
        "| order | file | what it does |",
        "|---|---|---|",
    ]
    for process, files in (("daemon", hops.daemon), ("child", hops.child)):
        lines += [f"| {process} {at} | `{file}` | {_summary(file)} |" for at, file in enumerate(files, 1)]
    return "\n".join(lines) + "\n"


def _summary(file: str) -> str:
    """The first sentence of a module's docstring."""
    docstring = ast.get_docstring(ast.parse((ROOT / file).read_text())) or ""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    return paragraph.partition(". ")[0].rstrip(".:").replace("|", "\\|")


def listed_files(page: Path) -> list[str]:
    """Return the files of the page's table."""
    rows = page.read_text().partition(BEGIN)[2].partition(END)[0].splitlines()
    return [row.split("`")[1] for row in rows if row.count("`") >= 2]


def write(page: Path, hops: Hops) -> None:
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(f"{before}{BEGIN}{table(hops)}{END}{rest.partition(END)[2]}")


def main() -> None:
    hops = measure()
    print(table(hops))
    if "--write" in sys.argv:
        write(PAGE, hops)
    if len(hops.daemon) > MAX_DAEMON_FILES:
        sys.exit(f"{len(hops.daemon)} files in the daemon; at most {MAX_DAEMON_FILES}")


if __name__ == "__main__":
    sys.exit(run_tool(main))
