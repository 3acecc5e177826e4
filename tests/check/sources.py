"""The checkout as the checks see it: its root, its packages, and what a Python file imports."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("router", "models", "edge_node", "cloud_pool", "fleet")


def python_files(package: str) -> list[Path]:
    return sorted(path for path in (ROOT / package).rglob("*.py") if "__pycache__" not in path.parts)


def absolute_imports(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, dotted module) of each import that is not relative, wherever in the file it stands."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.append((node.lineno, node.module))
    return found


def relative_reach(tree: ast.AST) -> int:
    """The most dots in front of a relative import in the file, 0 for none."""
    return max((node.level for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)), default=0)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
