"""Which GPUs llama.cpp finds, asked in a child process: asking takes memory on each of them, which leaves with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec

_ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 30.0


class Gpu(msgspec.Struct, frozen=True):
    """One GPU. An integrated one shares its memory with everything else."""

    name: str
    description: str
    free_bytes: int
    total_bytes: int
    integrated: bool


def probe_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that this environment's llama.cpp can use; none where it cannot be loaded."""
    paths = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "models.llama_cpp.native.gpu"]
    try:
        child = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, timeout=_TIMEOUT_S, check=True
        )
        return msgspec.json.decode(child.stdout.splitlines()[-1], type=tuple[Gpu, ...])
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError, IndexError):
        return ()
