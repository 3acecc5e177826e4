"""Which GPUs llama.cpp finds, asked in a child process: asking takes memory on each of them, which leaves with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

from ..child_process import child_environment

_TIMEOUT_S = 30.0
_GPU_FILES = (Path("/dev/nvidia0"), Path("/etc/nv_tegra_release"))  # NVIDIA's driver; JetPack


class Gpu(msgspec.Struct, frozen=True):
    """One GPU, which may share its memory with everything else."""

    name: str
    description: str
    free_bytes: int
    total_bytes: int


class GpuReport(msgspec.Struct, frozen=True):
    """The GPUs that llama.cpp can use, and what it was compiled for, such as CUDA and CPU."""

    gpus: tuple[Gpu, ...] = ()
    backends: tuple[str, ...] = ()


def has_nvidia_gpu() -> bool:
    """Whether this machine has one, as its driver or JetPack says, whatever llama.cpp was compiled for."""
    return any(path.exists() for path in _GPU_FILES)


def probe_gpus() -> GpuReport:
    """Ask this environment's llama.cpp; an empty report where it cannot be loaded."""
    command = [sys.executable, "-m", "models.llama_cpp.native.gpu"]
    try:
        child = subprocess.run(
            command,
            env=child_environment(),
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
        return msgspec.json.decode(child.stdout.splitlines()[-1], type=GpuReport)
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError, IndexError):
        return GpuReport()
