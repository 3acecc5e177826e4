"""`causeway-cloud triton`: keeps one Triton Inference Server running.

    starting ──all models ready──▶ ready ──process ended──▶ (back-off) ──▶ starting
       └──ended before it was ever ready──▶ give up: nothing that waiting would mend

A model's process (stub) that dies within milliseconds of its start leaves Triton waiting for it for ever, without a
word and deaf even to unload: a server that is not ready and lacks such a process for STUCK_S is killed.

`kill -9` leaves the Python backend's stubs and their shared memory behind. Stubs stay in the server's process group
and their memory carries our prefix, so both are cleared after every end, and nobody else's are touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import anyio
import msgspec
import psutil

from .environment import TritonEnvironment
from .log_filter import readable_line

SHARED_MEMORY = Path("/dev/shm")
POLL_S = 0.05
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 10.0
STEADY_S = 60.0
"""A server that ran this long starts again with the first delay."""
STUCK_S = 20.0
"""A server that notices a dead model's process says so, or ends, within a second; one that starts has it in seconds."""
_PR_SET_PDEATHSIG = 1
_ALMOST_NEVER = 2**31 - 1
_REGION = "triton_python_backend_shm_region_causeway"


class Ports(msgspec.Struct, frozen=True):
    host: str = "127.0.0.1"
    grpc: int = 8001
    http: int = 8000
    metrics: int = 8002

    def line(self) -> str:
        """What is printed when all models are ready, for machines to read."""
        return f"ready grpc={self.host}:{self.grpc} http={self.host}:{self.http} metrics={self.host}:{self.metrics}"


def choose_ports(ports: Ports) -> Ports:
    """Free ones in place of each 0. They stay the same over restarts, so that clients reconnect."""
    with contextlib.ExitStack() as held:
        return Ports(
            ports.host, *(port or _free_port(ports.host, held) for port in (ports.grpc, ports.http, ports.metrics))
        )


def _free_port(host: str, held: contextlib.ExitStack) -> int:
    # Held until all are chosen, or one port could be given out twice.
    sock = held.enter_context(socket.socket())
    sock.bind((host, 0))
    return int(sock.getsockname()[1])


def memory_prefix(pid: int) -> str:
    """Of the shared memory regions of the launcher with this process id."""
    return f"{_REGION}{pid}_"


def clear_orphans() -> None:
    """Shared memory of launchers that were killed together with their server."""
    for region in SHARED_MEMORY.glob(f"{_REGION}*_*"):
        pid = region.name.removeprefix(_REGION).partition("_")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            region.unlink(missing_ok=True)


def command(
    environment: TritonEnvironment,
    repository: Path,
    names: tuple[str, ...],
    ports: Ports,
    *,
    drain_s: float,
    prefix: str,
    trace_endpoint: str = "",
) -> list[str]:
    """`trace_endpoint`: an OpenTelemetry collector, for the requests that a caller traces; "" for none."""
    return [
        environment.server,
        f"--model-repository={repository}",
        f"--backend-directory={environment.backend_directory}",
        f"--backend-config=python,shm-region-prefix-name={prefix}",
        # Each model's config is complete; asking every model for it costs a second of start-up.
        "--disable-auto-complete-config",
        # Explicit: the gateway repairs a dead stub by unload and load.
        "--model-control-mode=explicit",
        *(f"--load-model={name}" for name in names),
        f"--grpc-address={ports.host}",
        f"--grpc-port={ports.grpc}",
        f"--http-address={ports.host}",
        f"--http-port={ports.http}",
        f"--metrics-address={ports.host}",
        f"--metrics-port={ports.metrics}",
        f"--exit-timeout-secs={max(1, round(drain_s))}",
        *(_tracing(trace_endpoint) if trace_endpoint else ()),
    ]


def _tracing(endpoint: str) -> tuple[str, ...]:
    """A request with a `traceparent` is always traced; the rate is that of all others, of which there are none."""
    return (
        "--trace-config=mode=opentelemetry",
        f"--trace-config=opentelemetry,url={endpoint.rstrip('/')}/v1/traces",
        "--trace-config=opentelemetry,resource=service.name=causeway-triton",
        "--trace-config=level=TIMESTAMPS",
        f"--trace-config=rate={_ALMOST_NEVER}",
    )


class ProcessExit(msgspec.Struct, frozen=True):
    code: int
    ready_for_s: float | None  # None: it never was


