"""The checkout as the checks see it: its root, its packages, and what a Python file imports.

A name in `causeway_server` is given without it: `router.types`, as the file is `router/types.py`.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("router", "models", "edge_node", "cloud_pool", "fleet")  # of the product
TRAINING = "causeway_train"
FOLDERS = {**{name: ROOT / name for name in PACKAGES}, TRAINING: ROOT / "models" / "train" / "src" / TRAINING}
_MADE = {"__pycache__", "node_modules", "dist"}
_APART = {"sdk", "train"}  # distributions of their own: `edge_node/sdk` and `models/train`


def files_below(folder: Path, suffix: str = "") -> list[Path]:
    """The files below a folder whose names end so, without what tools made and npm installed."""
    found: list[Path] = []
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _MADE]
        found += [Path(where, name) for name in names if name.endswith(suffix)]
    return sorted(found)


def python_files(package: str) -> list[Path]:
    """The modules of a package, or of a folder of the checkout, without the distributions below it."""
    folder = FOLDERS.get(package, ROOT / package)
    return sorted(
        path
        for path in folder.rglob("*.py")
        if "__pycache__" not in path.parts and path.relative_to(folder).parts[0] not in _APART
    )


def absolute_imports(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, dotted module) of each import that is not relative, wherever in the file it stands."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, _ours(alias.name)) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.append((node.lineno, _ours(node.module)))
    return found


def _ours(name: str) -> str:
    return name.removeprefix("causeway_server.")


def relative_reach(tree: ast.AST) -> int:
    """The most dots in front of a relative import in the file, 0 for none."""
    return max((node.level for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)), default=0)


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def loaded_with(start: Path) -> set[str]:
    """Top names of all that is imported, from outside our packages too, as soon as `start` is: imports followed through
    our own files, those inside functions and for type checkers only left out."""
    outside: set[str] = set()
    seen: set[Path] = set()
    waiting = [start]
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        for name in imported_names(path, _eager_statements(parse(path).body)):
            ours = _files_of(name) if name.split(".")[0] in PACKAGES else None
            if ours is None:
                outside.add(name.split(".")[0])
            else:
                waiting += ours
    return outside


def imported_names(path: Path, statements: Iterable[ast.AST]) -> list[str]:
    """Return absolute dotted names that a file imports; `from a import b` gives `a.b`, a module or a name in one."""
    names: list[str] = []
    package = list(path.relative_to(ROOT).parts[:-1])
    for node in statements:
        if isinstance(node, ast.Import):
            names += [_ours(alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([_ours(node.module)] if node.module else [])])
            names += [f"{base}.{alias.name}" for alias in node.names]
    return names


def imported_files(path: Path) -> set[Path]:
    """Return the modules of our packages that a file imports anywhere, for type checkers only too."""
    found = set()
    for name in imported_names(path, ast.walk(parse(path))):
        base = ROOT.joinpath(*name.split("."))
        modules = (base.with_suffix(".py"), base / "__init__.py", base.parent.with_suffix(".py"))
        module = next((each for each in (*modules, base.parent / "__init__.py") if each.exists()), None)
        if module is not None and name.split(".")[0] in PACKAGES:
            found.add(module)
    return found


def _eager_statements(body: list[ast.stmt]) -> list[ast.stmt]:
    found: list[ast.stmt] = []
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            found += _eager_statements(node.orelse)
        elif isinstance(node, ast.If | ast.Try | ast.With):
            found += _eager_statements(
                [child for child in ast.walk(node) if isinstance(child, ast.stmt) and child is not node]
            )
        else:
            found.append(node)
    return found


def _files_of(name: str) -> list[Path]:
    """The files that importing a dotted name of ours runs: each package's __init__, then the module itself."""
    files: list[Path] = []
    folder = ROOT
    for part in name.split("."):
        if (folder / f"{part}.py").exists():
            files.append(folder / f"{part}.py")
            break
        folder = folder / part
        if (folder / "__init__.py").exists():
            files.append(folder / "__init__.py")
    return files
