"""Triton's own Python environment, which set-up describes in `<environment>/triton.json`.

It holds the PyPI wheel `nvidia-pytriton`, numpy < 2 (with numpy 2 answers arrive empty), the engine's bindings and our
packages.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from router.child_environment import minimal_environment
from router.errors import ConfigError

DESCRIPTION = "triton.json"


class TritonEnvironment(msgspec.Struct, frozen=True):
    server: str  # the binary
    backend_directory: str  # the Python backend with the stub of this environment's Python beside it
    library_path: tuple[str, ...]
    path: str  # the environment's bin: the stub finds its packages by the first python on PATH, not by PYTHONPATH

    def environ(self, base: Mapping[str, str]) -> dict[str, str]:
        """Return what the server and its models need of `base`: no token or password of the gateway's."""
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
    """Read the description and check its paths. Raises ConfigError that names what is missing and how to get it."""
    description = root / DESCRIPTION
    try:
        environment = msgspec.json.decode(description.read_bytes(), type=TritonEnvironment)
    except OSError as error:
        raise ConfigError(
            f"{error.strerror}; run `make setup` to create Triton's environment", where=str(description)
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{error}; `make setup` writes it again", where=str(description)) from error
    for path in (environment.server, environment.backend_directory, *environment.library_path):
        if not Path(path).exists():
            raise ConfigError(
                f"{path} does not exist; run `make setup` to create Triton's environment", where=str(description)
            )
    return environment
