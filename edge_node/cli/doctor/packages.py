"""Checks of the packages: present, in the right version, not shadowed; llama.cpp loads on this CPU."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path

import msgspec
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from causeway_server.models.catalog.artifact import find_artifact
from causeway_server.models.llama_cpp.native.resources import GpuReport
from causeway_server.router.child_environment import minimal_environment

from ...config.schema import EngineConfig
from . import Finding, fail, ok, warn

OUR_IMPORTS = {"causeway_server": "causeway-router", "causeway_sdk": "causeway-sdk"}
"""Our import names, and the distributions that provide them."""
_ROOMS = ("router", "models", "cloud_pool", "fleet")
OLDEST_PYTHON = (3, 11)
_GRAPHS = ("encoder", "edge-quality")
_DISTRIBUTION = "causeway-router"
_LOAD_TIMEOUT_S = 60.0
_CPU_BACKENDS = ("CPU", "BLAS")  # time to load llama.cpp
# Import names that several distributions provide: the one installed last has overwritten the others.
_SHARED_IMPORTS = ("onnxruntime", "llama_cpp")


class Installed(msgspec.Struct, frozen=True):
    """An environment. `requires`: the requirements in causeway-router's metadata; empty without such a distribution."""

    versions: Mapping[str, str]  # version by distribution
    owners: Mapping[str, frozenset[str]]  # distributions by top-level import name
    requires: tuple[str, ...]


def read_installed(path: Sequence[str] | None = None) -> Installed:
    """Read the environment at `path`; None for the running environment."""
    versions: dict[str, str] = {}
    owners: dict[str, set[str]] = {}
    requires: tuple[str, ...] = ()
    for distribution in distributions(path=list(sys.path if path is None else path)):
        name = canonicalize_name(distribution.metadata["Name"] or "")
        if not name or name in versions:
            continue  # the first on the path is the one that is imported
        versions[name] = distribution.version
        for top in _top_level(distribution):
            owners.setdefault(top, set()).add(name)
        if name == _DISTRIBUTION:
            requires = tuple(distribution.requires or ())
    return Installed(versions, {top: frozenset(names) for top, names in owners.items()}, requires)


def _top_level(distribution: Distribution) -> set[str]:
    declared = distribution.read_text("top_level.txt")
    if declared is not None:
        return set(declared.split())
    names = {file.parts[0].removesuffix(".py") for file in distribution.files or () if file.suffix in (".py", ".so")}
    return {name for name in names if name.isidentifier()}


