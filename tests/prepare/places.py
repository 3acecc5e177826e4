"""The Python, compiler and system of this machine, the advice if they are unsuitable, and the set-up's folders.

The folders are the checkout, its environments, and the cache that is shared by all checkouts.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .progress import StepFailed

OLDEST = (3, 11)  # no release of common-expression-language supports an older one
NEWEST = (3, 12)  # Triton's environment needs numpy<2, which was never built for a newer one
CANDIDATES = ("python3.12", "python3.11")
CHOSEN = "CAUSEWAY_PREPARE_PYTHON"  # set for the restarted program, so that it does not choose again


def choose_python(venv: Path, environ: Mapping[str, str]) -> None:
    """Restart this program under another Python if that one is better, else return.

    (1) A Python that the user named is used: make PYTHON=/path/to/python3.11. (2) A valid environment that was made
    here keeps its Python, even if another Python is now first on PATH: making it again would delete the packages that
    the user installed into it. (3) The current Python, if its version is supported. (4) One of CANDIDATES on PATH.
    Raises StepFailed if there is none. JetPack 6 ships Python 3.10; its base, Ubuntu 22.04, packages 3.11 too.
    """
    supported = OLDEST <= sys.version_info[:2] <= NEWEST
    named = bool(environ.get("PYTHON")) or CHOSEN in environ
    if not named:
        resident = _resident(venv)
        if resident is not None and resident != base_python().resolve():  # (2)
            _start_again(str(resident), environ)
    if supported:  # (1) (3)
        return
    for name in () if named else CANDIDATES:  # (4)
        path = shutil.which(name)
        if path is not None and _version(path) is not None:
            _start_again(path, environ)
    version = ".".join(map(str, sys.version_info[:3]))
    raise StepFailed(
        f"Python 3.11 or 3.12 is required, but this is {version} ({sys.executable}).",
        "Install one (Debian, Ubuntu: apt-get install python3.11 python3.11-venv), "
        "or name one: make PYTHON=/path/to/python3.11 ...",
    )


def base_python() -> Path:
    """Return the interpreter beneath the environment of an active .venv, else this interpreter."""
    return Path(getattr(sys, "_base_executable", "") or sys.executable)


def is_made_here(venv: Path) -> bool:
    """Return whether an environment was made at this path. A moved one is useless, because it contains absolute
    paths.
    """
    try:
        return str(venv) in (venv / "bin" / "activate").read_text(encoding="utf-8")
    except OSError:
        return False


def _resident(venv: Path) -> Path | None:
    python = venv / "bin" / "python"
    version = _version(str(python)) if is_made_here(venv) else None
    return python.resolve() if version is not None and OLDEST <= version <= NEWEST else None


def _version(python: str) -> tuple[int, int] | None:
    """Return the version of a Python; None if it does not run, as pyenv's shims of inactive versions."""
    script = "import sys, venv; print(*sys.version_info[:2])"
    try:
        answer = subprocess.run([python, "-c", script], capture_output=True, text=True, check=False)
    except OSError:
        return None
    numbers = answer.stdout.split()
    return (int(numbers[0]), int(numbers[1])) if answer.returncode == 0 and len(numbers) == 2 else None


def _start_again(python: str, environ: Mapping[str, str]) -> None:
    os.execve(python, [python, "-m", "tests.prepare", *sys.argv[1:]], {**environ, CHOSEN: python})


def require_venv() -> None:
    """Check that `venv` works, which Debian and Ubuntu package separately. Raises StepFailed."""
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        raise StepFailed(
            "This Python cannot make virtual environments.",
            f"Install its venv package: `apt-get install python{version}-venv`.",
        ) from error


def require_compilers() -> None:
    """Check for the C and C++ compilers that llama.cpp needs. CMake and Ninja come with pip. Raises StepFailed."""
    missing = [
        names[0] for names in (("cc", "gcc", "clang"), ("c++", "g++", "clang++")) if not any(map(shutil.which, names))
    ]
    if missing:
        raise StepFailed(
            f"No compiler found: {', '.join(missing)}.",
            "Install one: apt-get install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora).",
        )


def require_disk(folder: Path, needed_bytes: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise StepFailed(
            (
                f"{folder} has {free / 1000000000.0:.1f} GB free, but {needed_bytes / 1000000000.0:.1f} GB "
                "are needed meanwhile."
            ),
            "Free some space, or put the cache elsewhere: CAUSEWAY_CACHE=/path make ...",
        )


def glibc_version() -> tuple[int, int]:
    """Return the version of glibc; (0, 0) for another C library."""
    try:
        name, _, number = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (ValueError, OSError):
        return (0, 0)
    major, _, minor = number.partition(".")
    return (int(major), int(minor)) if name == "glibc" and minor.isdigit() else (0, 0)


def find_libpython() -> Path | None:
    """Return the folder of the shared libpython that Triton's Python stub loads; None if this Python has none."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    name = f"libpython{version}.so.1.0"
    folders = [
        sysconfig.get_config_var("LIBDIR"),
        Path(sys.base_prefix) / "lib",
        "/usr/lib",
        "/usr/local/lib",
        "/usr/lib64",
    ]
    multiarch = sysconfig.get_config_var("MULTIARCH")
    if multiarch:
        folders.append(Path("/usr/lib") / multiarch)
    return next((Path(folder) for folder in folders if folder and (Path(folder) / name).exists()), None)


@dataclass(frozen=True)
class Places:
    root: Path  # folder of the checkout
    cache: Path  # cache that all checkouts share: compiled wheels, logs
    python: Path  # interpreter from which the environments are made

    @property
    def venv(self) -> Path:
        return self.root / ".venv"

    @property
    def checkout(self) -> Path:
        """The folder that stands for site-packages where Python or mypy looks for `causeway_server` by its path."""
        return self.venv / "checkout"

    @property
    def triton_venv(self) -> Path:
        """Triton's own environment: its server needs numpy<2."""
        return self.root / ".venv-triton"

    @property
    def vllm(self) -> Path:
        """vLLM and its weights, which all checkouts share."""
        return self.cache / "vllm"

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
    """Return the folders of the checkout of this file. $CAUSEWAY_CACHE, then $XDG_CACHE_HOME, name the cache."""
    root = Path(__file__).resolve().parents[2]
    if environ.get("CAUSEWAY_CACHE"):
        cache = Path(environ["CAUSEWAY_CACHE"]).expanduser()
    else:
        cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "causeway"
    return Places(root=root, cache=cache.absolute(), python=base_python())


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
