"""A request on a new connection while 2,000 others are open and idle, over TCP and over the Unix socket.

Three daemons take turns, request by request: one without other connections, one that holds all 2,000, and one whose
limit is reached, so that each new connection closes the one that has been idle longest.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.bench.streaming.run import process

from .rows import Row

ROOT = Path(__file__).parents[2]
IDLE = 2000
REQUESTS = 1000
LIMIT = 1.5
_BODY = b'{"model":"auto","messages":[{"role":"user","content":"Turn on the light."}],"temperature":0}'
_REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n" % len(_BODY)
) + _BODY
_LIMITS = {"calm": 4096, "crowded": 4096, "full": 1024}  # server.max_connections
WORDS = {
    "calm": "without idle connections",
    "crowded": f"with {IDLE} of them",
    "full": "with as many as the limit of connections allows",
}
Address = tuple[str, int] | str


def main() -> list[Row]:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        upstream = stack.enter_context(_upstream())
        daemons = {
            name: stack.enter_context(_daemon(Path(folder) / name, upstream, limit)) for name, limit in _LIMITS.items()
        }
        for name in ("crowded", "full"):
            for address in daemons[name]:
                for _ in range(IDLE):
                    stack.enter_context(_connected(address))
        stack.enter_context(_pinned([process.pid for process in psutil.Process().children(recursive=True)]))
        return [
            row
            for at, way in enumerate(("TCP", "the Unix socket"))
            for row in _rows(way, {name: addresses[at] for name, addresses in daemons.items()})
        ]


@contextlib.contextmanager
def _pinned(servers: list[int]) -> Iterator[None]:
    """All servers on one core and this process on another: the scheduler's choice is the same for each."""
    cores = sorted(os.sched_getaffinity(0))
    for pid in servers:
        os.sched_setaffinity(pid, cores[:1])
    os.sched_setaffinity(0, cores[1:] or cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _rows(way: str, addresses: dict[str, Address]) -> Iterator[Row]:
    times: dict[str, list[float]] = {name: [] for name in addresses}
    for number in range(REQUESTS + 50):
        for name, address in addresses.items():
            took_ms = _ask(address)
            if number >= 50:  # the first ones warm up
                times[name].append(took_ms)
    p50 = {name: statistics.median(found) for name, found in times.items()}
    note = ", ".join(f"{WORDS[name]} {ms:.3f} ms" for name, ms in p50.items())
    yield Row(
        f"next request over {way} beside {IDLE} idle connections: median time ÷ the time without idle connections",
        p50["crowded"] / p50["calm"],
        "x",
        LIMIT,
        note=note,
    )
    yield Row(
        f"next request over {way} at the limit of connections: median time ÷ the time without idle connections",
        p50["full"] / p50["calm"],
        "x",
        LIMIT,
        note=note,
    )


def _ask(address: Address) -> float:
    """One request on a connection of its own, in milliseconds."""
    started = time.perf_counter()
    with _connected(address) as connection:
        connection.sendall(_REQUEST)
        answer = connection.recv(65536)
        took_ms = (time.perf_counter() - started) * 1000.0
    if not answer.startswith(b"HTTP/1.1 200 "):
        raise RuntimeError(answer[:500].decode(errors="replace"))
    return took_ms


def _connected(address: Address) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    connection.connect(address)  # blocking: with a timeout a full backlog of a Unix socket is an error
    connection.settimeout(30.0)
    return connection


@contextlib.contextmanager
def _upstream() -> Iterator[int]:
    with process("-m", "tests.bench.whole.bare", "upstream") as (port, _):
        yield int(port)


@contextlib.contextmanager
def _daemon(folder: Path, upstream: int, max_connections: int) -> Iterator[tuple[Address, Address]]:
    """A daemon without an engine: its TCP address and its socket's path."""
    folder.mkdir()
    settings = {
        "state_dir": folder / "state",
        "server.port": 0,
        "server.socket": folder / "edge.sock",
        "server.max_connections": max_connections,
        "server.read_timeout_s": 600,
        "engine.enabled": "false",
        "clouds.main.url": f"http://127.0.0.1:{upstream}/v1",
        "log": "warning",
    }
    flags = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    with process("-m", "causeway_server.edge_node", "serve", *flags, ready="ready url=") as (url, _):
        yield ("127.0.0.1", int(url.rpartition(":")[2])), str(folder / "edge.sock")
