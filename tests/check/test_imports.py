"""Which way imports point. The rules are functions of source text, so each is first shown to catch its own breach."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.prepare.environments import locked_names

from .sources import FOLDERS, ROOT, TRAINING, absolute_imports, loaded_with, parse, python_files, relative_reach

MAY_IMPORT = {
    "router": set(),
    "models": {"router"},
    "fleet": {"router"},
    "edge_node": {"router", "models"},
    "cloud_pool": {"router", "models"},
    TRAINING: {"router", "models"},
}
# The extras of pyproject.toml that a package may rely on; `models` runs in both roles.
EXTRAS = {
    "router": (),  # `router/serving`: what each of SERVERS has
    "models": ("engine", "cpu", "hub", "voice", "images", "prices", "tokenizers"),
    "fleet": ("fleet",),
    "edge_node": ("edge", "engine", "cpu", "microphone", "mqtt", "mcp"),
    "cloud_pool": ("cloud", "engine", "cpu", "grpc", "nats", "kafka", "tokenizers"),
    TRAINING: ("engine", "cpu", "hub", "voice"),
}
# The extras of the processes that serve: `router/serving` may rely on what all of them have.
SERVERS = ("edge", "cloud", "fleet")
# What `router/serving/otel.py` needs, which edge and gateway alone import.
OF_TWO_SERVERS = {"opentelemetry-sdk"}
# What would let the outside into the pure part: sockets, files, clocks, threads, processes, chance, the event loop.
IMPURE = {
    *("asyncio", "socket", "ssl", "select", "selectors", "socketserver", "threading", "multiprocessing", "concurrent"),
    *(
        "subprocess",
        "signal",
        "sched",
        "time",
        "os",
        "io",
        "pathlib",
        "shutil",
        "tempfile",
        "glob",
        "fileinput",
        "mmap",
    ),
    *("random", "secrets", "sqlite3", "shelve", "dbm", "http", "urllib", "logging", "queue", "fcntl", "ctypes", "sys"),
    *("aiohttp", "anyio", "uvloop", "psutil", "redis", "grpc", "tritonclient", "openai", "requests"),
}
PURE = "urllib.parse"  # of the above
# Where the pure part keeps a library from importing its command line.
TABLE_OF_MODULES = {"router/policy/cel_library.py": ["line 6: imports sys"]}
IMPURE_CALLS = {"open", "input", "print", "exec", "eval", "__import__", "breakpoint"}
# Triton loads a model.py by its path, as a part of no package: it can only import absolutely.
LOADED_BY_PATH = "triton_models"
# Import names that differ from the name of the distribution that brings them.
BROUGHT_BY = {
    "cel": "common-expression-language",
    "causeway_sdk": "causeway-sdk",
    "phonenumbers": "phonenumberslite",
    "yaml": "pyyaml",
    "z3": "z3-solver",
    "PIL": "pillow",
    "google": "protobuf",
    "grpc": "grpcio-health-checking",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "httpx2": "huggingface-hub",
    "jwt": "pyjwt",
    "multidict": "aiohttp",
    "yarl": "aiohttp",
    "nats": "nats-py",
    "paho": "paho-mqtt",
    "llama_cpp": "llama-cpp-python",
    "opentelemetry": "opentelemetry-sdk",
}
# What Triton itself provides to its models.
PROVIDED = {"triton_python_backend_utils"}


def direction_breaches(package: str, tree: ast.Module, *, by_path: bool = False) -> list[str]:
    """Imports of our packages that the direction of the arrows forbids, and absolute ones inside a package."""
    own = MAY_IMPORT[package] | ({package} if by_path else set())
    tops = [(line, name.split(".")[0]) for line, name in absolute_imports(tree)]
    return [f"line {line}: {package} imports {top}" for line, top in tops if top in FOLDERS and top not in own]


def purity_breaches(tree: ast.Module) -> list[str]:
    """Imports and calls by which the pure part would touch the outside."""
    names = [(line, name) for line, name in absolute_imports(tree) if not name.startswith(PURE)]
    imports = [f"line {line}: imports {name}" for line, name in names if name.split(".")[0] in IMPURE]
    calls = [
        f"line {node.lineno}: calls {node.func.id}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_CALLS
    ]
    coroutines = [f"line {node.lineno}: is async" for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef)]
    return imports + calls + coroutines


def serving_imports(folder: tuple[str, ...], tree: ast.Module) -> list[str]:
    """Relative imports of `router.serving` in a module of this folder, at any place of the file."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            module = node.module.split(".") if node.module else []
            base = (*folder[: len(folder) - node.level + 1], *module)
            found += [f"line {node.lineno}" for alias in node.names if (*base, alias.name)[:2] == ("router", "serving")]
    return found


