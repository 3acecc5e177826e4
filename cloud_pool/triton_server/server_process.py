"""Triton's process from the outside: ports, command line, readiness, children and what it leaves behind.

`kill -9` leaves the Python backend's stub processes and their shared memory behind. Stubs stay in the server's process
group and their memory carries our prefix, so both can be removed without touching those of another server.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
from pathlib import Path

import anyio
import msgspec
import psutil

from .environment import TritonEnvironment

SHARED_MEMORY = Path("/dev/shm")
_REGION = "triton_python_backend_shm_region_causeway"
_PR_SET_PDEATHSIG = 1
_ALMOST_NEVER = 2**31 - 1


class Ports(msgspec.Struct, frozen=True):
    host: str = "127.0.0.1"
    grpc: int = 8001
    http: int = 8000
    metrics: int = 8002

    def line(self) -> str:
        """Return the machine-readable line that is printed when all models are ready."""
        return f"ready grpc={self.host}:{self.grpc} http={self.host}:{self.http} metrics={self.host}:{self.metrics}"


def choose_ports(ports: Ports) -> Ports:
    """Replace each 0 by a free port. Ports stay the same over restarts, so that clients can reconnect."""
    with contextlib.ExitStack() as held:
        return Ports(
            ports.host, *(port or _free_port(ports.host, held) for port in (ports.grpc, ports.http, ports.metrics))
        )


def _free_port(host: str, held: contextlib.ExitStack) -> int:
    # Held until all ports are chosen, or one could be chosen twice.
    sock = held.enter_context(socket.socket())
    sock.bind((host, 0))
    return int(sock.getsockname()[1])


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
    """Return Triton's command line.

    Args:
        environment: where the binary and its backends are.
        repository: the model repository.
        names: the models to load.
        ports: to listen on.
        drain_s: how long running requests may take after SIGTERM.
        prefix: of the shared memory regions, see `memory_prefix`.
        trace_endpoint: OpenTelemetry collector, for requests with a trace context; "": no traces.
    """
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
    """Trace only requests with a `traceparent`, which always are; the rate applies to the others."""
    return (
        "--trace-config=mode=opentelemetry",
        f"--trace-config=opentelemetry,url={endpoint.rstrip('/')}/v1/traces",
        "--trace-config=opentelemetry,resource=service.name=causeway-triton",
        "--trace-config=level=TIMESTAMPS",
        f"--trace-config=rate={_ALMOST_NEVER}",
    )


async def is_ready(ports: Ports) -> bool:
    """Ask Triton whether every model is ready; its ports open when they are loaded."""
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


def count_living_children(pid: int) -> int:
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(pid).children()
        return sum(child.status() != psutil.STATUS_ZOMBIE for child in children)
    return 0


def memory_prefix(pid: int) -> str:
    """Return the prefix of the shared memory regions of the launcher with this process id."""
    return f"{_REGION}{pid}_"


def remove_leftovers(group: int, prefix: str) -> None:
    """Kill the process group and remove the shared memory regions with this prefix."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    for region in SHARED_MEMORY.glob(f"{prefix}*"):
        region.unlink(missing_ok=True)


def clear_orphans() -> None:
    """Remove the shared memory of launchers that were killed together with their server."""
    for region in SHARED_MEMORY.glob(f"{_REGION}*_*"):
        pid = region.name.removeprefix(_REGION).partition("_")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            region.unlink(missing_ok=True)


def end_with_parent() -> None:
    """In the child before exec: get SIGTERM when the launcher dies, even by kill -9 (Linux, prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
