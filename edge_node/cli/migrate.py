"""The command `causeway-edge migrate`: rewrite a device's files of the previous version with the present names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from causeway_server.models.catalog.artifact import MANIFEST, user_models
from causeway_server.router.documents.strict_yaml import Tree, read_yaml
from causeway_server.router.errors import ConfigError
from causeway_server.router.migrate.rewrite import scalars_at
from causeway_server.router.renames import RENAMED
from causeway_server.router.serving.folders import write_atomically
from causeway_server.router.serving.process import migrate_file


def run(file: Path) -> Iterator[str]:
    """Rewrite the configuration, its policy and the folders of models, and yield a line for each change.

    Raises:
        ConfigError: A file cannot be rewritten; the files before it have been.
    """
    rewritten = migrate_file(file, "edge.yaml")
    yield from rewritten.report(str(file))
    if not rewritten.text.strip():
        return
    tree = read_yaml(rewritten.text, str(file))
    for policy in _paths(tree, file, "policy"):
        yield from migrate_file(policy, "policy").report(str(policy))
    for folder in (*_paths(tree, file, "engine.model_dirs[]"), user_models()):
        yield from _rename_models(folder)


def _paths(tree: Tree, file: Path, key: str) -> list[Path]:
    return [file.parent / Path(path.text).expanduser() for path in scalars_at(tree, key) if path.text]


def _rename_models(folder: Path) -> Iterator[str]:
    """Rename the folders of models whose names have changed, and the names in their manifests."""
    for one in RENAMED["model"]:
        old, new = folder / one.old, folder / one.new
        if not (old / MANIFEST).is_file():
            continue
        if new.exists():
            raise ConfigError(f"{one.sentence} Both folders exist. Delete one of them.", where=str(old))
        try:
            manifest = msgspec.json.decode((old / MANIFEST).read_bytes(), type=dict[str, object])
            document = msgspec.json.encode(manifest | {"name": one.new})
            write_atomically(old / MANIFEST, msgspec.json.format(document) + b"\n")
            old.rename(new)
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(str(error), where=str(old)) from error
        yield f"{old}: renamed to {new}."
