"""Programs that a set-up brings: Triton Inference Server from a wheel, others from the distribution's packages.

Triton comes from the PyPI wheel `nvidia-pytriton`, in an environment of its own (`.venv-triton`). The server needs
numpy<2 in that environment: with numpy 2 its Python backend answers OK with empty data. Its Python stub is looked for
beside the backend's library and finds packages through the environment's `bin` on PATH, so the backend is copied and
the stub of this Python's version is put beside it. The launcher's settings are written to `.venv-triton/triton.json`.

The distribution's packages are Redis, for jobs and the cache, and programs for tests (`PACKAGES`).
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .environments import install_locked, make_environment
from .llama import install_engine
from .places import Places, find_libpython, glibc_version
from .progress import Progress, StepFailed, child_environment, run

SKIP_ADVICE = "Or continue without a local cloud: CAUSEWAY_SKIP=triton make ..."
STUB = "triton_python_backend_stub"
LOADER_FAILED = 127


def install_triton(places: Places, progress: Progress) -> str:
    """Create Triton's environment and check that the server starts. Raises StepFailed."""
    libpython = require_triton_host(places, progress)
    make_environment(places, places.triton_venv, progress)
    lock = places.cloud_deploy / "requirements-triton.txt"
    install_locked(places, places.triton_python, lock, progress, with_dependencies=False)
    install_engine(places, places.triton_python, progress)
    packages = site_packages(places.triton_venv)
    # The models of the repository import our packages from the checkout.
    (packages / "causeway.pth").write_text(f"{places.checkout}\n", encoding="utf-8")
    server = packages / "pytriton" / "tritonserver"
    backends = _copy_backends(places, server)
    library_path = [packages / "nvidia_pytriton.libs", libpython]
    for program in (server / "bin" / "tritonserver", backends / "python" / STUB):
        _prove(program, library_path)
    description = {
        "server": str(server / "bin" / "tritonserver"),
        "backend_directory": str(backends),
        "cache_directory": str(server / "caches"),
        "library_path": [str(folder) for folder in library_path],
        "path": str(places.triton_venv / "bin"),
    }
    target = places.triton_venv / "triton.json"
    draft = target.with_suffix(".draft")
    draft.write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    draft.replace(target)
    return "Triton Inference Server"


def require_triton_host(places: Places, progress: Progress) -> Path:
    """Check the requirements of the server's wheel, and return libpython's folder. Raises StepFailed."""
    if platform.machine() not in ("x86_64", "aarch64"):
        raise StepFailed(f"Triton's wheel is for x86_64 and aarch64, but this is {platform.machine()}.", SKIP_ADVICE)
    if glibc_version() < (2, 35):
        raise StepFailed(
            f"Triton needs glibc 2.35 (Ubuntu 22.04, Debian 12), but this is {glibc_version()}.", SKIP_ADVICE
        )
    folder = find_libpython()
    if folder is None:
        package = f"libpython3.{sys.version_info[1]}"
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            raise StepFailed(
                "Triton's Python backend needs the shared libpython.", f"Run `apt-get install {package}`. {SKIP_ADVICE}"
            )
        apt_install(places, package, progress)
        folder = find_libpython()
    if folder is None:
        raise StepFailed("Triton's Python backend needs the shared libpython, which this Python lacks.", SKIP_ADVICE)
    return folder


def apt_install(places: Places, package: str, progress: Progress) -> None:
    """Install a package as root, on Debian and its derivatives. Raises StepFailed."""
    environ = {**child_environment(os.environ), "DEBIAN_FRONTEND": "noninteractive"}
    log = places.logs / f"apt-{package}.log"
    progress.show(f"apt-get install {package}")
    # Stale lists are the usual reason for a 404; a failed refresh is not fatal.
    try:
        run(["apt-get", "update", "-qq"], log=log, environ=environ)
    except StepFailed as fault:
        progress.show(f"apt-get update failed ({fault}), continuing with the present package lists")
    command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", package]
    run(command, log=log, environ=environ, advice=f"Install {package} by hand, then run the same command again.")