def declared(package: str) -> set[str]:
    """Distributions that a package may import: the project's dependencies, its role's extra, and the optional parts."""
    project = _project(ROOT)
    extras = {name: _names(texts) for name, texts in project["optional-dependencies"].items()}
    common = set.intersection(*(extras[extra] for extra in SERVERS)) | OF_TWO_SERVERS
    served = common if package == "router" else set()
    if package == TRAINING:
        own = _project(ROOT / "models" / "train")
        served = _names([*own["dependencies"], *own["optional-dependencies"]["torch"]])
    return _names(project["dependencies"]).union(served, *(extras[extra] for extra in EXTRAS[package]))


def _names(texts: list[str]) -> set[str]:
    return {re.split(r"[\[<>=!~; ]", text)[0].lower().replace("_", "-") for text in texts}


def _project(folder: Path) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project


def by_file(package: str, breaches: Callable[[Path, ast.Module], list[str]]) -> dict[str, list[str]]:
    """What `breaches` finds in a package, under the names of the files where it finds anything."""
    found = {str(path.relative_to(ROOT)): breaches(path, parse(path)) for path in python_files(package)}
    assert found, f"{package} has no files: nothing was checked"
    return {name: breach for name, breach in found.items() if breach}


@pytest.mark.parametrize("package", FOLDERS)
def test_imports_follow_the_arrows(package: str) -> None:
    """router imports nothing of ours, models and fleet import router, the two ends import router and models; nothing of
    the product imports the training distribution, which imports router and models.
    """

    def breaches(path: Path, tree: ast.Module) -> list[str]:
        return direction_breaches(package, tree, by_path=LOADED_BY_PATH in path.parts)

    assert by_file(package, breaches) == {}


@pytest.mark.parametrize("package", FOLDERS)
def test_relative_imports_stay_inside_their_package(package: str) -> None:
    """A relative import never climbs out of the package that it is in."""

    def climbs(path: Path, tree: ast.Module) -> list[str]:
        dots = relative_reach(tree)
        return [f"{dots} dots"] if dots > len(path.relative_to(FOLDERS[package].parent).parts) - 1 else []

    assert by_file(package, climbs) == {}


def is_impure_room(path: Path) -> bool:
    return path.relative_to(ROOT).parts[:2] == ("router", "serving")


def test_router_is_pure() -> None:
    """router has no sockets, files, clocks, threads, chance or event loop, but in its room `serving`."""
    assert (
        by_file("router", lambda path, tree: [] if is_impure_room(path) else purity_breaches(tree)) == TABLE_OF_MODULES
    )


def test_nothing_pure_imports_the_impure_room() -> None:
    """An import of `router.serving` from another room of router would let the outside in by a detour."""

    def breaches(path: Path, tree: ast.Module) -> list[str]:
        found = serving_imports(path.relative_to(ROOT).parts[:-1], tree)
        return [] if is_impure_room(path) else found

    assert by_file("router", breaches) == {}


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("router", "from .serving import request"),
        ("router", "from . import serving"),
        ("router/openai", "from ..serving.request import members"),
        ("router/openai/audio", "def late():\n    from ...serving import request"),
    ],
)
def test_an_import_of_the_impure_room_is_seen(folder: str, source: str) -> None:
    assert len(serving_imports(tuple(folder.split("/")), ast.parse(source))) == 1
    assert serving_imports(("router", "jobs"), ast.parse("from .serving import x\nfrom ..types import Request")) == []


@pytest.mark.parametrize("package", FOLDERS)
def test_third_party_imports_are_declared(package: str) -> None:
    """Whatever a package imports is in the standard library, ours, or named in pyproject.toml."""
    names = declared(package)
    known = set(sys.stdlib_module_names) | set(FOLDERS) | PROVIDED

    def undeclared(_path: Path, tree: ast.Module) -> list[str]:
        outside = {name.split(".")[0] for _, name in absolute_imports(tree)} - known
        return sorted(name for name in outside if BROUGHT_BY.get(name, name).replace("_", "-") not in names)

    assert by_file(package, undeclared) == {}


