"""`python -m tests.bench hops`: the files of ours that one request passes, in order, and how deep its stack becomes.

Three requests, each traced as the second of its kind: a streamed answer of the device; a streamed answer of a gateway
in front of a scripted Triton, through a daemon without an engine; and a job, through daemon, gateway, Redis and worker.
Prints what each process entered and the table of docs/explanation/hops.md; `--write` stores it.

`sys.setprofile` in the event loop of each process, and in every thread of the engine child. A file counts when a
function of it runs; periodic tasks do not. The stack is counted in frames of ours. A `sitecustomize` module on
PYTHONPATH calls `install` in each process; SIGUSR2 starts and ends the tracing.
"""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import psutil

from tests.bench.streaming.run import server
from tests.redis_server import RedisServer
from tests.tool import run_tool

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "hops.md"
BEGIN, END = "<!-- hops -->\n", "<!-- /hops -->\n"
MAX_DAEMON_FILES = 26
MAX_CHAT_FILES = {"edge": 28, "gateway": 50}
MAX_JOB_FILES, MAX_WORKER_DEPTH = 95, 25
_CHILD = "causeway_server.models.llama_cpp.process.child"
_ROLE = "CAUSEWAY_HOPS_PROCESS"
_TIMEOUT_S = 60.0
# Functions of tasks that run without a request, too: of the daemon and its engines, of the gateway, of the worker.
_PERIODIC = frozenset({"_every", "_supervise", "_sweep", "watch", "_refresh"}) | frozenset(
    {"_measure_queues", "_promote_and_expire", "_renew_leases"}
)
_IDLE_LOOPS = ("batches/processor.py", "storage/outboxes.py", "jobs/webhooks.py", "serving/webhooks.py")
"""Ends of the files whose `run` is such a task."""
_COMMAND = re.compile(r"/cli/|/__main__\.py|serving/process\.py")  # below the event loop, in every stack
_CHAT, _JOBS = "/v1/chat/completions", "/v1/jobs"
_NO_ENGINE = ("engine.enabled=false", "cloud.probe_interval_s=60s", "jobs.jitter_s=0")


class Trace(NamedTuple):
    """What a request entered in one process.

    `files`: relative to the repository, in the order in which their first function ran. `depth`: most frames of ours.
    """

    files: list[str]
    depth: int


class Hops(NamedTuple):
    daemon: Trace
    child: Trace


class ChatHops(NamedTuple):
    edge: Trace
    gateway: Trace


class JobHops(NamedTuple):
    edge: Trace
    gateway: Trace
    worker: Trace


def measure() -> Hops:
    """Trace one streamed answer of the device."""
    with _folder() as folder, _daemon(folder, "daemon") as (daemon, url):
        _wait_until_ready(url)
        _answer(url, "small", "turn on the lamp in the kitchen")
        time.sleep(0.3)  # its bookkeeping is not the next answer's
        (child,) = [one for one in psutil.Process(daemon).children() if _CHILD in one.cmdline()]
        with _traced(folder, {"daemon": daemon, "child": child.pid}) as traces:
            _answer(url, "small", "wake me up at six am")
        return Hops(**traces)


def measure_chat() -> ChatHops:
    """Trace one streamed answer of a gateway, through the edge."""
    with _folder() as folder, ExitStack() as stack:
        triton = stack.enter_context(server("triton", "triton"))
        gateway, cloud = stack.enter_context(_gateway(folder, triton.port))
        edge, url = stack.enter_context(_daemon(folder, "edge", f"clouds.main.url={cloud}", *_NO_ENGINE))
        _wait_until_ready(url)
        _answer(url, "large", "turn on the lamp in the kitchen")
        time.sleep(0.3)
        with _traced(folder, {"edge": edge, "gateway": gateway}) as traces:
            _answer(url, "large", "wake me up at six am")
        return ChatHops(**traces)


