"""The command `causeway-edge up`: Triton (or a real vLLM), the gateway and the edge daemon on this machine.

    triton ◂─gRPC─ gateway ◂─HTTP─ edge ◂─HTTP─ client

Each program is a child process with its own log. Triton and the gateway start together, the edge once they can answer.
Then `up` asks the demo questions, prints a table of the routes, and serves until Ctrl-C. The programs stop in order:
the edge drains first, then the gateway, then Triton. No process, shared memory or token is left behind.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import secrets
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from causeway_sdk import AsyncCauseway
from causeway_server.models.child_process import child_command
from causeway_server.router.serving.folders import write_atomically

from ...config.schema import Config
from .child_process import ChildProcess, ChildProcessEnded
from .models import KNOWLEDGE, Row, StartedModels, Vllm, ask, render_table

READY_TIMEOUT_S = 120.0  # a slow device loads a large model from a slow disk
VLLM_TIMEOUT_S = 300.0
_FILE_WIDTH = 140  # columns of the table, if stdout is not a terminal
_DEVICE = "this-device"
_TRITON_GRACE_S = 20.0
_GATEWAY_GRACE_S = 30.0
_EDGE_EXTRA_S = 10.0  # time beyond the edge's own drain time
_LOADING = ("idle", "starting")  # engine states before ready
_OK, _FAILED, _INTERRUPTED = 0, 1, 130
_KEPT_RUNS = 5
_PORTS_TRIED = 100
_CHECKOUT = Path(__file__).parents[3]


class UpOptions(msgspec.Struct, frozen=True):
    """Options of one run."""

    config: Config  # the edge's configuration
    serve_flags: tuple[str, ...]  # the command-line flags to pass on to `causeway-edge serve`
    runs: Path  # the folder that holds one folder per run
    programs: Mapping[str, Sequence[str]]  # the commands `causeway-edge` and `causeway-cloud`, see `find_programs`
    models: StartedModels  # the models to start, see `choose_models`
    cloud: bool = True  # start Triton and the gateway too
    once: bool = False  # stop after the demo questions


def run(options: UpOptions) -> int:
    """Run until Ctrl-C, or until the demo questions are answered, and return the exit code."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _FILE_WIDTH
    return asyncio.run(_UpSession(options, console).run())