@pytest.mark.parametrize(
    "model", sorted(ROOT.glob("cloud_pool/triton_server/triton_models/*/1/model.py")), ids=lambda path: path.parts[-3]
)
def test_tritons_environment_has_what_its_models_import(model: Path) -> None:
    """All that a model pulls in, through our own files too, is locked for Triton's environment."""
    locked = set(locked_names(ROOT / "cloud_pool" / "deploy" / "requirements-triton.txt")) | {"llama-cpp-python"}
    outside = loaded_with(model) - set(sys.stdlib_module_names) - PROVIDED
    assert {"numpy", "msgspec"} <= outside, "the walk followed nothing"
    assert {name for name in outside if BROUGHT_BY.get(name, name).replace("_", "-") not in locked} == set()


def test_set_up_runs_before_anything_is_installed() -> None:
    """The set-up program, and the package it lies in, import the standard library and each other only."""
    files = [ROOT / "tests" / "__init__.py", *python_files("tests/prepare")]
    for path in files:
        outside = {name.split(".")[0] for _, name in absolute_imports(parse(path))} - set(sys.stdlib_module_names)
        assert outside == set(), path
        assert relative_reach(parse(path)) <= max(1, len(path.relative_to(ROOT / "tests").parts) - 1), path


def test_set_up_parses_on_an_old_python() -> None:
    """An old Python (3.8, JetPack 5) gets as far as being told what it needs."""
    for path in python_files("tests/prepare"):
        ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 8))


@pytest.mark.parametrize(
    ("package", "source", "breach"),
    [
        ("router", "import causeway_server.models.catalog.artifact", "line 1: router imports models"),
        ("models", "from causeway_server.edge_node import cli", "line 1: models imports edge_node"),
        ("edge_node", "def late():\n    import cloud_pool", "line 2: edge_node imports cloud_pool"),
        ("fleet", "from causeway_server.models.catalog.artifact import Artifact", "line 1: fleet imports models"),
        ("models", "from causeway_server.models.catalog.artifact import Artifact", "line 1: models imports models"),
        ("models", "def late():\n    from causeway_train import data", "line 2: models imports causeway_train"),
    ],
)
def test_a_wrong_direction_is_seen(package: str, source: str, breach: str) -> None:
    """Found: an import against the arrows, a late one inside a function, an absolute one of one's own package."""
    assert direction_breaches(package, ast.parse(source)) == [breach]


@pytest.mark.parametrize(
    "source",
    ["import time", "from pathlib import Path", "import os.path", "open('x')", "async def f(): ...", "import asyncio"],
)
def test_an_impurity_is_seen(source: str) -> None:
    """Each way of reaching the outside is found by the purity rule."""
    assert len(purity_breaches(ast.parse(source))) == 1


def test_allowed_imports_pass() -> None:
    """The rules leave the allowed directions and plain values alone."""
    assert (
        direction_breaches(
            "edge_node", ast.parse("from causeway_server.router.types import Request\nfrom .config import Config")
        )
        == []
    )
    assert purity_breaches(ast.parse("import msgspec, hashlib, math\nfrom .types import Request")) == []


@pytest.mark.parametrize("module", ["causeway_server.cloud_pool.cli.main", "causeway_server.edge_node.cli.main"])
def test_commands_choose_how_grpc_polls_before_they_import_it(module: str) -> None:
    """Afterwards its setting has no effect: a gateway whose commands import it has 20 µs more for each token."""
    program = f"import {module}, sys; print([name for name in sys.modules if name.partition('.')[0] == 'grpc'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_device_has_no_solver() -> None:
    """z3 comes with the extra of the fleet alone, and only its prover imports it."""
    extras = _project(ROOT)["optional-dependencies"]
    assert [name for name, texts in extras.items() if "z3-solver" in _names(texts)] == ["fleet"]
    importing = {
        path.relative_to(ROOT).parts[:2]
        for package in FOLDERS
        for path in python_files(package)
        if any(name.split(".")[0] == "z3" for _, name in absolute_imports(parse(path)))
    }
    assert importing == {("fleet", "prover")}
