"""The launcher of `causeway-cloud triton`, which keeps one Triton Inference Server running.

    starting ──all models ready──▶ ready ──process ended──▶ (back-off) ──▶ starting
       └──ended before it was ever ready──▶ give up, because a restart would not help

If a model's process (stub) dies within milliseconds of its start, Triton waits for it for ever, reports nothing and
does not even unload it: a server that is not ready and lacks such a process for STUCK_S is killed. A launcher that was
itself paused for longer looks again first.

Triton's log is made readable: without noise, and without texts that may quote a request (`LogFilter`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections.abc import Callable, Mapping

import anyio
import msgspec
from anyio.abc import TaskGroup

from causeway_server.router.serving.process import end_with_parent

from ..upstreams.triton.connection import CallCancelled, CallFailed, TritonConnection
from ..upstreams.triton.protocol import SERVER_READY, ServerReadyResponse
from .server_process import Ports, count_living_children, hide_in_command_line, remove_leftovers

_NOISE = re.compile(
    r"""
    ^\s*$
    | ^[+|]                                                   # tables of backends, models and options,
    | ^I\d{4}\ .*server\.cc:\d+\]\s*$                        # and their headings
    | CUDA | CudaDriverHelper | NVML | DCGM
    | Collecting\ (CPU|GPU)\ metrics
    | TRITONBACKEND_ModelInstance
    | HandleCancellation\ called\ even\ when\ the\ context   # logged at a client's deadline, though nothing is wrong
    """,
    re.VERBOSE,
)
_HEAD = re.compile(r'^([IWEF])\d{4} [\d:.]+ \d+ (\S+\.(?:cc|h)):\d+\] "?(.*?)"?$')
_LEVEL = {"I": "", "W": "warning: ", "E": "error: ", "F": "fatal: "}
_RAISED = re.compile(r"^(.*?message: (?:[\w.]+(?=:|$))?).*$")  # by a Python model
_EXCEPTION = re.compile(r"^((?:\w+\.)+[A-Z]\w*|\w*(?:Error|Exception|Interrupt|Exit))(?::.*)?$")
_GRAMMAR = re.compile(r"^(.*error parsing grammar).*$")
_FRAME = re.compile(r'^(?:  )+(?:File "[^"]+", line \d+, in \S+|/\S+\(\d+\): \S+)$')
POLL_S = 0.05
_READY_S = 2.0  # for the answer to the question whether it is ready
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 10.0
STEADY_S = 60.0
"""Run time in seconds after which a restarted server begins again with the first delay."""
STUCK_S = 20.0
"""Seconds without a stub process after which a server is stuck. A healthy one has stubs, or ends, within seconds."""


class LogFilter:
    """Filters the log lines of one process, in order, as a text that may quote a request can have several lines.

    On a machine without a GPU half of Triton's lines complain about that. When a model raises an error, Triton logs the
    whole message, and llama.cpp prints a grammar that it cannot parse, which may hold words of the user's message. Of
    such texts the log keeps only the exception's class and the source lines. Before `is_serving` no request can be
    quoted.
    """

    def __init__(self, is_serving: Callable[[], bool]) -> None:
        self._is_serving = is_serving
        self._in_text = False

    def readable(self, line: str) -> str | None:
        """Return `line` without Triton's own time and source position; None for noise and for hidden text."""
        if _NOISE.search(line):
            return None
        head = _HEAD.match(line)
        if head is not None:
            text = f"{_LEVEL[head[1]]}{head[3]}"
            if not self._is_serving():
                return text
            raised = _RAISED.match(text)
            self._in_text = raised is not None
            return text if raised is None else raised[1]
        if not self._is_serving():
            return line
        if line.startswith("Traceback (most recent call last)"):
            self._in_text = False
        for begins in (_EXCEPTION, _GRAMMAR):
            if (match := begins.match(line)) is not None:
                self._in_text = True
                return match[1]
        return line if not self._in_text or _FRAME.match(line) else None


class ProcessExit(msgspec.Struct, frozen=True):
    code: int
    ready_for_s: float | None  # seconds; None if it never was ready


class ServerCommand(msgspec.Struct, frozen=True, kw_only=True):
    """The command that starts a server, and the marks by which its processes are found."""

    argv: list[str]
    environ: Mapping[str, str]
    ports: Ports  # ports, for the readiness check
    memory_prefix: str  # prefix of its shared memory regions
    expected_children: int = 0  # number of child processes that a healthy server has; 0 if unknown
    secret: str = ""  # part of `argv` that other accounts of this machine must not see while the server runs