class _UpSession:
    def __init__(self, options: UpOptions, console: Console) -> None:
        self._options = options
        self._console = console
        self._children: list[ChildProcess] = []  # in start order; they stop in reverse order
        self._stop = asyncio.Event()
        self._serving = False
        self._folder = make_run_folder(options.runs)

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        self._print(f"logs in {self._folder}")
        if self._options.models.note:
            self._print(self._options.models.note)
        working = asyncio.create_task(self._start_and_serve())
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
            if self._options.cloud:
                command = "make setup" if self._options.models.vllm is None else "make run UPSTREAM=vllm"
                self._print(f"If a part is not installed, run `{command}`; --no-cloud starts the edge alone.")
            return _FAILED
        finally:
            stopping.cancel()
            await self._stop_children()

    def _interrupt(self) -> None:
        """Stop in order on the first Ctrl-C; kill everything on the second."""
        if self._stop.is_set():
            for child in self._children:
                child.kill()
        self._stop.set()

    # --- start -------------------------------------------------------------------------------------------------------

    async def _start_and_serve(self) -> int:
        cloud_flags = await self._start_cloud() if self._options.cloud else []
        url = await self._start_edge(cloud_flags)
        rows = await self._ask_demo_questions(url)
        if self._options.once:
            return _FAILED if any(row.error for row in rows) else _OK
        self._print_usage(url)
        self._serving = True
        return await self._watch_children()

    async def _start_cloud(self) -> list[str]:
        """Start Triton or vLLM, and the gateway; wait for a real inference; return the edge's flags for the gateway."""
        grpc = f"127.0.0.1:{free_port()}"
        token = secrets.token_urlsafe(24)
        tokens, key = self._folder / "gateway.tokens", self._folder / "cloud.key"
        digest = hashlib.sha256(token.encode()).hexdigest()
        write_atomically(tokens, f"{_DEVICE} sha256:{digest} priority=interactive critical=true\n".encode(), 0o600)
        write_atomically(key, f"{token}\n".encode(), 0o600)
        models = self._options.models
        # vLLM answers before the gateway starts, which asks it for its features.
        server = await self._start_triton(grpc) if models.vllm is None else await self._start_vllm(models.vllm)
        folders = _each("--model-dir", models.model_dirs)
        gateway_flags: tuple[str, ...] = ("--port", "0", "--triton", grpc, "--token-file", str(tokens), *folders)
        if models.gateway_text:
            configuration = self._folder / "gateway.yaml"
            configuration.write_text(models.gateway_text, encoding="utf-8")
            gateway_flags = (*gateway_flags, "--config", str(configuration))
        gateway = await self._start("gateway", self._options.programs["causeway-cloud"], "serve", *gateway_flags)
        with self._console.status(f"{server.name} loads its models"):
            if models.vllm is None:
                ready = await server.ready(READY_TIMEOUT_S)
                self._print_ready(server, f"grpc {ready.get('grpc', grpc)}")
            url = (await gateway.ready(READY_TIMEOUT_S))["url"]
            await gateway.ready_at(f"{url.removesuffix('/v1')}/readyz", READY_TIMEOUT_S)
        self._print_ready(gateway, url)
        return ["--cloud-url", url, "--cloud-key-file", str(key)]

    async def _start_triton(self, grpc: str) -> ChildProcess:
        models = self._options.models
        flags = ("--grpc-port", grpc.rpartition(":")[2], "--metrics-port", "0")
        chosen = (*_each("--model-dir", models.model_dirs), *_each("--model", models.cloud))
        return await self._start("triton", self._options.programs["causeway-cloud"], "triton", *flags, *chosen)

    async def _start_vllm(self, vllm: Vllm) -> ChildProcess:
        """Start vLLM and wait for its first token, which on a slow machine comes long after the list of its models."""
        program, environ = vllm.description.command, vllm.description.environ
        server = await self._start("vllm", program, "--port", str(vllm.port), environ=environ)
        messages = [{"role": "user", "content": "Hello"}]
        body = {"model": vllm.description.model, "messages": messages, "max_tokens": 1}
        with self._console.status("vLLM loads its model, in one to two minutes"):
            await server.ready_at(f"{vllm.url}/chat/completions", VLLM_TIMEOUT_S, body=body)
        self._print_ready(server, vllm.url)
        return server

    async def _start_edge(self, cloud_flags: Sequence[str]) -> str:
        server = self._options.config.server
        port = next_free_port(server.host, server.port)
        if port != server.port and server.port:
            self._print(f"port {server.port} is in use: the edge listens on {port}")
        state = str(self._folder / "state")
        if self._options.models.policy_text:
            policy = self._folder / "policy.yaml"
            policy.write_text(self._options.models.policy_text, encoding="utf-8")
            cloud_flags = [*cloud_flags, "--policy", str(policy)]
            self._print(f"policy   {policy}")
        flags = (*self._options.serve_flags, *cloud_flags, "--port", str(port), "--state-dir", state)
        edge = await self._start("edge", self._options.programs["causeway-edge"], "serve", *flags)
        with self._console.status("the edge loads its model"):
            url = (await edge.ready(READY_TIMEOUT_S))["url"]
            # /readyz is 200 as soon as any target can answer, even the cloud alone; the demo also needs the device.
            readiness = await edge.ready_at(
                f"{url}/readyz", READY_TIMEOUT_S, accept=lambda document: document.get("edge") not in _LOADING
            )
        if readiness.get("edge", "") not in ("", "ready"):
            self._print(f"the device's engine is {readiness['edge']}: see {edge.log}")
        self._print_ready(edge, url)
        return url

    async def _start(
        self, name: str, program: Sequence[str], *arguments: str, environ: Mapping[str, str] = {}
    ) -> ChildProcess:
        environ = {**os.environ, **environ}
        child = ChildProcess(name, [*program, *arguments], self._folder / f"{name}.log", environ)
        self._children.append(child)
        await child.start()
        return child

    # --- serve -------------------------------------------------------------------------------------------------------

    async def _ask_demo_questions(self, url: str) -> list[Row]:
        async with AsyncCauseway(url) as causeway:
            with self._console.status("asking the demo questions"):
                rows = [await ask(causeway, question) for question in self._options.models.questions]
        self._console.print()
        self._console.print(render_table(rows, self._console.width))
        for row in rows:
            if row.error:
                self._console.print(Text(f"{row.question.text[:40]}: {row.error}", style="red"))
        return rows

    def _print_usage(self, url: str) -> None:
        text = (
            "Why is the sky blue?" if self._options.models.questions is KNOWLEDGE else "dim the lights in the kitchen"
        )
        body = f'{{"model": "auto", "messages": [{{"role": "user", "content": "{text}"}}]}}'
        self._print(
            f"\nHTTP:      curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'",
            f'OpenAI:    OpenAI(base_url="{url}/v1", api_key="none")',
            f"Terminal:  causeway-edge ask --url {url} '{text}'",
            "\nCtrl-C drains and stops.",
        )

    async def _watch_children(self) -> int:
        """Wait for the edge to end. If Triton or the gateway ends, report that and continue."""
        ends = {asyncio.create_task(child.wait()): child for child in self._children}
        try:
            while True:
                done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    child = ends.pop(task)
                    self._console.print(Text(f"{child.name} ended unexpectedly{child.log_excerpt()}", style="red"))
                    if child.name == "edge":
                        return _FAILED
                self._print("the edge continues without it")
        finally:
            for task in ends:
                task.cancel()

    # --- stop --------------------------------------------------------------------------------------------------------

    async def _stop_children(self) -> None:
        if self._children and not self._options.once:
            self._print("draining")
        graces = {
            "edge": self._options.config.server.drain_s + _EDGE_EXTRA_S,
            "gateway": _GATEWAY_GRACE_S,
            "triton": _TRITON_GRACE_S,
            "vllm": _TRITON_GRACE_S,
        }
        for child in reversed(self._children):
            if not await child.stop(graces[child.name]):
                self._print(f"{child.name} did not stop in time and was killed")
            if child.name == "triton":
                clear_shared_memory(child.pid)
        for name in ("gateway.tokens", "cloud.key"):
            (self._folder / name).unlink(missing_ok=True)

    # --- output ------------------------------------------------------------------------------------------------------

    def _print(self, *lines: str) -> None:
        for line in lines:
            self._console.print(Text(line), soft_wrap=True)

    def _print_ready(self, child: ChildProcess, address: str) -> None:
        self._print(f"{child.name:8} ready after {child.uptime_s:4.1f} s   {address}")


