"""Writes the lock files anew (`make lock`): versions and hashes, and nothing about where the packages come from.

A version in a lock file stays while it fits pyproject.toml; delete the file first to take the newest of everything.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from .places import Places, child_environment
from .progress import Progress, StepFailed, run

# What the wheel of llama-cpp-python imports, and what an editable install of ours needs.
RUN_EXTRAS = ("diskcache", "setuptools>=77", "wheel")
# The SDK comes from this checkout.
ROLES = (
    "--extra=edge",
    "--extra=cloud",
    "--extra=fleet",
    "--extra=hub",
    "--extra=cpu",
    "--no-emit-package=causeway-sdk",
)
# Optional parts that the tests need.
OPTIONAL = ("--extra=grpc", "--extra=nats", "--extra=kafka", "--extra=mqtt")
BUILD = ("cmake>=3.25", "ninja", "scikit-build-core[pyproject]>=0.9.2", "pip")
LLAMA = ("llama-cpp-python==0.3.36",)
# The extra `torch` of models/train without torch, and what a CPU build of torch depends on (see plan.py).
TRAIN = ("onnx>=1.17", "tokenizers>=0.20", "filelock", "fsspec", "jinja2", "networkx", "sympy", "typing-extensions")
# Without dependencies: pytriton's own (client, web server) are not needed to run the server's binary.
TRITON = (
    "nvidia-pytriton==0.7.0",
    "numpy<2",
    "msgspec",
    "jinja2",
    "llguidance>=1.9.1,<2",
    "markupsafe",
    "diskcache",
    "typing-extensions",
    "psutil",
)

# pyproject's [tool.uv] environments: true wherever a set-up gets past its checks, so only noise in every line.
_SYSTEM = "platform_python_implementation == 'CPython' and sys_platform == 'linux'"
MACHINES = f"((platform_machine == 'aarch64' and {_SYSTEM}) or (platform_machine == 'x86_64' and {_SYSTEM}))"
COMMON_MARKER = f" ; python_full_version < '3.14' and {_SYSTEM}"


def write_locks(places: Places, progress: Progress) -> str:
    """Resolve the packages of every environment and write the lock files. Raises StepFailed."""
    edge, cloud = places.edge_deploy, places.cloud_deploy
    project = places.root / "pyproject.toml"
    _compile(places, progress, edge / "requirements.txt", RUN_EXTRAS, project, *ROLES)
    pins = f"--constraints={edge / 'requirements.txt'}"
    dev = (*ROLES, *OPTIONAL, "--extra=dev", pins)
    _compile(places, progress, edge / "requirements-dev.txt", RUN_EXTRAS, project, *dev)
    modalities = ("--extra=voice", "--extra=pictures", "--no-emit-package=causeway-sdk")
    _compile(places, progress, edge / "requirements-modalities.txt", (), project, *modalities, pins)
    more_pins = f"--constraints={edge / 'requirements-dev.txt'}"
    _compile(places, progress, places.training / "requirements-train.txt", TRAIN, None, more_pins)
    _compile(places, progress, edge / "requirements-build.txt", BUILD)
    _compile(places, progress, edge / "requirements-llama.txt", LLAMA, None, "--no-deps")
    _compile(places, progress, cloud / "requirements-triton.txt", TRITON, None, "--no-deps")
    return "lock files written"


def _compile(
    places: Places, progress: Progress, target: Path, extra: tuple[str, ...], project: Path | None = None, *flags: str
) -> None:
    progress.show(f"resolving {target.name}")
    hints = places.cache / "lock" / "wishes.in"
    hints.parent.mkdir(parents=True, exist_ok=True)
    hints.write_text("\n".join(extra) + "\n", encoding="utf-8")
    sources = [hints] if project is None else [project, hints]
    plain = ["--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links", "--generate-hashes"]
    draft = hints.with_name(target.name)
    draft.write_text(target.read_text(encoding="utf-8") if target.exists() else "", encoding="utf-8")
    uv: list[str | Path] = [places.venv / "bin" / "uv", "pip", "compile", "-q", "--universal", "--python-version=3.11"]
    run(
        [*uv, *plain, *flags, "-o", draft, *sources],
        log=places.logs / "lock.log",
        environ=child_environment(os.environ),
        advice=f"uv writes the locks: {places.venv_python} -m pip install uv",
        cwd=places.root,
    )
    text = draft.read_text(encoding="utf-8")
    if re.search(r"://|^-", text, flags=re.MULTILINE):
        raise StepFailed(f"{target.name} would name a place that packages come from", f"Look at {draft}.")
    target.write_text(text.replace(MACHINES, _SYSTEM).replace(COMMON_MARKER, ""), encoding="utf-8")
