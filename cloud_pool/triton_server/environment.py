"""Triton's own Python environment, as set-up describes it in `<environment>/triton.json`.

It holds the PyPI wheel `nvidia-pytriton`, numpy < 2 (with numpy 2 answers arrive empty), the engine's bindings and
these packages.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from router.errors import ConfigError

DESCRIPTION = "triton.json"


class TritonEnvironment(msgspec.Struct, frozen=True):
    server: str  # the binary
    backend_directory: str  # the Python backend with the stub of this environment's Python beside it
    library_path: tuple[str, ...]
    path: str  # the environment's bin: the stub finds its packages by the first python on PATH, not by PYTHONPATH

    def environ(self, base: Mapping[str, str]) -> dict[str, str]:
        """`base` with what the server needs."""
        kept = {name: value for name, value in base.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
        return {
            **kept,
            "PATH": ":".join(filter(None, (self.path, base.get("PATH")))),
            "LD_LIBRARY_PATH": ":".join(filter(None, (*self.library_path, base.get("LD_LIBRARY_PATH")))),
            # Threads that spin while they wait make a decode ten times slower where cores are shared.
            "OMP_WAIT_POLICY": base.get("OMP_WAIT_POLICY", "PASSIVE"),
        }


def find_environment(root: Path) -> TritonEnvironment:
    """Raises ConfigError that says what is missing and how to get it."""
    description = root / DESCRIPTION
    try:
        found = msgspec.json.decode(description.read_bytes(), type=TritonEnvironment)
    except OSError as error:
        raise ConfigError(
            f"{error.strerror}; `make setup` makes Triton's environment", where=str(description)
        ) from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{error}; `make setup` writes it anew", where=str(description)) from error
    for path in (found.server, found.backend_directory, *found.library_path):
        if not Path(path).exists():
            raise ConfigError(f"{path} is gone; `make setup` makes Triton's environment anew", where=str(description))
    return found
