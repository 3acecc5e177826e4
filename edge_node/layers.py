"""Settings in layers (YAML file < environment < flags) turned into a frozen struct, or refused with the key's path.

A layer is a flat map from a dotted key (``server.port``) to a `Setting`, which remembers where it was written. Which
keys there are, their types and their limits are read from the struct; nothing here knows what the settings mean.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar, get_type_hints

import msgspec
import yaml
from msgspec import inspect

from router.errors import ConfigError

from .values import Leaf, Setting, coerce

MAX_FILE_BYTES = 256 * 1024

T = TypeVar("T", bound=msgspec.Struct)
Leaves = Mapping[str, Leaf]
Layer = Mapping[str, Setting]


def leaves_of(struct: type[msgspec.Struct]) -> dict[str, Leaf]:
    """Every dotted key of `struct` and its type; a struct inside a struct is a section, not a key."""
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
    """The settings of a YAML document. Aliases, duplicate keys and unknown keys are refused with file, line and key."""
    if len(text.encode()) > MAX_FILE_BYTES:
        raise ConfigError(f"the file is larger than {MAX_FILE_BYTES} bytes", where=file)
    found: dict[str, Setting] = {}
    try:
        _refuse_aliases(text, file)
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is not None:
            _walk_yaml(loader, node, "", file, leaves, base, found)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"not valid YAML: {error.problem or error}", where=f"{file}{line}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"not valid YAML: {error}", where=file) from error
    return found


def _refuse_aliases(text: str, file: str) -> None:
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            line = event.start_mark.line + 1 if event.start_mark else 0
            raise ConfigError("YAML aliases are not allowed here", where=f"{file}:{line}")


def _walk_yaml(
    loader: yaml.SafeLoader,
    node: yaml.Node,
    prefix: str,
    file: str,
    leaves: Leaves,
    base: Path,
    found: dict[str, Setting],
) -> None:
    if not isinstance(node, yaml.MappingNode) or node.tag != "tag:yaml.org,2002:map":
        if isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null":
            return  # a section whose keys are all commented out
        name = f"`{prefix.rstrip('.')}`" if prefix else "the file"
        raise ConfigError(f"{name} must be a mapping of keys", where=f"{file}:{node.start_mark.line + 1}")
    seen: set[str] = set()
    for key_node, value_node in node.value:
        where = f"{file}:{key_node.start_mark.line + 1}"
        key = prefix + str(loader.construct_object(key_node))
        if key in seen:
            raise ConfigError("the key is written twice", where=f"{where}: {key}")
        seen.add(key)
        if key in leaves:
            found[key] = Setting(loader.construct_object(value_node, deep=True), where, base=base)
        elif any(leaf.startswith(f"{key}.") for leaf in leaves):
            _walk_yaml(loader, value_node, f"{key}.", file, leaves, base, found)
        else:
            raise unknown_key(key, where, leaves)


def read_environ(environ: Mapping[str, str], prefix: str, leaves: Leaves) -> dict[str, Setting]:
    """Settings from variables: ``server.port`` is ``CAUSEWAY_SERVER__PORT`` when `prefix` is ``CAUSEWAY_``.

    A variable in one of our sections that names no key is refused. Others with the prefix are left alone unless they
    look like a slip of the pen: the SDK and the gateway have variables of their own.
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
    return prefix + key.upper().replace(".", "__")


def read_flags(flags: Mapping[str, object], leaves: Leaves) -> dict[str, Setting]:
    """Settings by dotted key from the command line; None is a flag that was not given."""
    found: dict[str, Setting] = {}
    for key, value in flags.items():
        if key not in leaves:
            raise unknown_key(key, "command line", leaves)
        if value is not None:
            found[key] = Setting(value, "command line", is_text=isinstance(value, str))
    return found


def unknown_key(key: str, where: str, leaves: Leaves) -> ConfigError:
    """No such key: with the nearest one, or what the section has."""
    prefix, _, name = key.rpartition(".")
    section = f"{prefix}." if prefix else ""
    names = sorted({leaf.removeprefix(section).split(".")[0] for leaf in leaves if leaf.startswith(section)})
    elsewhere = [leaf for leaf in leaves if leaf.rpartition(".")[2] == name]
    near = difflib.get_close_matches(name, names, n=1) or elsewhere or difflib.get_close_matches(key, leaves, n=1)
    if near:
        hint = f"did you mean `{near[0] if near[0] in leaves else section + near[0]}`?"
    else:
        hint = f"there are: {', '.join(names or sorted({leaf.split('.')[0] for leaf in leaves}))}"
    return ConfigError(f"no such key; {hint}", where=f"{where}: {key}")


# --- the struct ------------------------------------------------------------------------------------------------------


def build(struct: type[T], layers: Iterable[Layer]) -> T:
    """The struct, a later layer winning over an earlier one. Raises ConfigError: the key and where it was written."""
    leaves = leaves_of(struct)
    merged: dict[str, Setting] = {}
    for layer in layers:
        merged.update(layer)
    tree: dict[str, object] = {}
    for key, setting in merged.items():
        *sections, name = key.split(".")
        at = tree
        for section in sections:
            at = at.setdefault(section, {})  # type: ignore[assignment]  # what is above a leaf is a section
        at[name] = coerce(setting, leaves[key], key)
    return msgspec.convert(tree, struct)