def measure_job() -> JobHops:
    """Trace one job from its acceptance at the edge until the edge has its answer."""
    with _folder() as folder, ExitStack() as stack:
        redis = RedisServer(folder)
        stack.callback(redis.kill)
        triton = stack.enter_context(server("triton", "triton"))
        gateway, cloud = stack.enter_context(_gateway(folder, triton.port, "--redis", redis.url))
        flags = ("--triton", f"127.0.0.1:{triton.port}", "--redis", redis.url, "--tier", "assistant-large")
        worker, _ = stack.enter_context(
            _process(folder, "worker", "ready worker=", "causeway_server.cloud_pool", "worker", *flags)
        )
        edge, url = stack.enter_context(_daemon(folder, "edge", f"clouds.main.url={cloud}", *_NO_ENGINE))
        _wait_until_ready(url)
        _run_job(url, "turn on the lamp in the kitchen")
        time.sleep(0.3)
        with _traced(folder, {"edge": edge, "gateway": gateway, "worker": worker}) as traces:
            _run_job(url, "wake me up at six am")
        return JobHops(**traces)


# --- in the traced processes -----------------------------------------------------------------------------------------


def install(folder: Path) -> None:
    """In a traced process: react to SIGUSR2, and write to `folder`."""
    process = "child" if _CHILD in sys.orig_argv else os.environ.get(_ROLE, "")
    if process:
        _Tracer(folder, process)


class _Tracer:
    def __init__(self, folder: Path, process: str) -> None:
        self._folder = folder
        self._process = process
        self._on = False
        self._files: dict[str, None] = {}
        self._depth = 0
        if process == "child":
            threading.setprofile(self._profile)  # the threads of the others write to disk
        signal.signal(signal.SIGUSR2, self._toggle)

    def _toggle(self, *_: object) -> None:
        self._on = not self._on
        sys.setprofile(self._profile if self._on else None)
        target = self._folder / (f"{self._process}.on" if self._on else f"{self._process}.json")
        partial = target.with_suffix(".partial")
        partial.write_text(json.dumps([list(self._files), self._depth]))
        partial.replace(target)

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        if not self._on or event != "call" or not (path := _own_file(frame)):
            return
        depth = 0
        above: FrameType | None = frame
        while above is not None:
            name, file = above.f_code.co_name, _own_file(above)
            if name in _PERIODIC or (name == "run" and file.endswith(_IDLE_LOOPS)):
                return
            depth += file != "" and not _COMMAND.search(file)
            above = above.f_back
        self._depth = max(self._depth, depth)
        self._files[path] = None


def _own_file(frame: FrameType) -> str:
    """Return the file of a frame of ours, relative to the repository; "" for any other frame.

    A child process of the daemon finds its modules in `.venv/checkout`.
    """
    file = frame.f_code.co_filename
    path = file.removeprefix(f"{ROOT}/").removeprefix(".venv/checkout/causeway_server/")
    return "" if path == file or path.startswith((".", "tests/")) else path


# --- the processes ---------------------------------------------------------------------------------------------------


@contextmanager
def _folder() -> Iterator[Path]:
    """Yield a folder whose `sitecustomize` traces the processes that have it on their path."""
    with tempfile.TemporaryDirectory() as name:
        code = f"from pathlib import Path\n\nfrom tests.bench.hops import install\n\ninstall(Path({name!r}))\n"
        Path(name, "sitecustomize.py").write_text(code)
        yield Path(name)


