"""Triton's process as its launcher sees it: environment, models, ports, command line, children and leftovers.

Set-up describes Triton's own Python environment in `<environment>/triton.json`. It holds the PyPI wheel
`nvidia-pytriton`, numpy < 2 (with numpy 2 answers arrive empty), the engine's bindings and our packages.

The model repository that `tritonserver` reads is a folder that lives as long as the server:

    <folder>/<model>/config.pbtxt    copied from triton_models/<template>
                     1/model.py
                     1/model.json    an engine's options (EngineOptions) or an encoder's (EncoderOptions); weights are
                                     named by path, never copied

`kill -9` leaves the Python backend's stub processes and their shared memory behind. Stubs stay in the server's process
group and their memory carries our prefix, so both can be removed without touching those of another server.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
from collections.abc import Mapping
from pathlib import Path

import msgspec
import psutil

from causeway_server.models.llama_cpp.protocol import EngineOptions
from causeway_server.router.child_environment import minimal_environment
from causeway_server.router.errors import ConfigError

from ..upstreams.triton.model_control import restriction
from .encoder_runtime import EncoderOptions

DESCRIPTION = "triton.json"
SHARED_MEMORY = Path("/dev/shm")
_REGION = "triton_python_backend_shm_region_causeway"
_ALMOST_NEVER = 2**31 - 1
TEMPLATES = Path(__file__).parent / "triton_models"


class TritonEnvironment(msgspec.Struct, frozen=True):
    """The content of `triton.json`."""

    server: str  # path of the server's binary
    backend_directory: str  # folder of the Python backend, with the stub of this environment's Python
    library_path: tuple[str, ...]
    # `bin` folder of the environment, because the stub finds its packages by the first python on PATH, not by
    # PYTHONPATH
    path: str

    def environ(self, base: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of `base` for the server and its models, without tokens or passwords of the gateway."""
        inherited = {
            name: value
            for name, value in minimal_environment(base, "OTEL_").items()
            if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        }
        return {
            **inherited,
            "PATH": ":".join(filter(None, (self.path, base.get("PATH")))),
            "LD_LIBRARY_PATH": ":".join(filter(None, (*self.library_path, base.get("LD_LIBRARY_PATH")))),
            # Busy-waiting threads make a decode ten times slower on shared cores.
            "OMP_WAIT_POLICY": base.get("OMP_WAIT_POLICY", "PASSIVE"),
        }


def find_environment(root: Path) -> TritonEnvironment:
    """Read the description and check its paths. Raises ConfigError with the missing files and the fix."""
    description = root / DESCRIPTION
    try:
        environment = msgspec.json.decode(description.read_bytes(), type=TritonEnvironment)
    except OSError as error:
        raise ConfigError(
            f"{error.strerror}. Run `make setup` in a checkout to create Triton's environment, and name its folder "
            "with --environment or $CAUSEWAY_TRITON_ENV.",
            where=str(description),
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{error}. Run `make setup` to write it again.", where=str(description)) from error
    for path in (environment.server, environment.backend_directory, *environment.library_path):
        if not Path(path).exists():
            raise ConfigError(
                f"{path} does not exist. Run `make setup` again to create Triton's environment.", where=str(description)
            )
    return environment


class Ports(msgspec.Struct, frozen=True):
    """The ports of the server. HTTP is off: gRPC has all that we use, and fewer calls to misuse."""

    host: str = "127.0.0.1"
    grpc: int = 8001
    metrics: int = 8002
    metrics_host: str = "127.0.0.1"

    def line(self) -> str:
        """Return the machine-readable line that is printed when all models are ready."""
        return f"ready grpc={self.host}:{self.grpc} metrics={self.metrics_host}:{self.metrics}"


def choose_ports(ports: Ports) -> Ports:
    """Replace each 0 by a free port. The ports stay the same over restarts, so that clients can reconnect."""
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
    """Return the command line of a Triton that loads the models of these names from the repository.

    Args:
        drain_s: Time for running requests after SIGTERM.
        prefix: Prefix of the shared memory regions, see `memory_prefix`.
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
    """Return the options that trace only requests with a `traceparent`; these are always traced."""
    return (
        "--trace-config=mode=opentelemetry",
        f"--trace-config=opentelemetry,url={endpoint.rstrip('/')}/v1/traces",
        "--trace-config=opentelemetry,resource=service.name=causeway-triton",
        "--trace-config=level=TIMESTAMPS",
        f"--trace-config=rate={_ALMOST_NEVER}",
    )


def hide_in_command_line(pid: int, secret: str) -> bool:
    """Overwrite `secret` in a command line, which every user can read (/proc/PID/cmdline); return whether it is hidden.

    Triton takes its control's key only there, and needs it no longer once ready. A kernel may forbid the writing.
    """
    try:
        begin, end = (int(field) for field in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[45:47])
        with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
            memory.seek(begin)
            position = memory.read(end - begin).find(secret.encode())
            if position >= 0:
                memory.seek(begin + position)
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


class ServedModel(msgspec.Struct, frozen=True):
    """A model with the name that it has in Triton."""

    name: str
    options: EngineOptions | EncoderOptions

    @property
    def template(self) -> str:
        return "llama_cpp" if isinstance(self.options, EngineOptions) else "encoder"


def write_repository(folder: Path, models: tuple[ServedModel, ...], *, has_gpu: bool = False) -> None:
    """Write a folder for each of `models`. `has_gpu`: llama.cpp finds one; each model is one instance on all GPUs."""
    for model in models:
        target = folder / model.name
        shutil.copytree(TEMPLATES / model.template, target, ignore=shutil.ignore_patterns("__pycache__"))
        if has_gpu and isinstance(model.options, EngineOptions) and model.options.gpu_layers != 0:
            config = target / "config.pbtxt"
            config.write_text(config.read_text().replace("kind: KIND_CPU", "kind: KIND_GPU gpus: [ 0 ]"))
        (target / "1" / "model.json").write_bytes(msgspec.json.encode(model.options))
