"""Starts the servers and the load generator, each in a process of its own, and reads their figures."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from .load import Plan, Round, Server

ROOT = Path(__file__).parents[3]
READY_S = 60.0
POLICY = """
version: 1
name: streams
targets: {large: {at: cloud, model: assistant-large}}
routes: [{name: all, use: [large]}]
limits: {concurrent: 256, queue: 256}
"""


def play(plan: Plan) -> list[Round]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.streaming.load"],
        input=msgspec.json.encode(plan),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
        timeout=600,
    )
    return msgspec.json.decode(done.stdout, type=list[Round])


def median(rounds: list[Round], figure: Callable[[Round], float]) -> float:
    return statistics.median(map(figure, rounds))


@contextlib.contextmanager
def process(
    *command: str, ready: str = "", cwd: Path = ROOT, python: str = sys.executable
) -> Iterator[tuple[str, int]]:
    """Start a command of Python. Yields its first line that begins with `ready`, without it, and its pid."""
    argv = [python, *command]
    with subprocess.Popen(argv, cwd=cwd, env=dict(os.environ), stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        try:
            line = next((line for line in running.stdout if line.startswith(ready)), None)
            if line is None:
                raise RuntimeError(f"{' '.join(argv)} ended before it was ready")
            yield line.removeprefix(ready).strip(), running.pid
        finally:
            running.terminate()
            running.wait(READY_S)


@contextlib.contextmanager
def server(name: str, kind: str, *arguments: str) -> Iterator[Server]:
    """One of `servers`."""
    with process("-m", "tests.bench.streaming.servers", kind, *arguments) as (port, pid):
        yield Server(name, int(port), (pid,))


@contextlib.contextmanager
def edge(upstream_port: int) -> Iterator[Server]:
    """The daemon as users start it, without an engine, in front of a cloud at `upstream_port`."""
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder) / "policy.yaml"
        policy.write_text(POLICY)
        settings = {
            "policy": policy,
            "server.port": 0,
            "state_dir": folder,
            "engine.enabled": "false",
            "clouds.main.url": f"http://127.0.0.1:{upstream_port}/v1",
            "log": "warning",
        }
        flags = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        with process("-m", "causeway_server.edge_node", "serve", *flags, ready="ready url=") as (url, pid):
            yield Server("edge", int(url.rpartition(":")[2]), (pid,))


@contextlib.contextmanager
def gateway(triton_port: int, checkout: Path = ROOT) -> Iterator[Server]:
    """The gateway as users start it, in front of a Triton at `triton_port`.

    Args:
        checkout: Folder of another version, with an environment of its own; before 4.0 packages were top-level folders.
    """
    flags = ("--port", "0", "--triton", f"127.0.0.1:{triton_port}", "--log", "warning")
    module = "causeway_server.cloud_pool" if (checkout / "setup.py").exists() else "cloud_pool"
    python = sys.executable if checkout == ROOT else str(checkout / ".venv/bin/python")
    command = ("-m", module, "serve", *flags)
    with process(*command, ready="ready url=", cwd=checkout, python=python) as (url, pid):
        yield Server("gateway", int(url.split()[0].removesuffix("/v1").rpartition(":")[2]), (pid,))
