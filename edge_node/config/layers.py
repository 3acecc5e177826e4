"""Merge settings (YAML file < environment < flags) into a frozen struct, or reject them with the key's path.

A layer is a flat map from a dotted key (``server.port``) to a `Setting`, which records where the value was written.
The keys, their types and their limits are read from the struct.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar, get_type_hints

import msgspec
from msgspec import inspect

from router.documents import strict_yaml
from router.errors import ConfigError

from .values import Leaf, Setting, coerce, plain_value

T = TypeVar("T", bound=msgspec.Struct)
Leaves = Mapping[str, Leaf]
Layer = Mapping[str, Setting]


def leaves_of(struct: type[msgspec.Struct]) -> dict[str, Leaf]:
    """Return every dotted key of `struct` and its type. A nested struct is a section, not a key."""
    found: dict[str, Leaf] = {}
    for name, annotation in get_type_hints(struct, include_extras=True).items():
        kind = inspect.type_info(annotation)
        if isinstance(kind, inspect.StructType):
            found |= {f"{name}.{key}": leaf for key, leaf in leaves_of(kind.cls).items()}
        else:
            found[name] = Leaf(annotation, kind)
    return found


# --- the layers ------------------------------------------------------------------------------------------------------


def read_yaml(text: str, file: str, leaves: Leaves, base: Path = Path()) -> dict[str, Setting]:
    """Read the settings of a YAML document.

    Args:
        text: The document.
        file: Its path, for error messages.
        leaves: The known keys.
        base: The folder that relative paths are relative to.

    Raises:
        ConfigError: Invalid YAML, or an unknown or duplicate key; names file, line and key.
    """
    if not any(line.strip() and not line.lstrip().startswith("#") for line in text.splitlines()):
        return {}  # only comments
    try:
        tree = strict_yaml.read_yaml(text, file)
    except strict_yaml.YamlError as error:
        raise ConfigError(error.problem.message, where=str(error.problem.location)) from error
    found: dict[str, Setting] = {}
    _walk(tree, leaves, base, found)
    return found


def _walk(tree: strict_yaml.Tree, leaves: Leaves, base: Path, found: dict[str, Setting]) -> None:
    if isinstance(tree, strict_yaml.Scalar) and tree.kind == "null" and tree.location.path:
        return  # a section with only commented-out keys
    if not isinstance(tree, strict_yaml.Mapping):
        raise ConfigError("must be a mapping of keys", where=str(tree.location))
    for name, value in zip(tree.keys, tree.values, strict=True):
        key = name.location.path
        where = str(msgspec.structs.replace(name.location, path=""))
        if key in leaves:
            found[key] = Setting(plain_value(value), where, base=base)
        elif any(leaf.startswith(f"{key}.") for leaf in leaves):
            _walk(value, leaves, base, found)
        else:
            raise unknown_key(key, where, leaves)


def read_environ(environ: Mapping[str, str], prefix: str, leaves: Leaves) -> dict[str, Setting]:
    """Read settings from variables: ``server.port`` is ``CAUSEWAY_SERVER__PORT`` if `prefix` is ``CAUSEWAY_``.

    Other variables with the prefix are ignored, because the SDK and the gateway have their own.

    Raises:
        ConfigError: A variable names an unknown key in a known section, or closely resembles a known variable.
    """
    names = {variable_of(leaf, prefix): leaf for leaf in leaves}
    sections = {leaf.split(".")[0] for leaf in leaves if "." in leaf}
    found: dict[str, Setting] = {}
    for variable, text in environ.items():
        if not variable.startswith(prefix):
            continue
        if variable in names:
            found[names[variable]] = Setting(text, f"${variable}", is_text=True)
            continue
        key = variable.removeprefix(prefix).lower().replace("__", ".")
        if key.split(".")[0] in sections and "." in key:
            raise unknown_key(key, f"${variable}", leaves)
        if difflib.get_close_matches(variable, names, n=1, cutoff=0.9):
            raise unknown_key(key, f"${variable}", leaves)
    return found


def variable_of(key: str, prefix: str) -> str:
    """Return the environment variable of a dotted key."""
    return prefix + key.upper().replace(".", "__")


def read_flags(flags: Mapping[str, object], leaves: Leaves) -> dict[str, Setting]:
    """Read settings by dotted key from command-line flags; None means that the flag was not set.

    Raises:
        ConfigError: An unknown key.
    """
    found: dict[str, Setting] = {}
    for key, value in flags.items():
        if key not in leaves:
            raise unknown_key(key, "command line", leaves)
        if value is not None:
            found[key] = Setting(value, "command line", is_text=isinstance(value, str))
    return found


def unknown_key(key: str, where: str, leaves: Leaves) -> ConfigError:
    """Return the error for an unknown key, with the closest known key or the keys of the section."""
    prefix, _, name = key.rpartition(".")
    section = f"{prefix}." if prefix else ""
    names = sorted({leaf.removeprefix(section).split(".")[0] for leaf in leaves if leaf.startswith(section)})
    in_other_sections = [leaf for leaf in leaves if leaf.rpartition(".")[2] == name]
    near = (
        difflib.get_close_matches(name, names, n=1) or in_other_sections or difflib.get_close_matches(key, leaves, n=1)
    )
    if near:
        hint = f"did you mean `{near[0] if near[0] in leaves else section + near[0]}`?"
    else:
        hint = f"known keys: {', '.join(names or sorted({leaf.split('.')[0] for leaf in leaves}))}"
    return ConfigError(f"unknown key; {hint}", where=f"{where}: {key}")


# --- the struct ------------------------------------------------------------------------------------------------------


def build(struct: type[T], layers: Iterable[Layer]) -> T:
    """Build the struct; later layers take precedence.

    Raises:
        ConfigError: A value does not fit its key; names the key and where it was written.
    """
    leaves = leaves_of(struct)
    merged: dict[str, Setting] = {}
    for layer in layers:
        merged.update(layer)
    tree: dict[str, object] = {}
    for key, setting in merged.items():
        *sections, name = key.split(".")
        parent = tree
        for section in sections:
            parent = parent.setdefault(section, {})  # type: ignore[assignment]  # the parent of a leaf is a section
        parent[name] = coerce(setting, leaves[key], key)
    return msgspec.convert(tree, struct)
