"""Programs, folders, secrets and ports of one `up` run."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import sys
import time
from pathlib import Path

from ...config.schema import Config

_KEPT_RUNS = 5
_PORTS_TRIED = 100
_CHECKOUT = Path(__file__).parents[3]


def find_programs() -> dict[str, list[str]]:
    """Return the commands of the daemon and the gateway: installed beside this Python, else ``python -m package``."""
    programs = {}
    for name, package in (("causeway-edge", "edge_node"), ("causeway-cloud", "cloud_pool")):
        command = Path(sys.executable).parent / name
        programs[name] = [str(command)] if command.exists() else [sys.executable, "-m", package]
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


def write_secret(path: Path, text: str) -> None:
    """Write a file that only this user can read."""
    path.touch(mode=0o600)
    path.write_text(text, encoding="utf-8")


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