def locate(name: str) -> Path | None:
    """Return the folder that ``import name`` would load."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin).parent if spec and spec.origin else None


def check_python(version: tuple[int, int] = sys.version_info[:2]) -> Finding:
    installed = ".".join(map(str, version))
    if version < OLDEST_PYTHON:
        return fail("python", f"Python {installed}.", "Install Python 3.11 or newer.")
    return ok("python", f"Python {installed}.")


def check_requirements(installed: Installed, *, needs_engine: bool) -> Iterator[Finding]:
    """Check the requirements of causeway and of its extra `edge`, and of `engine` if there is an engine."""
    if not installed.requires:
        advice = "Run `make setup`, or `pip install causeway-router[edge,engine,cpu]`."
        yield fail("packages", f"{_DISTRIBUTION} is not installed as a distribution in this environment.", advice)
        return
    unmet = [finding for text in installed.requires if (finding := _check_one(text, installed, needs_engine))]
    yield from unmet
    if not unmet:
        yield ok(
            "packages", f"{_DISTRIBUTION} {installed.versions[_DISTRIBUTION]} and all its requirements are installed."
        )


def _check_one(text: str, installed: Installed, needs_engine: bool) -> Finding | None:
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        return warn(
            "packages",
            f"{_DISTRIBUTION}'s metadata has the invalid requirement {text!r}.",
            f"Reinstall {_DISTRIBUTION}.",
        )
    extras = ("", "edge", "engine") if needs_engine else ("", "edge")
    if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
        return None
    version = installed.versions.get(canonicalize_name(requirement.name))
    command = f"pip install '{requirement.name}{requirement.specifier}'"
    if version is None:
        return fail("packages", f"{requirement.name} is missing.", f"Run `make setup`, or `{command}`.")
    if not requirement.specifier.contains(version, prereleases=True):
        found = f"{requirement.name} is {version}, but {requirement.specifier} is required."
        return fail("packages", found, f"Run `make setup`, or `{command}`.")
    return None


def check_owners(installed: Installed, locate: Callable[[str], Path | None] = locate) -> Iterator[Finding]:
    """Check for (1) two distributions with one import name, (2) another package that shadows one of ours."""
    clean = True
    for name in (*OUR_IMPORTS, *_SHARED_IMPORTS):
        others = installed.owners.get(name, frozenset()) - {OUR_IMPORTS.get(name, "")}
        if (name in OUR_IMPORTS and others) or len(others) > 1:  # (1)
            clean = False
            yield _conflict(name, sorted(others))
    home = locate("causeway_server.edge_node")
    for name in (f"causeway_server.{room}" for room in _ROOMS if home):
        folder = locate(name)
        if folder is not None and home is not None and folder.parent != home.parent:  # (2)
            clean = False
            yield fail(
                "import names",
                f"`import {name}` loads {folder}, not the package beside {home}.",
                f"Start from another folder, or rename {folder}.",
            )
    if clean:
        yield ok("import names", "Each import name belongs to one distribution.")


def _conflict(name: str, others: list[str]) -> Finding:
    if name in OUR_IMPORTS:
        return fail(
            "import names",
            f"The import name `{name}` also belongs to {', '.join(others)}",
            f"Give {OUR_IMPORTS[name]} its own environment, or `pip uninstall {' '.join(others)}` and reinstall it.",
        )
    keep = next((other for other in others if other.endswith("gpu")), others[0])
    return fail(
        "import names",
        f"The import name `{name}` belongs to {' and '.join(others)}: the package that was installed last has "
        "overwritten the other.",
        f"Run `pip uninstall -y {' '.join(others)} && pip install {keep}` (or another of these packages).",
    )


def check_gpus(engine: EngineConfig, report: GpuReport, has_gpu: bool) -> Finding:
    """Name the GPUs in llama.cpp's `report`, or say why the CPU decodes although NVIDIA's driver or JetPack has one."""
    compiled_for = [name for name in report.backends if name not in _CPU_BACKENDS]
    if report.gpus:
        gpus = [f"{gpu.name} ({gpu.description}), {gpu.free_bytes / 2**30:.1f} GiB free" for gpu in report.gpus]
        return ok("gpu", f"llama.cpp finds {', '.join(gpus)}; engine.gpu_layers is {engine.gpu_layers}.")
    if engine.gpu_layers == 0:
        return ok("gpu", "engine.gpu_layers is 0, so the CPU decodes.")
    if compiled_for:
        text = f"llama.cpp is compiled for {', '.join(compiled_for)}, but finds no GPU, so the CPU decodes."
        return warn("gpu", text, "Check the driver (`nvidia-smi`), and that this user may open the GPU's device nodes.")
    if has_gpu or engine.gpu_layers != "auto":
        reason = "This device has an NVIDIA GPU" if has_gpu else f"engine.gpu_layers is {engine.gpu_layers}"
        text = f"{reason}, but llama.cpp is compiled only for the CPU, so the CPU decodes."
        return warn("gpu", text, "Compile llama.cpp for the GPU with `make setup CUDA=1`.")
    return ok("gpu", "llama.cpp finds no GPU, so the CPU decodes.")


def check_providers(available: Collection[str] | None = None, cache: Path | None = None) -> Iterator[Finding]:
    """Name the execution provider of each learned signal, if ONNX Runtime is installed. `available`: its providers;
    None: ask it; `cache`: file of the measured times; None: the daemon's.
    """
    try:
        from causeway_server.models.signals.providers import cache_file, installed_providers, known_times, short_name
    except ImportError:
        return
    found = installed_providers() if available is None else available
    told = []
    for name in _GRAPHS:
        chosen, times = known_times(find_artifact(name).path, cache or cache_file(), found)
        measured = ", ".join(f"{short_name(one)} {1e6 * seconds:.0f} us" for one, seconds in times.items())
        told.append(f"{name} on {short_name(chosen)}" + (f" ({measured})" if measured else ""))
    yield ok("onnx", f"ONNX Runtime runs learned signals: {'; '.join(told)}.")


def check_llama(python: str = sys.executable, timeout_s: float = _LOAD_TIMEOUT_S) -> Finding:
    """Load llama.cpp in a child process, because on an unsupported CPU the process is killed by a signal."""
    script = "import llama_cpp; print(llama_cpp.__version__, end='')"
    try:
        process = subprocess.run(
            [python, "-P", "-c", script],
            env=minimal_environment(os.environ),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return fail(
            "llama.cpp", f"llama.cpp did not load within {timeout_s:g} s.", "Check the disk and the memory, then retry."
        )
    except OSError as error:
        return fail("llama.cpp", f"{python}: {error.strerror}", f"Reinstall {_DISTRIBUTION}.")
    if process.returncode == 0:
        return ok("llama.cpp", f"llama-cpp-python {process.stdout} loads.")
    if process.returncode == -signal.SIGILL:
        return fail(
            "llama.cpp",
            "Illegal instruction: llama.cpp was compiled for another CPU.",
            "Remove ~/.cache/causeway/llama and run `make setup`, or `pip install --no-binary :all: llama-cpp-python`.",
        )
    if process.returncode < 0:
        name = signal.Signals(-process.returncode).name
        return fail("llama.cpp", f"Loading llama.cpp ended with {name}.", "Run `make setup` again.")
    last = process.stderr.strip().splitlines()[-1:] or ["no message"]
    return fail("llama.cpp", last[0], "Run `make setup`, or `pip install 'causeway-router[engine]'`.")