class Launcher:
    """Owns the server's process. `say` gets the ready line, `log` everything for people."""

    def __init__(
        self,
        argv: list[str],
        environ: Mapping[str, str],
        ports: Ports,
        *,
        memory_prefix: str,
        drain_s: float,
        restart: bool,
        say: Callable[[str], None],
        log: Callable[[str], None],
        models: int = 0,
        stuck_s: float = STUCK_S,
    ) -> None:
        """`models`: so many processes of its own a server that is well has; 0 where nobody knows."""
        self._argv = argv
        self._environ = dict(environ)
        self._ports = ports
        self._memory_prefix = memory_prefix
        self._drain_s = drain_s
        self._restart = restart
        self._say = say
        self._log = log
        self._models = models
        self._stuck_s = stuck_s

    async def run(self, stop: asyncio.Event) -> int:
        """Until `stop`, or until the server cannot be kept up. Returns the exit status for the command."""
        delay_s, was_ready = FIRST_DELAY_S, False
        while True:
            ended = await self._once(stop)
            if stop.is_set():
                return 0
            was_ready = was_ready or ended.ready_for_s is not None
            if not was_ready:
                self._log(f"the server ended with status {ended.code} before its models were ready: giving up")
                return 1
            if not self._restart:
                self._log(f"the server ended with status {ended.code}")
                return 1
            delay_s = FIRST_DELAY_S if (ended.ready_for_s or 0.0) >= STEADY_S else delay_s
            self._log(f"the server ended with status {ended.code}; starting it again in {delay_s:g} s")
            with anyio.move_on_after(delay_s):
                await stop.wait()
                return 0
            delay_s = min(2.0 * delay_s, LONGEST_DELAY_S)

    async def _once(self, stop: asyncio.Event) -> ProcessExit:
        # A pipe of our own: asyncio's would keep `wait` waiting for whoever inherited it from a server that was killed.
        reading, writing = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *self._argv,
                env=self._environ,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                # A group of its own: Ctrl-C reaches us only, and what it leaves behind can be found.
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        except OSError:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        ready_at: list[float] = []
        read_out = asyncio.Event()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._forward, reading, read_out)
                tasks.start_soon(self._watch, process, ready_at)
                tasks.start_soon(self._drain_at, stop, process)
                code = await process.wait()
                self._clear(process.pid)  # A stub that still lives would hold the log open.
                with anyio.move_on_after(1.0):
                    await read_out.wait()
                tasks.cancel_scope.cancel()
        finally:
            self._clear(process.pid)  # Also on cancellation: nothing of the server outlives this call.
            with anyio.CancelScope(shield=True):
                await process.wait()
        return ProcessExit(code, time.monotonic() - ready_at[0] if ready_at else None)

    async def _drain_at(self, stop: asyncio.Event, process: asyncio.subprocess.Process) -> None:
        await stop.wait()
        await self._drain(process)

    async def _drain(self, process: asyncio.subprocess.Process) -> None:
        """SIGTERM lets the server finish what it has; it may take a little longer than it was told."""
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with anyio.move_on_after(self._drain_s + 5.0):
            await process.wait()
            return
        self._log("the server did not end in time: killed")
        with contextlib.suppress(ProcessLookupError):
            process.kill()

    async def _watch(self, process: asyncio.subprocess.Process, ready_at: list[float]) -> None:
        """Says once that it is ready, and from then on looks whether it waits for a dead model."""
        well_at = time.monotonic()
        while time.monotonic() - well_at < self._stuck_s:
            if await _is_ready(self._ports):
                well_at = time.monotonic()
                if not ready_at:
                    ready_at.append(well_at)
                    self._say(self._ports.line())
            elif (
                time.monotonic() - well_at >= self._stuck_s / 2.0  # A look costs milliseconds.
                and _living_children(process.pid) >= self._models
            ):
                well_at = time.monotonic()
            await anyio.sleep(min(1.0, self._stuck_s / 5) if ready_at else POLL_S)
        self._log("the server waits for a model's process that has died: killed")
        with contextlib.suppress(ProcessLookupError):
            process.kill()

    async def _forward(self, reading: int, read_out: asyncio.Event) -> None:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading, "rb")
        )
        try:
            while line := await _line(reader):
                said = readable_line(line.decode(errors="replace").rstrip("\n"))
                if said is not None:
                    self._log(said)
        finally:
            transport.close()
            read_out.set()

    def _clear(self, group: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        for region in SHARED_MEMORY.glob(f"{self._memory_prefix}*"):
            region.unlink(missing_ok=True)


async def _line(reader: asyncio.StreamReader) -> bytes:
    """The next line, b"" at the end; one that is longer than the reader's buffer comes without its start."""
    while True:
        with contextlib.suppress(ValueError):
            return await reader.readline()


async def _is_ready(ports: Ports) -> bool:
    """Triton's own word, which covers every model; its ports open when they are loaded."""
    try:
        reader, writer = await asyncio.open_connection(ports.host, ports.http)
    except OSError:
        return False
    try:
        writer.write(f"GET /v2/health/ready HTTP/1.1\r\nHost: {ports.host}\r\nConnection: close\r\n\r\n".encode())
        with anyio.move_on_after(2.0):
            return b" 200 " in await reader.readline()
        return False
    except OSError:
        return False
    finally:
        writer.close()


def _living_children(pid: int) -> int:
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(pid).children()
        return sum(child.status() != psutil.STATUS_ZOMBIE for child in children)
    return 0


def _end_with_parent() -> None:
    """In the child before exec: SIGTERM when the launcher dies, even by kill -9 (Linux, prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