def site_packages(venv: Path) -> Path:
    return venv / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def _copy_backends(places: Places, server: Path) -> Path:
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    stub = server / "python_backend_stubs" / version / STUB
    if not stub.exists():
        raise StepFailed(f"Triton's wheel has no Python stub for {version}.", SKIP_ADVICE)
    target = places.triton_venv / "backends"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(server / "backends", target)
    shutil.copy2(stub, target / "python" / STUB)
    return target


def _prove(program: Path, library_path: list[Path]) -> None:
    """Check that both programs start: without arguments they end with 1; a loader error is 127."""
    environ = {**child_environment(os.environ), "LD_LIBRARY_PATH": os.pathsep.join(map(str, library_path))}
    answer = subprocess.run([program, "--help"], env=environ, capture_output=True, text=True, check=False)
    if answer.returncode == LOADER_FAILED:
        raise StepFailed(f"Triton's {program.name} does not start: {answer.stderr.strip()}.", SKIP_ADVICE)


_DEBIAN_POSTGRES = Path("/usr/lib/postgresql")  # its programs are not on PATH
_SYSTEM = ("/usr/sbin", "/usr/local/sbin")  # Debian keeps mosquitto off an ordinary account's PATH


class Package(NamedTuple):
    """A package of the distribution.

    `name`: its name in $CAUSEWAY_SKIP; `package`: its name in Debian; `programs`: the possible names of its program;
    `by_hand`: whether `apt-get install PACKAGE` installs it, and the command for other systems.
    """

    name: str
    package: str
    programs: Sequence[str]
    by_hand: str

    @property
    def advice(self) -> str:
        """Advice for a user without the program."""
        how = f"apt-get install {self.package} {self.by_hand}"
        return f"{how}. Or continue without it: CAUSEWAY_SKIP={self.name} make ..."

    def find(self) -> str | None:
        """Return the path of the program (of PostgreSQL the newest version); None if it is not installed."""
        newest_first = sorted(_DEBIAN_POSTGRES.glob("*/bin"), key=lambda path: int(path.parts[-2]), reverse=True)
        path = os.pathsep.join([*map(str, newest_first), *os.get_exec_path(), *_SYSTEM])
        return next((found for name in self.programs if (found := shutil.which(name, path=path)) is not None), None)

    def install(self, places: Places, progress: Progress) -> str:
        """Use the installed program, or as root install it. Raises StepFailed with the command to run by hand."""
        if self.find() is None:
            if os.geteuid() != 0 or shutil.which("apt-get") is None:
                raise StepFailed(f"{self.package} is not installed.", self.advice)
            apt_install(places, self.package, progress)
        if self.find() is None:
            raise StepFailed(f"The package {self.package} does not contain {self.programs[0]}.", "Install it by hand.")
        return self.package


REDIS = Package("redis", "redis-server", ["redis-server"], "(Debian, Ubuntu), dnf install redis (Fedora)")
NATS = Package("nats", "nats-server", ["nats-server"], "(Debian, Ubuntu)")
MOSQUITTO = Package("mosquitto", "mosquitto", ["mosquitto"], "(Debian, Ubuntu), dnf install mosquitto (Fedora)")
POSTGRES = Package("postgres", "postgresql", ["initdb"], "(Debian, Ubuntu), dnf install postgresql-server (Fedora)")
_CHROMIUM = ["chromium", "chromium-browser", "google-chrome"]
_ELSEWHERE = "(Debian), chromium-browser (Ubuntu), dnf install chromium (Fedora)"
CHROMIUM = Package("chromium", "chromium", _CHROMIUM, _ELSEWHERE)
# Debian's npm brings Node.js; `node.py` says which version is new enough.
NODE = Package("node", "npm", ["node", "nodejs"], "(Debian, Ubuntu), dnf install nodejs (Fedora)")
SWTPM = Package("swtpm", "swtpm", ["swtpm"], "(Debian, Ubuntu), dnf install swtpm (Fedora)")
# It brings the libraries by which systemd speaks to a TPM.
TPM2 = Package("tpm2", "tpm2-tools", ["tpm2"], "(Debian, Ubuntu), dnf install tpm2-tools (Fedora)")
# It also has promtool.
PROMETHEUS = Package("prometheus", "prometheus", ["prometheus"], "(Debian, Ubuntu)")
PACKAGES = (REDIS, NATS, MOSQUITTO, POSTGRES, CHROMIUM, NODE, SWTPM, TPM2, PROMETHEUS)
