"""Check this box: state folder, CPU cores and sensors."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from models.llama_cpp.native.threads import allowed_cores
from router.policy.compiled import Policy
from router.types import DeviceSignals

from ...config.schema import EngineConfig, ResponseCacheConfig
from . import Finding, fail, ok, warn

_MIB = 2**20
_MIN_FREE_BYTES = 50 * _MIB


def check_state_dir(
    path: Path, cache: ResponseCacheConfig, free_bytes_of: Callable[[Path], int] | None = None
) -> Iterator[Finding]:
    """Check that the state folder is writable and has room for the cache.

    Args:
        path: The state folder; it need not exist, and is not created.
        cache: The cache's limits.
        free_bytes_of: Returns the free bytes of the disk that holds a folder.
    """
    folder = _existing_parent(path)
    free_bytes = (free_bytes_of or _free_bytes)(folder)
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"causeway")
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        advice = (
            f"set state_dir (now {path}) to a folder that the daemon's account may write; otherwise nothing is kept"
        )
        yield fail("state folder", f"{folder}: {error.strerror}", advice)
        return
    found = f"{path} {'is' if folder == path else 'can be created and is'} writable, {free_bytes / _MIB:.0f} MiB free"
    if free_bytes < _MIN_FREE_BYTES:
        yield fail("state folder", found, "free some space: the cache and the decision records are on this disk")
    elif free_bytes < cache.disk_bytes + _MIN_FREE_BYTES:
        advice = f"free some space, or lower cache.disk_bytes (now {cache.disk_bytes // _MIB} MiB)"
        yield warn("state folder", found, advice)
    else:
        yield ok("state folder", found)


def _existing_parent(path: Path) -> Path:
    return next((folder for folder in (path, *path.parents) if folder.exists()), Path("/"))


def _free_bytes(path: Path) -> int:
    return shutil.disk_usage(path).free


def check_threads(engine: EngineConfig, cores: float | None = None) -> Finding:
    """Check that the engine has no more threads than cores. `cores` None: the cores that this process may use."""
    usable = allowed_cores() if cores is None else cores
    if engine.threads > usable:
        found = f"engine.threads is {engine.threads}, and this process may use {usable:g} cores"
        return warn("threads", found, "threads that wait for a core slow down all others: set engine.threads to 0")
    return ok("threads", f"{usable:g} cores, {engine.threads or 'the free ones'} for the engine")


def check_sensors(policy: Policy | None, device: DeviceSignals) -> Iterator[Finding]:
    """Warn of device signals that the policy names and this box cannot read."""
    needed = policy.needs if policy else frozenset()
    signals = msgspec.to_builtins(device)
    readable = [f"{name} {_format(value)}" for name, value in signals.items() if value is not None]
    # CPU usage needs two readings.
    absent = [name for name, value in signals.items() if value is None and name != "cpu" and f"device.{name}" in needed]
    for name in absent:
        found = f"device.{name} cannot be read, and the policy names it"
        yield warn("sensors", found, "rules that need it do not hold on this box; `causeway-edge route` shows which")
    if not absent:
        yield ok("sensors", ", ".join(readable) or "no sensor can be read, and the policy names none")


def _format(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
