"""`causeway-edge up`: a real Triton, the gateway before it and the edge daemon, on this machine, as one program.

    triton ──grpc── gateway ──http── edge ── you

Each is a child with a log of its own; Triton and the gateway start together, the edge when they can answer. Then a few
questions, a table of what became of them, and serving until Ctrl-C. The end is in order: the edge drains first, then
the gateway, then Triton, and nothing of them is left: no process, no shared memory, no token.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import httpx
import msgspec
from rich.console import Console
from rich.text import Text

from ..config.schema import Config
from ..sdk.client import AsyncCauseway
from .child_process import ChildProcess, ChildProcessEnded
from .tour import Row, ask_all, table_of

READY_TIMEOUT_S = 120.0  # a slow box loads a large model from a slow disk
_POLL_S = 0.05
_KEPT_RUNS = 5
_FILE_WIDTH = 140  # of the table, where no terminal says how wide it is
_PORTS = 100  # tried from the wanted one upwards
_DEVICE = "this-device"
_TRITON_GRACE_S = 20.0
_GATEWAY_GRACE_S = 30.0
_EDGE_EXTRA_S = 10.0  # beyond its own drain
_LOADING = ("idle", "starting")  # an engine that will be ready, as far as anyone knows
_OK, _FAILED, _INTERRUPTED = 0, 1, 130


Told = dict[str, object]
"""A readiness document."""


class UpOptions(msgspec.Struct, frozen=True):
    """What was asked for. `serve_flags`: the configuration's flags, handed on to `causeway-edge serve`."""

    config: Config
    serve_flags: tuple[str, ...]
    runs: Path  # each run has a folder of its own in it
    programs: Mapping[str, Sequence[str]]  # the commands `causeway-edge` and `causeway-cloud`, see `find_programs`
    cloud: bool = True
    once: bool = False


