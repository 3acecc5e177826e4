"""The steps that a command needs. Their keys cover everything on which their results depend."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .environments import NETWORK_ADVICE, install_locked, make_environment
from .llama import cached_wheel, expected_minutes, install_engine, wheel_key
from .node import node_steps
from .places import Places
from .programs import PACKAGES, Package, install_triton
from .progress import Progress, Step, StepFailed, digest, run
from .vllm import MODEL, install_vllm, is_installed, vllm_lock

OPTIONAL = ("triton", *(package.name for package in PACKAGES), "torch")
# The release that our tests and our models were made with. Not in a lock file: see `_torch`.
TORCH = "torch==2.13.0"


def plan(goal: str, places: Places, environ: Mapping[str, str]) -> list[Step]:
    """Return the steps of a goal in order, except those in $CAUSEWAY_SKIP. `quick` never compiles llama.cpp."""
    skipped = set(environ.get("CAUSEWAY_SKIP", "").replace(",", " ").split())
    if not skipped <= set(OPTIONAL):
        raise StepFailed(f"CAUSEWAY_SKIP={environ['CAUSEWAY_SKIP']!r}", f"It may name: {' '.join(OPTIONAL)}.")
    environment, packages = _environment(places), _packages(places, places.edge_deploy / "requirements.txt")
    sdk = places.root / "edge_node" / "sdk"
    project = _editable(places, "project", "causeway itself", "causeway-edge", places.root, sdk)
    tools = _editable(places, "causeway-train", "causeway-train", "causeway-train", places.training)
    development = _packages(places, places.edge_deploy / "requirements-dev.txt")
    engine, triton = _engine(places, environ), _triton(places, environ)
    programs = {package.name: _from_distribution(places, package) for package in PACKAGES}
    node = node_steps(places, places.venv / ".causeway")
    training, torch = _packages(places, places.training / "requirements-train.txt"), _torch(places, environ)
    bench = [environment, packages, development, engine, project, tools, triton]
    compiled = [] if cached_wheel(places, environ) is None else [engine]
    goals = {
        "run": [environment, packages, engine, project, tools, triton],
        "fleet": [environment, packages, engine, project],
        "test": [*bench, *programs.values(), *node, training, torch],
        "dist": [environment, packages, *node[:2]],
        "bench": [*bench, programs["redis"], programs["postgres"]],
        "check": [environment, packages, development, project, tools],
        "quick": [environment, packages, development, *compiled, project, tools],
        "vllm": [_vllm(places, environ)],
        "train": [environment, packages, development, engine, project, tools, training, torch],
    }
    optional = {name: [step] for name, step in programs.items()} | {"triton": [triton], "torch": [training, torch]}
    optional["node"] += node
    left_out = {id(step) for name in skipped for step in optional[name]}
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


def _packages(places: Places, lock: Path) -> Step:
    purposes = {"requirements-dev": "packages for development", "requirements-train": "packages for training"}
    what = purposes.get(lock.stem, "packages")

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


def _editable(places: Places, stamp: str, title: str, command: str, *folders: Path) -> Step:
    """Return the step that installs distributions of the checkout as editable, with their console commands.

    `command` is one of these commands. The SDK's setup.py writes the sync client from the async one: a change of either
    runs the step again.
    """
    patterns = ("pyproject.toml", "setup.py", "src/*/_async/*.py")
    sources = [path for folder in folders for pattern in patterns for path in sorted(folder.glob(pattern))]
    written = [path.parents[1] / "_sync" / path.name for path in sources if path.parent.name == "_async"]
    link = places.checkout / "causeway_server"

    def work(_progress: Progress) -> str:
        flags = ["--no-deps", "--no-build-isolation", "--no-index"]
        editable = [word for folder in folders for word in ("--editable", str(folder))]
        run(
            [places.venv_python, "-m", "pip", "install", *flags, *editable],
            log=places.logs / f"{stamp}.log",
            advice="The log says why; pyproject.toml is where to look.",
        )
        places.checkout.mkdir(exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(Path("..", ".."))
        return title

    return Step(
        title=title,
        stamp=_stamp(places, stamp),
        key=digest(_python_key(places), *sources),
        there=lambda: all(path.exists() for path in (places.venv / "bin" / command, link, *written)),
        work=work,
    )


def _triton(places: Places, environ: Mapping[str, str]) -> Step:
    lock = places.cloud_deploy / "requirements-triton.txt"
    return Step(
        title="Triton Inference Server (180 MB)",
        stamp=places.triton_venv / ".causeway" / "triton",
        key=digest(_python_key(places), lock, wheel_key(places, environ), str(places.checkout)),
        there=(places.triton_venv / "triton.json").exists,
        work=lambda progress: install_triton(places, progress),
    )


def _vllm(places: Places, environ: Mapping[str, str]) -> Step:
    return Step(
        title="vLLM",
        stamp=places.vllm / "installed",
        key=digest(str(places.python.resolve()), vllm_lock(places), MODEL),
        there=lambda: is_installed(places),
        work=lambda progress: install_vllm(places, environ, progress),
    )


def _from_distribution(places: Places, package: Package) -> Step:
    return Step(
        title=package.package,
        stamp=_stamp(places, package.name),
        key=package.package,
        there=lambda: package.find() is not None,
        work=lambda progress: package.install(places, progress),
    )


def _torch(places: Places, environ: Mapping[str, str]) -> Step:
    """Return the step that installs torch, pinned by version but not in a lock file.

    A hash would fix the build, and the user chooses that (CPU, CUDA, a Jetson's) and its source. The dependencies of a
    CPU build are in the lock file, so that a build found by pip adds nothing more.
    """
    wish = environ.get("CAUSEWAY_TORCH", TORCH)

    def work(progress: Progress) -> str:
        run(
            [places.venv_python, "-m", "pip", "install", "--progress-bar=off", wish],
            log=places.logs / "torch.log",
            watch=lambda line: (
                line.strip()[:100] if line.startswith(("Collecting", "Downloading", "Installing")) else None
            ),
            progress=progress,
            advice=f"{NETWORK_ADVICE} Another build: CAUSEWAY_TORCH=torch==X make ... Without: CAUSEWAY_SKIP=torch.",
        )
        return wish

    return Step(
        title=f"{wish} (the usual build brings several GB of CUDA; point pip at a CPU build to avoid that)",
        stamp=_stamp(places, "torch"),
        key=digest(_python_key(places), wish),
        there=lambda: any(places.venv.glob("lib/python3*/site-packages/torch/__init__.py")),
        work=work,
    )


def _python_key(places: Places) -> str:
    """Return the key of the Python: moving the checkout or changing the Python makes the environments again."""
    resolved = places.python.resolve()
    return digest(str(places.root), str(resolved))
