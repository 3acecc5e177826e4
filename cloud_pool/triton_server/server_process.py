"""Triton's process from the outside: ports, command line, readiness, children and what it leaves behind.

`kill -9` leaves the Python backend's stub processes and their shared memory behind. Stubs stay in the server's process
group and their memory carries our prefix, so both can be removed without touching those of another server.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from pathlib import Path

import grpc
import msgspec
import psutil
from tritonclient.grpc import service_pb2

from ..upstreams.triton.calls import TritonConnection
from ..upstreams.triton.model_control import restriction
from .environment import TritonEnvironment

SHARED_MEMORY = Path("/dev/shm")
_REGION = "triton_python_backend_shm_region_causeway"
_ALMOST_NEVER = 2**31 - 1
_READY_S = 2.0


class Ports(msgspec.Struct, frozen=True):
    """Where the server listens. Its HTTP is off: gRPC has all of it that we use, and less that could be misused."""

    host: str = "127.0.0.1"
    grpc: int = 8001
    metrics: int = 8002
    metrics_host: str = "127.0.0.1"

    def line(self) -> str:
        """Return the machine-readable line that is printed when all models are ready."""
        return f"ready grpc={self.host}:{self.grpc} metrics={self.metrics_host}:{self.metrics}"


def choose_ports(ports: Ports) -> Ports:
    """Replace each 0 by a free port. Ports stay the same over restarts, so that clients can reconnect."""
    with contextlib.ExitStack() as held:
        return msgspec.structs.replace(
            ports,
            grpc=ports.grpc or _free_port(ports.host, held),
            metrics=ports.metrics or _free_port(ports.metrics_host, held),
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
    key: str,
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
        key: of its model control.
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
        restriction(key),
        "--allow-http=false",
        *(f"--load-model={name}" for name in names),
        f"--grpc-address={ports.host}",
        f"--grpc-port={ports.grpc}",
        f"--metrics-address={ports.metrics_host}",
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


async def is_ready(connection: TritonConnection) -> bool:
    """Ask Triton whether every model is ready; its ports open when they are loaded."""
    try:
        answer = await connection.stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=_READY_S)
    except grpc.aio.AioRpcError:
        return False
    return bool(answer.ready)


def hide_in_command_line(pid: int, secret: str) -> bool:
    """Overwrite `secret` in the command line that every account of this machine can read (/proc/PID/cmdline).

    Triton reads the key of its model control from its command line alone, and has done so once it is ready. Returns
    whether the secret is hidden now; a kernel that forbids a parent to write its child's memory leaves it visible.
    """
    try:
        begin, end = (int(field) for field in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[45:47])
        with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
            memory.seek(begin)
            found = memory.read(end - begin).find(secret.encode())
            if found >= 0:
                memory.seek(begin + found)
                memory.write(b"x" * len(secret))
    except OSError:
        return False
    return True


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
