"""The processor that runs a learned signal's ONNX graph: the fastest of ONNX Runtime's execution providers.

A small graph takes the CPU about as long as a GPU takes to start a few kernels, so that the choice is measured: once
for each graph, GPU and build of ONNX Runtime. The times are kept in `~/.cache/causeway/onnx-providers.json` (or below
$XDG_CACHE_HOME). A file that is missing or damaged is written again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import msgspec
import numpy as np
import onnxruntime

from ..catalog.artifact import sha256_of

CPU = "CPUExecutionProvider"
_GPUS = ("TensorrtExecutionProvider", "CUDAExecutionProvider")
_TIMES = "onnx-providers.json"
_GAIN = 0.8  # a GPU's share of the CPU's time from which it is used, because its context takes memory
_RUNS, _WARM = 25, 5
_LENGTH = 16  # of a dimension that the graph leaves open
_KINDS = {"tensor(int64)": np.int64, "tensor(float)": np.float32}
_GPU_NAMES = ((Path("/proc/driver/nvidia/gpus"), "*/information"), (Path("/proc/device-tree"), "model"))
log = logging.getLogger(__name__)

Open = Callable[[str], onnxruntime.InferenceSession]
Times = dict[str, dict[str, float]]  # seconds by provider, by graph and device


def installed_providers() -> list[str]:
    """Return the execution providers of the installed build of ONNX Runtime."""
    found: list[str] = onnxruntime.get_available_providers()
    return found


def cache_file() -> Path:
    """Return the file of the measured times."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "causeway" / _TIMES


def fastest(
    path: Path, opened: Open, cache: Path, available: Collection[str], clock: Callable[[], float] = time.perf_counter
) -> str:
    """Return the provider for a graph. It is measured unless `cache` knows the times of this graph and device.

    `opened` opens the graph with one of the build's `available` providers, and raises if that cannot run it.
    """
    gpus = [name for name in _GPUS if name in available]
    if not gpus:
        return CPU
    key, known = _key(path, gpus), _read(cache)
    if key not in known:
        times = {name: _measure(path, opened, name, clock) for name in (CPU, *gpus)}
        known[key] = {name: seconds for name, seconds in times.items() if seconds is not None}
        with contextlib.suppress(OSError):
            cache.parent.mkdir(parents=True, exist_ok=True)
            partial = cache.with_suffix(f".{os.getpid()}")
            partial.write_bytes(msgspec.json.encode(known))
            partial.replace(cache)
    return _choose(known[key])


def known_times(path: Path, cache: Path, available: Collection[str]) -> tuple[str, Mapping[str, float]]:
    """Return the chosen provider and the measured seconds; no seconds if the graph was not measured on this device."""
    times = _read(cache).get(_key(path, [name for name in _GPUS if name in available]), {})
    return _choose(times), times


def short_name(provider: str) -> str:
    """Return a provider's name for people."""
    return provider.removesuffix("ExecutionProvider").replace("Tensorrt", "TensorRT")


def _choose(times: Mapping[str, float]) -> str:
    best = min(times, key=times.__getitem__, default=CPU)
    return best if times.get(best, 0.0) < _GAIN * times.get(CPU, float("inf")) else CPU


def _key(path: Path, gpus: Collection[str]) -> str:
    files = [file for folder, pattern in _GPU_NAMES for file in sorted(folder.glob(pattern))]
    names = [file.read_text(errors="replace") for file in files]
    device = msgspec.json.encode([onnxruntime.__version__, *gpus, *names])
    return f"{sha256_of(path)} {device.decode()}"


def _read(cache: Path) -> Times:
    try:
        return msgspec.json.decode(cache.read_bytes(), type=Times)
    except (OSError, msgspec.DecodeError):
        return {}


def _measure(path: Path, opened: Open, provider: str, clock: Callable[[], float]) -> float | None:
    """Return the median seconds of a run; None if the provider cannot run the graph."""
    try:
        session, times = opened(provider), []
        inputs = {
            one.name: np.ones([size if isinstance(size, int) else _LENGTH for size in one.shape], _KINDS[one.type])
            for one in session.get_inputs()
        }
        for _ in range(_RUNS):
            started = clock()
            session.run(None, inputs)
            times.append(clock() - started)
        return statistics.median(times[_WARM:])
    except Exception as error:  # onnxruntime raises classes of its own without a common base
        log.warning("%s cannot run %s, so another processor runs it: %s", short_name(provider), path, error)
        return None