class Launcher(msgspec.Struct, frozen=True):
    """The launcher, which owns the server's process."""

    command: ServerCommand
    drain_s: float  # time for running requests after SIGTERM
    restart: bool  # whether to start the server again after a crash
    print_ready: Callable[[str], None]  # callback for the ready line, each time the server becomes ready
    log: Callable[[str], None]
    stuck_s: float = STUCK_S  # replacement for STUCK_S
    clock: Callable[[], float] = time.monotonic  # monotonic time in seconds

    async def run(self, stop: asyncio.Event) -> int:
        """Run until `stop`, or until the server cannot be kept running. Return the exit status for the command."""
        delay_s, was_ready = FIRST_DELAY_S, False
        while True:
            ended = await self._run_once(stop)
            if stop.is_set():
                return 0
            was_ready = was_ready or ended.ready_for_s is not None
            if not was_ready:
                self.log(
                    f"The server ended with status {ended.code} before its models were ready, so the launcher gives up."
                )
                return 1
            if not self.restart:
                self.log(f"The server ended with status {ended.code}.")
                return 1
            delay_s = FIRST_DELAY_S if (ended.ready_for_s or 0.0) >= STEADY_S else delay_s
            self.log(f"The server ended with status {ended.code}; starting it again in {delay_s:g} s.")
            with anyio.move_on_after(delay_s):
                await stop.wait()
                return 0
            delay_s = min(2.0 * delay_s, LONGEST_DELAY_S)

    async def _run_once(self, stop: asyncio.Event) -> ProcessExit:
        # A pipe of our own: with asyncio's, `wait` would wait for every process that inherited it from a killed server.
        reading, writing = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *self.command.argv,
                env=self.command.environ,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                # A process group of its own: Ctrl-C reaches only us, and its leftovers can be found.
                start_new_session=True,
                preexec_fn=end_with_parent,
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
                tasks.start_soon(self._forward_log, reading, read_out, lambda: bool(ready_at))
                tasks.start_soon(self._watch, process, ready_at, tasks)
                tasks.start_soon(self._drain_at, stop, process)
                code = await process.wait()
                remove_leftovers(process.pid, self.command.memory_prefix)  # A living stub would hold the log open.
                with anyio.move_on_after(1.0):
                    await read_out.wait()
                tasks.cancel_scope.cancel()
        finally:
            # Also on cancellation: nothing of the server outlives this call.
            remove_leftovers(process.pid, self.command.memory_prefix)
            with anyio.CancelScope(shield=True):
                await process.wait()
        return ProcessExit(code, self.clock() - ready_at[0] if ready_at else None)

    async def _drain_at(self, stop: asyncio.Event, process: asyncio.subprocess.Process) -> None:
        """Send SIGTERM at `stop`, so that running requests can finish. Kill the server a little after `drain_s`."""
        await stop.wait()
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with anyio.move_on_after(self.drain_s + 5.0):
            await process.wait()
            return
        self.log("The server did not end in time, so it was killed.")
        with contextlib.suppress(ProcessLookupError):
            process.kill()

    async def _watch(self, process: asyncio.subprocess.Process, ready_at: list[float], tasks: TaskGroup) -> None:
        """Print the ready line once; kill a server that waits for a dead stub."""
        connection = TritonConnection(f"{self.command.ports.host}:{self.command.ports.grpc}", tasks)
        try:
            healthy_at = self.clock()
            while True:
                if await _is_ready(connection):
                    healthy_at = self.clock()
                    if not ready_at:
                        if self.command.secret and not hide_in_command_line(process.pid, self.command.secret):
                            self.log("Other users of this machine can see the key of the model control (with ps).")
                        ready_at.append(healthy_at)
                        self.print_ready(self.command.ports.line())
                elif (
                    self.clock() - healthy_at >= self.stuck_s / 2.0  # Counting children costs milliseconds.
                    and count_living_children(process.pid) >= self.command.expected_children
                ):
                    healthy_at = self.clock()
                elif self.clock() - healthy_at >= self.stuck_s:
                    break
                await anyio.sleep(min(1.0, self.stuck_s / 5) if ready_at else POLL_S)
            self.log("The server waits for a model's process that has died, so it was killed.")
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        finally:
            connection.close()

    async def _forward_log(self, reading: int, read_out: asyncio.Event, is_serving: Callable[[], bool]) -> None:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading, "rb")
        )
        log_filter = LogFilter(is_serving)
        try:
            while line := await _read_line(reader):
                readable = log_filter.readable(line.decode(errors="replace").rstrip("\n"))
                if readable is not None:
                    self.log(readable)
        finally:
            transport.close()
            read_out.set()


async def _is_ready(connection: TritonConnection) -> bool:
    """Ask Triton whether every model is ready; its ports open when they are loaded."""
    try:
        answer = await connection.unary(SERVER_READY, b"", timeout_s=_READY_S)
    except (CallFailed, CallCancelled):
        return False
    return bool(ServerReadyResponse.FromString(answer).ready)


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    """Return the next line; b"" at the end. A line longer than the reader's buffer loses its beginning."""
    while True:
        with contextlib.suppress(ValueError):
            return await reader.readline()
