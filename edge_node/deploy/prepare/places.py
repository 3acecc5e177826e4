"""Where things lie: the checkout, its two environments, and the cache that outlives it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .checks import base_python


@dataclass(frozen=True)
class Places:
    root: Path  # the checkout
    cache: Path  # kept between checkouts: compiled wheels, logs
    python: Path  # the interpreter that the environments are made from

    @property
    def venv(self) -> Path:
        return self.root / ".venv"

    @property
    def triton_venv(self) -> Path:
        """Triton's own environment: its server needs numpy<2."""
        return self.root / ".venv-triton"

    @property
    def venv_python(self) -> Path:
        return self.venv / "bin" / "python"

    @property
    def triton_python(self) -> Path:
        return self.triton_venv / "bin" / "python"

    @property
    def edge_deploy(self) -> Path:
        return self.root / "edge_node" / "deploy"

    @property
    def cloud_deploy(self) -> Path:
        return self.root / "cloud_pool" / "deploy"

    @property
    def training(self) -> Path:
        """The distribution that trains models."""
        return self.root / "models" / "train"

    @property
    def logs(self) -> Path:
        return self.cache / "logs"


def find_places(environ: Mapping[str, str]) -> Places:
    """The places of the checkout that this file belongs to. $CAUSEWAY_CACHE, then $XDG_CACHE_HOME, name the cache."""
    root = Path(__file__).resolve().parents[3]
    if environ.get("CAUSEWAY_CACHE"):
        cache = Path(environ["CAUSEWAY_CACHE"]).expanduser()
    else:
        cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "causeway"
    return Places(root=root, cache=cache.absolute(), python=base_python())


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for pip and cmake: what would steer them past our own environments is taken out."""
    astray = {
        "PYTHONPATH",
        "PYTHONHOME",
        "VIRTUAL_ENV",
        "PIP_USER",
        "PIP_TARGET",
        "PIP_PREFIX",
        "PIP_REQUIRE_VIRTUALENV",
    }
    kept = {name: value for name, value in environ.items() if name not in astray}
    return {**kept, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PYTHONUNBUFFERED": "1"}


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