def _each(flag: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (flag, value)]


def find_programs() -> dict[str, list[str]]:
    """Return the commands of the daemon and the gateway: installed beside this Python, else ``python -m package``."""
    programs = {}
    for name, package in (("causeway-edge", "edge_node"), ("causeway-cloud", "cloud_pool")):
        command = Path(sys.executable).parent / name
        programs[name] = [str(command)] if command.exists() else child_command(f"causeway_server.{package}")
    return programs


def default_runs_dir(config: Config) -> Path:
    """Return ``.run`` in a checkout, which git ignores; elsewhere a folder in the state folder."""
    return _CHECKOUT / ".run" if (_CHECKOUT / "Makefile").is_file() else Path(config.state_dir) / "run"


def make_run_folder(runs: Path) -> Path:
    """Create the folder of this run and delete old runs except the newest few."""
    runs.mkdir(parents=True, exist_ok=True)
    old = sorted(path for path in runs.iterdir() if path.is_dir() and path.name[:8].isdigit())
    for path in old[: -(_KEPT_RUNS - 1)]:
        shutil.rmtree(path, ignore_errors=True)
    folder = runs / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder.mkdir(mode=0o700)
    return folder


def free_port() -> int:
    """Return a TCP port that is free on the loopback address now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def next_free_port(host: str, wanted: int) -> int:
    """Return `wanted` or the next free port above it. 0 means any port and stays 0."""
    for port in range(wanted, min(wanted + _PORTS_TRIED, 65536)) if wanted else ():
        try:
            with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
                return port
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return wanted  # the daemon reports the error
    return 0


def clear_shared_memory(launcher_pid: int) -> None:
    """Remove the shared memory of a Triton launcher that was killed before it could do so itself."""
    for region in Path("/dev/shm").glob(f"triton_python_backend_shm_region_causeway{launcher_pid}_*"):
        region.unlink(missing_ok=True)