def run(plan: UpOptions) -> int:
    """Returns the exit code."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _FILE_WIDTH
    return asyncio.run(_UpSession(plan, console).live())


class _UpSession:
    """One `up` from start to end."""

    def __init__(self, plan: UpOptions, console: Console) -> None:
        self._plan = plan
        self._console = console
        self._children: list[ChildProcess] = []  # in the order of their start; they end in the opposite one
        self._stop = asyncio.Event()
        self._serving = False
        self._folder = _make_folder(plan.runs)

    async def live(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(signal.SIGINT, self._interrupted)
        self._say(f"logs in {self._folder}")
        working = asyncio.create_task(self._work())
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                working.cancel()
            return await working
        except asyncio.CancelledError:
            return _OK if self._serving else _INTERRUPTED
        except ChildProcessEnded as error:
            self._console.print(Text(str(error), style="red"))
            if self._plan.cloud:
                self._say("`make setup` sets up what is missing; --no-cloud starts the edge alone.")
            return _FAILED
        finally:
            stopping.cancel()
            await self._end()

    def _interrupted(self) -> None:
        """The first time in order, the second time at once."""
        if self._stop.is_set():
            for child in self._children:
                child.kill()
        self._stop.set()

    # --- start -------------------------------------------------------------------------------------------------------

    async def _work(self) -> int:
        cloud_flags = await self._start_cloud() if self._plan.cloud else []
        url = await self._start_edge(cloud_flags)
        rows = await self._ask(url)
        if self._plan.once:
            return _FAILED if any(row.error for row in rows) else _OK
        self._invite(url)
        self._serving = True
        return await self._watch()

    async def _start_cloud(self) -> list[str]:
        """Triton and the gateway, until a real inference has answered. Returns the edge's flags for them."""
        grpc = f"127.0.0.1:{_free_port()}"
        token = secrets.token_urlsafe(24)
        tokens, key = self._folder / "gateway.tokens", self._folder / "cloud.key"
        _write_private(tokens, f"{_DEVICE} sha256:{hashlib.sha256(token.encode()).hexdigest()}\n")
        _write_private(key, f"{token}\n")
        ports = ("--grpc-port", grpc.rpartition(":")[2], "--http-port", "0", "--metrics-port", "0")
        triton = await self._start("triton", self._plan.programs["causeway-cloud"], "triton", *ports)
        gateway = await self._start(
            "gateway",
            self._plan.programs["causeway-cloud"],
            "serve",
            "--port",
            "0",
            "--triton",
            grpc,
            "--token-file",
            str(tokens),
        )
        with self._console.status("Triton loads its model"):
            ready = await triton.ready(READY_TIMEOUT_S)
            self._say_ready(triton, f"grpc {ready.get('grpc', grpc)}")
            url = (await gateway.ready(READY_TIMEOUT_S))["url"]
            await self._wait_for(f"{url.removesuffix('/v1')}/readyz", gateway)
        self._say_ready(gateway, url)
        return ["--cloud-url", url, "--cloud-key-file", str(key)]

    async def _start_edge(self, cloud_flags: Sequence[str]) -> str:
        server = self._plan.config.server
        port = _port_from(server.host, server.port)
        if port != server.port and server.port:
            self._say(f"port {server.port} is taken: the edge listens on {port}")
        state = str(self._folder / "state")
        flags = (*self._plan.serve_flags, *cloud_flags, "--port", str(port), "--state-dir", state)
        edge = await self._start("edge", self._plan.programs["causeway-edge"], "serve", *flags)
        with self._console.status("the edge loads its model"):
            url = (await edge.ready(READY_TIMEOUT_S))["url"]
            # Ready is who can answer at all, be it by the cloud alone; the tour shows the device too.
            told = await self._wait_for(f"{url}/readyz", edge, lambda told: told.get("edge") not in _LOADING)
        if told.get("edge", "") not in ("", "ready"):
            self._say(f"the device's engine is {told['edge']}: look into {edge.log}")
        self._say_ready(edge, url)
        return url

    async def _start(self, name: str, program: Sequence[str], *arguments: str) -> ChildProcess:
        child = ChildProcess(name, [*program, *arguments], self._folder / f"{name}.log", os.environ)
        self._children.append(child)
        await child.start()
        return child

    async def _wait_for(self, url: str, child: ChildProcess, enough: Callable[[Told], bool] = lambda _: True) -> Told:
        """Until `url` answers 200 and what it tells is `enough`. Raises ChildEnded when that does not come."""
        until = time.monotonic() + READY_TIMEOUT_S
        async with httpx.AsyncClient(trust_env=False) as client:
            while True:
                with contextlib.suppress(httpx.HTTPError, ValueError):
                    answer = await client.get(url, timeout=READY_TIMEOUT_S)
                    told = answer.json()
                    if answer.status_code == 200 and isinstance(told, dict) and enough(told):
                        return told
                if child.ended or time.monotonic() > until:
                    raise ChildProcessEnded(f"{child.name} does not become ready{child.last_words()}")
                await asyncio.sleep(_POLL_S)

    # --- while it runs -----------------------------------------------------------------------------------------------

    async def _ask(self, url: str) -> list[Row]:
        async with AsyncCauseway(url) as causeway:
            with self._console.status("asking a few questions"):
                rows = [row async for row in ask_all(causeway)]
        self._console.print()
        self._console.print(table_of(rows, self._console.width))
        for row in rows:
            if row.error:
                self._console.print(Text(f"{row.question.text[:40]}: {row.error}", style="red"))
        return rows

    def _invite(self, url: str) -> None:
        body = '{"model": "auto", "messages": [{"role": "user", "content": "dim the lights in the kitchen"}]}'
        self._say(
            f"\nAsk it:    curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'",
            f'OpenAI:    OpenAI(base_url="{url}/v1", api_key="none")',
            f"Terminal:  causeway-edge ask --url {url} 'dim the lights in the kitchen'",
            "\nCtrl-C drains and stops.",
        )

    async def _watch(self) -> int:
        """Until the edge ends. A part of the cloud that ends is told, and the edge answers without it."""
        ends = {asyncio.create_task(child.wait()): child for child in self._children}
        try:
            while True:
                done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    child = ends.pop(task)
                    self._console.print(Text(f"{child.name} ended unasked{child.last_words()}", style="red"))
                    if child.name == "edge":
                        return _FAILED
                self._say("the edge goes on without it")
        finally:
            for task in ends:
                task.cancel()

    # --- end ---------------------------------------------------------------------------------------------------------

    async def _end(self) -> None:
        """In the opposite order of the start; whatever does not end by itself is killed."""
        if self._children and not self._plan.once:
            self._say("draining")
        graces = {
            "edge": self._plan.config.server.drain_s + _EDGE_EXTRA_S,
            "gateway": _GATEWAY_GRACE_S,
            "triton": _TRITON_GRACE_S,
        }
        for child in reversed(self._children):
            if not await child.stop(graces[child.name]):
                self._say(f"{child.name} did not end in time and was killed")
            if child.name == "triton":
                _clear_shared_memory(child.pid)
        for name in ("gateway.tokens", "cloud.key"):
            (self._folder / name).unlink(missing_ok=True)

    # --- words -------------------------------------------------------------------------------------------------------

    def _say(self, *lines: str) -> None:
        for line in lines:
            self._console.print(Text(line), soft_wrap=True)

    def _say_ready(self, child: ChildProcess, where: str) -> None:
        self._say(f"{child.name:8} ready after {child.age_s:4.1f} s   {where}")


def find_programs() -> dict[str, list[str]]:
    """The commands installed beside this Python, else the packages by their name."""
    found = {}
    for name, package in (("causeway-edge", "edge_node"), ("causeway-cloud", "cloud_pool")):
        command = Path(sys.executable).parent / name
        found[name] = [str(command)] if command.exists() else [sys.executable, "-m", package]
    return found


def _make_folder(runs: Path) -> Path:
    """A new one for this run; only the newest few are kept."""
    runs.mkdir(parents=True, exist_ok=True)
    old = sorted(path for path in runs.iterdir() if path.is_dir() and path.name[:8].isdigit())
    for path in old[: -(_KEPT_RUNS - 1)]:
        shutil.rmtree(path, ignore_errors=True)
    folder = runs / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder.mkdir(mode=0o700)
    return folder


def _write_private(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text, encoding="utf-8")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _port_from(host: str, wanted: int) -> int:
    """`wanted`, or the next one that is free. 0 stays 0: any."""
    for port in range(wanted, min(wanted + _PORTS, 65536)) if wanted else ():
        try:
            with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
                return port
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return wanted  # the daemon will say what is wrong with it
    return 0


def _clear_shared_memory(pid: int) -> None:
    """What the launcher with this pid would have cleared itself, had it not been killed."""
    for region in Path("/dev/shm").glob(f"triton_python_backend_shm_region_causeway{pid}_*"):
        region.unlink(missing_ok=True)
