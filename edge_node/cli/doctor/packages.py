"""Is everything installed, in the right version, once, and does llama.cpp load on this processor?"""

from __future__ import annotations

import importlib.util
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path

import msgspec
from packaging.requirements import InvalidRequirement, Requirement

from .finding import Finding, fail, ok, warn

OURS = ("cloud_pool", "edge_node", "fleet", "models", "router")
OLDEST_PYTHON = (3, 10)
_DISTRIBUTION = "causeway"
_LOAD_TIMEOUT_S = 60.0
# One import name, several distributions that bring it: whichever was installed last has overwritten the others.
_RIVALS = ("onnxruntime", "llama_cpp")


class Installed(msgspec.Struct, frozen=True):
    """What an environment holds: versions by distribution, distributions by top-level import name."""

    versions: Mapping[str, str]
    owners: Mapping[str, frozenset[str]]
    requires: tuple[str, ...]  # of ours, as in its metadata; empty where it is not installed as a distribution


def read_installed(path: Sequence[str] | None = None) -> Installed:
    """The environment at `path` (None: the one that runs)."""
    versions: dict[str, str] = {}
    owners: dict[str, set[str]] = {}
    requires: tuple[str, ...] = ()
    for found in distributions(path=list(sys.path if path is None else path)):
        name = _normal(found.metadata["Name"] or "")
        if not name or name in versions:
            continue  # the first on the path is the one that is imported
        versions[name] = found.version
        for top in _top_level(found):
            owners.setdefault(top, set()).add(name)
        if name == _DISTRIBUTION:
            requires = tuple(found.requires or ())
    return Installed(versions, {top: frozenset(names) for top, names in owners.items()}, requires)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _top_level(found: Distribution) -> set[str]:
    declared = found.read_text("top_level.txt")
    if declared is not None:
        return set(declared.split())
    parts = {file.parts[0].removesuffix(".py") for file in found.files or () if file.suffix in (".py", ".so")}
    return {part for part in parts if part.isidentifier()}


def locate(name: str) -> Path | None:
    """The folder that ``import name`` would find."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin).parent if spec and spec.origin else None


def check_python(version: tuple[int, int] = sys.version_info[:2]) -> Finding:
    found = ".".join(map(str, version))
    if version < OLDEST_PYTHON:
        return fail("python", f"Python {found}", "install Python 3.11 or newer")
    return ok("python", f"Python {found}")


def check_requirements(installed: Installed, *, needs_engine: bool) -> Iterator[Finding]:
    """Every requirement of ours that holds on this machine, the engine's among them where there is an engine."""
    if not installed.requires:
        advice = "run `make setup`, or `pip install causeway[engine,cpu]`"
        yield fail("packages", "causeway is not installed as a distribution in this environment", advice)
        return
    wrong = [finding for text in installed.requires if (finding := _unmet(text, installed, needs_engine))]
    yield from wrong
    if not wrong:
        yield ok("packages", f"causeway {installed.versions[_DISTRIBUTION]} and all it requires")


def _unmet(text: str, installed: Installed, needs_engine: bool) -> Finding | None:
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        return warn("packages", f"causeway's metadata has {text!r}", "install causeway again")
    extras = ("", "engine") if needs_engine else ("",)
    if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
        return None
    version = installed.versions.get(_normal(requirement.name))
    command = f"pip install '{requirement.name}{requirement.specifier}'"
    if version is None:
        return fail("packages", f"{requirement.name} is missing", f"run `make setup`, or `{command}`")
    if not requirement.specifier.contains(version, prereleases=True):
        found = f"{requirement.name} is {version}, needed is {requirement.specifier}"
        return fail("packages", found, f"run `make setup`, or `{command}`")
    return None


def check_owners(installed: Installed, locate: Callable[[str], Path | None] = locate) -> Iterator[Finding]:
    """(1) two distributions that bring one import name, (2) another package in our place."""
    clean = True
    for name in (*OURS, *_RIVALS):
        others = installed.owners.get(name, frozenset()) - ({_DISTRIBUTION} if name in OURS else set())
        if (name in OURS and others) or len(others) > 1:  # (1)
            clean = False
            yield _two_owners(name, sorted(others))
    home = locate("edge_node")
    for name in OURS if home else ():
        place = locate(name)
        if place is not None and home is not None and place.parent != home.parent:  # (2)
            clean = False
            yield fail(
                "import names",
                f"`import {name}` finds {place}, not ours beside {home}",
                f"start from another folder, or rename {place}",
            )
    if clean:
        yield ok("import names", "each import name has one owner")


def _two_owners(name: str, others: list[str]) -> Finding:
    if name in OURS:
        return fail(
            "import names",
            f"`{name}` also belongs to {', '.join(others)}",
            f"give causeway an environment of its own, or `pip uninstall {' '.join(others)}` and install it again",
        )
    keep = next((other for other in others if other.endswith("gpu")), others[0])
    return fail(
        "import names",
        f"`{name}` belongs to {' and '.join(others)}: the last one installed has overwritten the other",
        f"`pip uninstall -y {' '.join(others)} && pip install {keep}` (or the other of them)",
    )


def check_llama(python: str = sys.executable, timeout_s: float = _LOAD_TIMEOUT_S) -> Finding:
    """Load the engine's library in a process of its own: on the wrong processor it ends with a signal."""
    script = "import llama_cpp; print(llama_cpp.__version__, end='')"
    try:
        done = subprocess.run([python, "-c", script], capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return fail("llama.cpp", f"did not load within {timeout_s:g} s", "look at the disk and the memory, then again")
    except OSError as error:
        return fail("llama.cpp", f"{python}: {error.strerror}", "install causeway again")
    if done.returncode == 0:
        return ok("llama.cpp", f"llama-cpp-python {done.stdout} loads")
    if done.returncode == -signal.SIGILL:
        return fail(
            "llama.cpp",
            "an instruction that this processor does not have: it was compiled for another one",
            "remove ~/.cache/causeway/llama and run `make setup`, or `pip install --no-binary :all: llama-cpp-python`",
        )
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        return fail("llama.cpp", f"loading it ended with {name}", "run `make setup` again")
    last = done.stderr.strip().splitlines()[-1:] or ["no message"]
    return fail("llama.cpp", last[0], "run `make setup`, or `pip install 'causeway[engine]'`")
