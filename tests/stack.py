"""Triton, gateway and edge daemon as real processes, for tests and benchmarks."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import urllib3

from .ports import free_port

BIN = Path(sys.executable).parent
READY_S = 90.0
TOKEN = "edge-under-test"


class Process:
    """A child process that prints `ready …` on stdout; its stderr goes to `log`."""

    def __init__(self, name: str, command: list[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.log = log
        self._command = command
        self._env = dict(os.environ) | dict(env or {})
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as stderr:
            self.popen = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, env=self._env, text=True
            )
        self._lines: queue.Queue[str | None] = queue.Queue()  # of this start
        threading.Thread(target=self._read, args=(self.popen, self._lines), daemon=True).start()

    def _read(self, popen: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
        assert popen.stdout is not None
        with self.log.open("a") as log:
            for line in popen.stdout:
                log.write(line)
                log.flush()
                lines.put(line.rstrip("\n"))
        lines.put(None)

    def ready(self, timeout_s: float = READY_S) -> dict[str, str]:
        """Return the key=value pairs of the ready line. Raises RuntimeError with the log's end if it does not come."""
        while True:
            try:
                line = self._lines.get(timeout=timeout_s)
            except queue.Empty:
                line = None
            if line is None:
                raise RuntimeError(f"{self.name} did not become ready:\n{self.tail()}")
            if line.startswith("ready "):
                return dict(pair.split("=", 1) for pair in line.split()[1:] if "=" in pair)

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def descendants(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.popen.pid).children(recursive=True)
        return []

    def kill(self) -> None:
        """Kill the process and its descendants with SIGKILL."""
        descendants = self.descendants()
        self.popen.kill()
        self.popen.wait()
        for child in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(descendants)

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 40.0) -> int:
        """Send the signal, wait for the end, and return the exit status."""
        if self.popen.poll() is None:
            self.popen.send_signal(number)
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise RuntimeError(f"{self.name} did not drain in {timeout_s:g} s:\n{self.tail()}") from None


class Stack:
    """The processes of one stack. Ports survive a restart, so that a killed part comes back at its address."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.grpc, self.metrics = free_port(), free_port()
        self.gateway_port, self.edge_port = free_port(), free_port()
        self.tokens = folder / "tokens"
        self.tokens.write_text(f"test-device {TOKEN} priority=interactive critical=true\n")
        self.parts: dict[str, Process] = {}

    @property
    def edge_url(self) -> str:
        return f"http://127.0.0.1:{self.edge_port}"

    @property
    def gateway_url(self) -> str:
        return f"http://127.0.0.1:{self.gateway_port}"

    def start_triton(self, *flags: str, model: str = "assistant-large") -> Process:
        command = [str(BIN / "causeway-cloud"), "triton", "--model", model]
        command += ["--grpc-port", str(self.grpc), "--metrics-port", str(self.metrics)]
        return self._start("triton", [*command, *flags])

    def start_gateway(self, *flags: str, config: str = "", addressed: bool = False) -> Process:
        """Start the gateway.

        Args:
            config: YAML, with tiers of its own instead of the one of `assistant-large`.
            addressed: Whether all tiers have addresses of their own, beside which `--triton` is refused.
        """
        command = [str(BIN / "causeway-cloud"), "serve", "--port", str(self.gateway_port), "--operator-port", "0"]
        command += ["--token-file", str(self.tokens)]
        command += [] if addressed else ["--triton", f"127.0.0.1:{self.grpc}"]
        if config:
            path = self.folder / "gateway.yaml"
            path.write_text(config)
            command += ["--config", str(path)]
        else:
            command += ["--tier", "assistant-large"]
        return self._start("gateway", [*command, *flags])

    def start_worker(self, *flags: str) -> Process:
        command = [str(BIN / "causeway-cloud"), "worker", "--triton", f"127.0.0.1:{self.grpc}"]
        return self._start("worker", [*command, "--tier", "assistant-large", *flags])

    def start_edge(
        self,
        config: str = "",
        *,
        server: str = "",
        cloud_port: int | None = None,
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> Process:
        """Start the daemon.

        Args:
            config: YAML for keys but server, cloud and state_dir.
            server: Other keys of `server`.
            prefix: A command that runs the daemon's.
        """
        path = self.folder / "edge.yaml"
        cloud = f"http://127.0.0.1:{cloud_port or self.gateway_port}/v1"
        path.write_text(
            f"state_dir: {self.folder / 'state'}\n"
            f"server: {{port: {self.edge_port}, socket: {self.folder / 'edge.sock'}, {server}}}\n"
            f"clouds: {{main: {{url: '{cloud}', key: {TOKEN}}}}}\ncloud: {{probe_interval_s: 0.5}}\n{config}"
        )
        return self._start("edge", [*prefix, str(BIN / "causeway-edge"), "serve", "--config", str(path)], env)

    def wait_until_loaded(self, timeout_s: float = READY_S) -> None:
        """Wait until the daemon and its model are ready. Raises RuntimeError."""
        ticks = threading.Event()
        for _ in range(int(timeout_s / 0.05)):
            state = json.loads(urllib3.request("GET", f"{self.edge_url}/readyz", retries=False).data)
            if state["ready"] and state["edge"] == "ready":
                return
            ticks.wait(0.05)
        raise RuntimeError(f"the edge did not become ready: {state}\n{self.parts['edge'].tail()}")

    def _start(self, name: str, command: list[str], env: Mapping[str, str] | None = None) -> Process:
        part = self.parts[name] = Process(name, command, self.folder / f"{name}.log", env)
        return part

    def close(self) -> None:
        for name in ("edge", "gateway", "worker", "triton"):
            if name in self.parts:
                self.parts[name].stop()


@contextlib.contextmanager
def running(folder: Path, *, edge_config: str = "") -> Iterator[Stack]:
    """Run the whole stack, ready to answer. Stop it in order at the end; kill it if anything fails."""
    stack = Stack(folder)
    try:
        stack.start_triton().ready()
        stack.start_gateway().ready()
        stack.start_edge(edge_config).ready()
        stack.wait_until_loaded()
        yield stack
        stack.close()
    finally:
        for part in stack.parts.values():
            if part.popen.poll() is None:
                part.kill()
