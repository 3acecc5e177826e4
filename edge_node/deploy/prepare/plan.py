"""Which steps a command needs. Their keys hold everything that their results depend on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from .environments import NETWORK_ADVICE, install_locked, make_environment
from .llama import cached_wheel, expected_minutes, install_engine, wheel_key
from .places import Places, child_environment
from .progress import Progress, StepFailed, run
from .redis import install_redis
from .steps import Step, digest
from .triton import install_triton

OPTIONAL = ("triton", "redis")


def plan(goal: str, places: Places, environ: Mapping[str, str]) -> list[Step]:
    """The steps for `run`, `test`, `check` or `train`, in order. $CAUSEWAY_SKIP names optional ones to leave out."""
    skipped = set(environ.get("CAUSEWAY_SKIP", "").replace(",", " ").split())
    if not skipped <= set(OPTIONAL):
        raise StepFailed(f"CAUSEWAY_SKIP={environ['CAUSEWAY_SKIP']!r}", f"It may name: {' '.join(OPTIONAL)}")
    environment, packages, project = _environment(places), _packages(places, "requirements.txt"), _project(places)
    development = _packages(places, "requirements-dev.txt")
    engine, triton, redis = _engine(places, environ), _triton(places, environ), _redis(places)
    goals = {
        "run": [environment, packages, engine, project, triton],
        "test": [environment, packages, development, engine, project, triton, redis],
        "check": [environment, packages, development, project],
        "train": [environment, packages, development, engine, project, _torch(places, environ)],
    }
    left_out = {id({"triton": triton, "redis": redis}[name]) for name in skipped}
    return [step for step in goals[goal] if id(step) not in left_out]


def _stamp(places: Places, name: str) -> Path:
    return places.venv / ".causeway" / name


def _environment(places: Places) -> Step:
    return Step(
        title="Python environment",
        stamp=_stamp(places, "environment"),
        key=_python_key(places),
        there=places.venv_python.exists,
        work=lambda progress: make_environment(places, places.venv, progress),
    )


def _packages(places: Places, name: str) -> Step:
    lock = places.edge_deploy / name
    what = "packages for development" if "dev" in name else "packages"

    def work(progress: Progress) -> str:
        return f"{install_locked(places, places.venv_python, lock, progress)} {what}"

    return Step(
        title=what,
        stamp=_stamp(places, lock.stem),
        key=digest(_python_key(places), lock),
        there=places.venv_python.exists,
        work=work,
    )


def _engine(places: Places, environ: Mapping[str, str]) -> Step:
    compiled = cached_wheel(places, environ) is not None
    return Step(
        title="llama.cpp" if compiled else f"compiling llama.cpp (about {expected_minutes()} min, once per machine)",
        stamp=_stamp(places, "engine"),
        key=digest(_python_key(places), wheel_key(places, environ)),
        there=lambda: any(places.venv.glob("lib/python3*/site-packages/llama_cpp/lib/libllama.so")),
        work=lambda progress: install_engine(places, places.venv_python, progress),
    )


def _project(places: Places) -> Step:
    """The checkout itself, editable: our console commands, and imports from anywhere."""

    def work(_progress: Progress) -> str:
        flags = ["--no-deps", "--no-build-isolation", "--no-index"]
        run(
            [places.venv_python, "-m", "pip", "install", *flags, "--editable", places.root],
            log=places.logs / "project.log",
            environ=child_environment(os.environ),
            advice="The log says why; pyproject.toml is where to look.",
        )
        return "causeway itself"

    return Step(
        title="causeway itself",
        stamp=_stamp(places, "project"),
        key=digest(_python_key(places), places.root / "pyproject.toml"),
        there=(places.venv / "bin" / "causeway-edge").exists,
        work=work,
    )


def _triton(places: Places, environ: Mapping[str, str]) -> Step:
    lock = places.cloud_deploy / "requirements-triton.txt"
    return Step(
        title="Triton Inference Server (180 MB)",
        stamp=places.triton_venv / ".causeway" / "triton",
        key=digest(_python_key(places), lock, wheel_key(places, environ)),
        there=(places.triton_venv / "triton.json").exists,
        work=lambda progress: install_triton(places, progress),
    )


def _redis(places: Places) -> Step:
    return Step(
        title="redis-server",
        stamp=_stamp(places, "redis"),
        key="redis-server",
        there=lambda: shutil.which("redis-server") is not None,
        work=lambda progress: install_redis(places, progress),
    )


def _torch(places: Places, environ: Mapping[str, str]) -> Step:
    """torch is in no lock file: which build fits (CPU, CUDA, Jetson) and where it comes from is the user's to say."""
    project = places.root / "pyproject.toml"
    wish = environ.get("CAUSEWAY_TORCH", "torch")

    def work(progress: Progress) -> str:
        run(
            [places.venv_python, "-m", "pip", "install", "--progress-bar=off", wish, *train_extra(project)],
            log=places.logs / "torch.log",
            environ=child_environment(os.environ),
            watch=lambda line: (
                line.strip()[:100] if line.startswith(("Collecting", "Downloading", "Installing")) else None
            ),
            progress=progress,
            advice=NETWORK_ADVICE,
        )
        return wish

    return Step(
        title=f"{wish} (the usual build brings several GB of CUDA: point pip at a CPU build if you want that)",
        stamp=_stamp(places, "torch"),
        key=digest(_python_key(places), project, wish),
        there=lambda: any(places.venv.glob("lib/python3*/site-packages/torch/__init__.py")),
        work=work,
    )


def train_extra(project: Path) -> list[str]:
    """The requirements of pyproject's extra `train`."""
    import tomllib  # new in 3.11: this module is also read by older Pythons, on the way to being told so

    with project.open("rb") as file:
        wishes = tomllib.load(file)["project"]["optional-dependencies"]["train"]
    return [str(wish) for wish in wishes]


def _python_key(places: Places) -> str:
    """Environments hold absolute paths and one Python: moving the checkout or changing the Python makes them anew."""
    resolved = places.python.resolve()
    return digest(str(places.root), str(resolved))
