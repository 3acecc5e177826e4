"""The control plane with many devices: servers, and devices whose keys the load generator knows."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.bench.streaming.run import process

_SERVER = "tests.bench.fleet.server"
_ROOT = Path(__file__).parents[3]


@contextmanager
def bare() -> Iterator[tuple[int, int]]:
    """A bare handler; yields its port and its process."""
    with process("-m", _SERVER, "bare") as (port, pid):
        yield int(port), pid


@contextmanager
def plane(folder: Path, database: str, devices: int) -> Iterator[tuple[int, int]]:
    """A control plane with so many devices, which another process has made; yields its port and its process."""
    subprocess.run(
        [sys.executable, "-m", _SERVER, "devices", str(folder), database, str(devices)], cwd=_ROOT, check=True
    )
    with process("-m", _SERVER, "plane", str(folder), database) as (port, pid):
        yield int(port), pid