@contextmanager
def _process(folder: Path, role: str, ready: str, *command: str) -> Iterator[tuple[int, str]]:
    """Run a program of ours; yield its id and what follows `ready` on its output."""
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", _ROLE: role}
    arguments = [sys.executable, "-m", *command]
    with subprocess.Popen(arguments, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = next(line for line in process.stdout if line.startswith(ready))
            yield process.pid, line.removeprefix(ready).split()[0]
        finally:
            process.terminate()


@contextmanager
def _daemon(folder: Path, role: str, *settings: str) -> Iterator[tuple[int, str]]:
    state = ("server.port=0", f"state_dir={folder / 'state'}")
    flags = [part for setting in (*state, *settings) for part in ("--set", setting)]
    with _process(folder, role, "ready url=", "causeway_server.edge_node", "serve", *flags) as found:
        yield found


@contextmanager
def _gateway(folder: Path, triton: int, *flags: str) -> Iterator[tuple[int, str]]:
    command = ("causeway_server.cloud_pool", "serve", "--port", "0", "--triton", f"127.0.0.1:{triton}", *flags)
    with _process(folder, "gateway", "ready url=", *command) as found:
        yield found


@contextmanager
def _traced(folder: Path, processes: Mapping[str, int]) -> Iterator[dict[str, Trace]]:
    """Trace the processes during the block; afterwards the dictionary has what each entered."""
    traces: dict[str, Trace] = {}
    for name, pid in processes.items():
        _toggle(pid, folder / f"{name}.on")
    yield traces
    time.sleep(0.3)  # the bookkeeping of a request follows in the loop's next turn
    for name, pid in processes.items():
        _toggle(pid, folder / f"{name}.json")
        traces[name] = Trace(*json.loads((folder / f"{name}.json").read_text()))


def _toggle(pid: int, written: Path) -> None:
    os.kill(pid, signal.SIGUSR2)
    deadline = time.monotonic() + _TIMEOUT_S
    while not written.exists():
        assert time.monotonic() < deadline, f"process {pid} does not react"
        time.sleep(0.01)


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


def _answer(url: str, model: str, text: str) -> None:
    """Ask for a streamed answer of a target."""
    body = json.dumps(_body(model, text) | {"stream": True, "temperature": 0})
    with closing(HTTPConnection(urlsplit(url).netloc, timeout=_TIMEOUT_S)) as connection:  # kept, as SDKs do
        connection.request("POST", _CHAT, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.headers["x-causeway-target"] == model
        assert response.read().endswith(b"data: [DONE]\n\n")


def _run_job(url: str, text: str) -> None:
    """Submit a job, and poll it until it has its answer."""
    deadline = time.monotonic() + _TIMEOUT_S
    with urllib.request.urlopen(_request(url, _JOBS, _body("large", text)), timeout=_TIMEOUT_S) as response:
        job = json.load(response)
    while job["status"] != "succeeded":
        assert time.monotonic() < deadline, job
        time.sleep(0.1)
        with urllib.request.urlopen(f"{url}{_JOBS}/{job['id']}", timeout=_TIMEOUT_S) as response:
            job = json.load(response)


def _body(model: str, text: str) -> dict[str, Any]:
    return {"model": model, "max_tokens": 8, "messages": [{"role": "user", "content": text}]}


def _request(url: str, path: str, body: dict[str, Any]) -> urllib.request.Request:
    return urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})


# --- the table -------------------------------------------------------------------------------------------------------


def table(hops: Hops) -> str:
    """Markdown: the daemon's files, then the child's."""
    lines = [
        f"Measured: {len(hops.daemon.files)} files in the daemon, {len(hops.child.files)} in the engine child.",
        "",
        "| order | file | what it does |",
        "|---|---|---|",
    ]
    for process, files in (("daemon", hops.daemon.files), ("child", hops.child.files)):
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


def named_files(page: Path, way: str) -> list[str]:
    """Return the files that the page names on a way, between the marks of its lines."""
    lines = page.read_text().partition(f"<!-- {way} -->")[2].partition(f"<!-- /{way} -->")[0]
    return re.findall(r"`(\w+/[\w/]+\.py)`", lines)


def write(page: Path, hops: Hops) -> None:
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(f"{before}{BEGIN}{table(hops)}{END}{rest.partition(END)[2]}")


def main() -> None:
    hops, chat, job = measure(), measure_chat(), measure_job()
    print(table(hops))
    for name, traces in (("chat", chat), ("job", job)):
        for process, trace in traces._asdict().items():
            print(f"{name}, {process}: {len(trace.files)} files, {trace.depth} deep\n  " + "\n  ".join(trace.files))
    if "--write" in sys.argv:
        write(PAGE, hops)
    if len(hops.daemon.files) > MAX_DAEMON_FILES:
        sys.exit(f"{len(hops.daemon.files)} files in the daemon; at most {MAX_DAEMON_FILES}")


if __name__ == "__main__":
    sys.exit(run_tool(main))
