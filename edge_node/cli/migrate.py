"""The command `causeway-edge migrate`: rewrite a device's files of the previous version with the present names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from causeway_server.router.documents.strict_yaml import Tree, read_yaml
from causeway_server.router.migrate.rewrite import scalars_at
from causeway_server.router.serving.process import migrate_file


def run(file: Path) -> Iterator[str]:
    """Rewrite the configuration, its policy and the folders of models; yield a line for each change. Raises ConfigError
    if a file cannot be rewritten; the files before it have been.
    """
    rewritten = migrate_file(file, "edge.yaml")
    yield from rewritten.report(str(file))
    if not rewritten.text.strip():
        return
    tree = read_yaml(rewritten.text, str(file))
    for policy in _paths(tree, file, "policy"):
        yield from migrate_file(policy, "policy").report(str(policy))


def _paths(tree: Tree, file: Path, key: str) -> list[Path]:
    return [file.parent / Path(path.text).expanduser() for path in scalars_at(tree, key) if path.text]
