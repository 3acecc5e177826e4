"""Load the daemon's configuration: frozen, validated at start, unknown keys rejected. File < environment < flag.

The key ``server.port`` is `port:` under `server:` in the file, ``CAUSEWAY_SERVER__PORT`` in the environment and
``--set server.port=…`` on the command line. Durations may be written ``500ms``, ``30s``, ``10m``, ``7d``; sizes
``64MiB``, ``1GB``. A relative path in the file is relative to the file, elsewhere to the working directory.

A layer is a flat map from a dotted key (``server.port``) to a `Setting`, which records where the value was written.
The keys, their types and their limits are read from the structs of `schema`; a value that does not fit is rejected with
the path of its key.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from msgspec import inspect

from causeway_server.router.config import leaves_of
from causeway_server.router.documents import strict_yaml
from causeway_server.router.errors import ConfigError
from causeway_server.router.numbers import without_unit
from causeway_server.router.policy.signals import CLOUD_NAME, is_reserved
from causeway_server.router.renames import RENAMED, advice, find

from .schema import CloudServer, Config

_DIGITS_APART = re.compile(r"(?<=[0-9])_(?=[0-9])")
_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_PATTERN = re.compile("matching regex '(.*)'")
_FORMATS = {  # what the patterns of the schema stand for
    "^[0-9a-f]{64}$": "64 hexadecimal digits, as `printf %s KEY | sha256sum` prints them",
    "^([a-z]{2,3})?$": "a code of ISO 639-1, such as en",
}
PREFIX = "CAUSEWAY_"
_MAX_FILE_BYTES = 1024 * 1024
_MAX_SECRET_BYTES = 64 * 1024
_OTHER_SECRET = {"clouds.NAME.key": "key_file", "clouds.NAME.key_file": "key"}
# Keys that hold paths.
_PATHS = re.compile(r".+_file|policy|state_dir|server\.socket|engine\.model_dirs|guard\.names_model")


class Setting(msgspec.Struct, frozen=True):
    """A value as written. `is_text`: it is a string (environment, ``--set``) to be parsed as the key's type."""

    value: object
    where: str  # "edge.yaml:3", "$CAUSEWAY_LOG", "command line"
    is_text: bool = False
    base: Path = Path()  # the folder that a relative path is relative to


Layer = Mapping[str, Setting]


def coerce(setting: Setting, annotation: object, key: str) -> object:
    """Return the value (``10m``, ``64MiB``) as the key's type. ConfigError names type, value and place."""
    value, kind = setting.value, inspect.type_info(annotation)
    kind = kind.type if isinstance(kind, inspect.Metadata) else kind
    if isinstance(value, str):
        value = _read_text(value, kind, key, is_text=setting.is_text)
    try:
        result: object = msgspec.convert(value, annotation, strict=not setting.is_text)
    except msgspec.ValidationError as error:
        reason, inside, path = str(error).partition(" - at `$")
        message = f"Must be {_expected(kind, key)}, not {_display(setting.value, key)}."
        if inside:  # a list: what is wrong is one of its values, which may be a secret
            message = _in_words(reason)
        raise ConfigError(message, where=f"{setting.where}: {key}{path.rstrip('`')}") from error
    if isinstance(result, float) and not math.isfinite(result):
        raise ConfigError(f"Must be {_expected(kind, key)}, not {result}.", where=f"{setting.where}: {key}")
    return result


def _read_text(text: str, kind: inspect.Type, key: str, *, is_text: bool) -> object:
    """Parse what msgspec does not. Returns the text itself if it cannot be parsed; the conversion then rejects it."""
    if isinstance(kind, (inspect.FloatType, inspect.IntType)) and (number := without_unit(key, text)) is not text:
        return number
    if is_text and isinstance(kind, inspect.BoolType):
        return _BOOLEANS.get(text.strip().lower(), text)
    if is_text and isinstance(kind, inspect.VarTupleType):
        return read_list(text)
    if is_text and isinstance(kind, inspect.DictType):
        return _read_flow(text)
    if is_text and isinstance(kind, (inspect.IntType, inspect.FloatType, inspect.UnionType)):
        return _DIGITS_APART.sub("", text.strip())
    return text


def plain_value(tree: strict_yaml.Tree) -> object:
    """Convert a part of a YAML document to plain values. YAML's dates and base-60 numbers stay text."""
    if isinstance(tree, strict_yaml.Mapping):
        items = zip(tree.keys, tree.values, strict=True)
        return {key.text: without_unit(key.text, plain_value(value)) for key, value in items}
    if isinstance(tree, strict_yaml.Sequence):
        return [plain_value(item) for item in tree.items]
    return tree.value()


def read_list(text: str) -> object:
    """Return the items of a YAML list, or of ``a,b``; the text itself if it is a malformed YAML list."""
    if not text.lstrip().startswith("["):
        return [part.strip() for part in text.split(",") if part.strip()]
    return _read_flow(text)


def _read_flow(text: str) -> object:
    """Return a YAML list or mapping; the text itself if it is malformed."""
    try:
        return plain_value(strict_yaml.read_yaml(text, ""))
    except strict_yaml.YamlError:
        return text


def _expected(kind: inspect.Type, key: str) -> str:
    if isinstance(kind, inspect.UnionType):
        return " or ".join(_expected(one, key) for one in kind.types)
    if isinstance(kind, inspect.LiteralType):
        return f"one of {', '.join(str(value) for value in kind.values)}"
    if isinstance(kind, inspect.BoolType):
        return "true or false"
    if isinstance(kind, inspect.StrType):
        return _FORMATS.get(kind.pattern or "", "a string")
    if isinstance(kind, inspect.VarTupleType):
        return f"a list of {'mappings' if isinstance(kind.item_type, inspect.StructType) else 'strings'}"
    if isinstance(kind, inspect.DictType):
        return "a mapping, such as {hooks.example: eu-central}"
    if isinstance(kind, (inspect.IntType, inspect.FloatType)):
        return _number(kind, key) + _limits(kind)
    raise AssertionError(f"{key}: no description for {kind!r}")


def _number(kind: inspect.IntType | inspect.FloatType, key: str) -> str:
    if key.endswith("_bytes"):
        return "a size in bytes (1048576, 64MiB, 1GB)"
    if key.endswith("_s"):
        return "a duration in seconds (30, 500ms, 10m, 7d)"
    return "an integer" if isinstance(kind, inspect.IntType) else "a number"


def _limits(kind: inspect.IntType | inspect.FloatType) -> str:
    limits = []
    if kind.ge is not None:
        limits.append(f"at least {kind.ge}")
    if kind.gt is not None:
        limits.append(f"more than {kind.gt}")
    if kind.le is not None:
        limits.append(f"at most {kind.le}")
    return f", {' and '.join(limits)}" if limits else ""


def _display(value: object, key: str) -> str:
    """Format the value for an error message: secrets are hidden, long values truncated."""
    if key.endswith((".key", "keys")):
        return f"the given {type(value).__name__}"
    if value is None:
        return "empty (set a value or remove the key)"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _in_words(reason: str) -> str:
    """Return msgspec's reason, with a description instead of a pattern."""
    pattern = _PATTERN.search(reason)
    return f"Must be {_FORMATS[pattern[1]]}." if pattern and pattern[1] in _FORMATS else f"{reason}."


# --- the layers ------------------------------------------------------------------------------------------------------


def read_yaml(text: str, file: str, base: Path = Path()) -> dict[str, Setting]:
    """Read the settings of a YAML document, whose relative paths are relative to `base`. ConfigError (invalid YAML, an
    unknown or duplicate key) names file, line and key.
    """
    if not any(line.strip() and not line.lstrip().startswith("#") for line in text.splitlines()):
        return {}  # only comments
    try:
        tree = strict_yaml.read_yaml(text, file)
    except strict_yaml.YamlError as error:
        raise ConfigError(error.problem.message, where=str(error.problem.location)) from error
    found: dict[str, Setting] = {}
    _walk(tree, base, found)
    return found


def _walk(tree: strict_yaml.Tree, base: Path, found: dict[str, Setting]) -> None:
    leaves = leaf_keys()
    if isinstance(tree, strict_yaml.Scalar) and tree.kind == "null" and tree.location.path:
        return  # a section with only commented-out keys
    if not isinstance(tree, strict_yaml.Mapping):
        raise ConfigError("The value must be a mapping of keys.", where=str(tree.location))
    for name, value in zip(tree.keys, tree.values, strict=True):
        key = name.location.path
        where = str(msgspec.structs.replace(name.location, path=""))
        if schema_key(key) in leaves:
            found[key] = Setting(plain_value(value), where, base=base)
        elif key == CLOUDS or _is_cloud(key) or any(leaf.startswith(f"{key}.") for leaf in leaves):
            _walk(value, base, found)
        else:
            if find("edge.yaml", key) is not None and isinstance(value, strict_yaml.Mapping):
                _walk(value, base, found)  # a section of before: its first key is refused
            raise unknown_key(key, where)


def read_environ(environ: Mapping[str, str]) -> dict[str, Setting]:
    """Read settings from variables, see `config_variable`. Others with the prefix are ignored: the SDK and the gateway
    have their own. Raises ConfigError for an unknown key in a known section, or a near miss of a known variable.
    """
    names = {config_variable(key): key for key in config_keys()}
    sections = {key.split(".")[0] for key in (*config_keys(), *(one.old for one in RENAMED["edge.yaml"])) if "." in key}
    found: dict[str, Setting] = {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX):
            continue
        if variable in names:
            found[names[variable]] = Setting(text, f"${variable}", is_text=True)
            continue
        key = variable.removeprefix(PREFIX).lower().replace("__", ".")
        if schema_key(key) in leaf_keys():  # of a cloud
            found[key] = Setting(text, f"${variable}", is_text=True)
            continue
        if key.split(".")[0] in sections and "." in key:
            raise unknown_key(key, f"${variable}")
        from difflib import get_close_matches  # on demand: most starts need none

        if get_close_matches(variable, names, n=1, cutoff=0.9):
            raise unknown_key(key, f"${variable}")
    return found


def read_flags(flags: Mapping[str, object]) -> dict[str, Setting]:
    """Read settings by dotted key from flags; None: the flag was not set. Raise ConfigError for an unknown key."""
    found: dict[str, Setting] = {}
    for key, value in flags.items():
        if schema_key(key) not in leaf_keys():
            raise unknown_key(key, "command line")
        if value is not None:
            found[key] = Setting(value, "command line", is_text=isinstance(value, str))
    return found


def unknown_key(key: str, where: str) -> ConfigError:
    """Return the error for an unknown key, with its name now, the closest known key or the keys of the section."""
    if message := advice("edge.yaml", key, rewrites=not where.startswith(("$", "command line"))):
        return ConfigError(message, where=f"{where}: {key}")
    leaves = leaf_keys()
    if (of_cloud := schema_key(key)) != key:
        return unknown_key(of_cloud, where)
    prefix, _, name = key.rpartition(".")
    section = f"{prefix}." if prefix else ""
    names = sorted({leaf.removeprefix(section).split(".")[0] for leaf in leaves if leaf.startswith(section)})
    in_other_sections = [leaf for leaf in leaves if leaf.rpartition(".")[2] == name]
    from difflib import get_close_matches

    near = in_other_sections or get_close_matches(name, names, n=1) or get_close_matches(key, leaves, n=1)
    if near:
        hint = f"Did you mean `{near[0] if near[0] in leaves else section + near[0]}`?"
    else:
        hint = f"Known keys: {', '.join(names or sorted({leaf.split('.')[0] for leaf in leaves}))}."
    return ConfigError(f"Unknown key. {hint}", where=f"{where}: {key}")


def build(layer: Layer) -> Config:
    """Build the configuration, with absolute paths. ConfigError names the key and where its value was written."""
    tree: dict[str, object] = {}
    for key, setting in layer.items():
        *sections, name = key.split(".")
        parent = tree
        for section in sections:
            parent = parent.setdefault(section, {})  # type: ignore[assignment]  # the parent of a leaf is a section
        value = coerce(setting, leaf_keys()[schema_key(key)], key)
        parent[name] = _absolute(value, setting.base) if _PATHS.fullmatch(key) else value
    try:
        return msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise _bad_cloud(layer, tree, error) from error


def _bad_cloud(layer: Layer, tree: dict[str, object], error: msgspec.ValidationError) -> ConfigError:
    """Return the error of a cloud without a URL, or with a name that it cannot have."""
    clouds = tree.get(CLOUDS)
    for name in clouds if isinstance(clouds, dict) else ():
        where = f"{layer[next(key for key in layer if key.startswith(f'{CLOUDS}.{name}.'))].where}: {CLOUDS}.{name}"
        if f"{CLOUDS}.{name}.url" not in layer:
            return ConfigError("The cloud needs a `url`.", where=where)
        if not re.fullmatch(CLOUD_NAME, name):
            message = (
                "This is not a cloud's name. Write a lower-case letter, then letters, digits and single underscores."
            )
            return ConfigError(message, where=where)
    return ConfigError(str(error))


CLOUDS = "clouds"
_OF_CLOUD = re.compile(r"clouds\.([^.]+)(\..+)?")


def _is_cloud(key: str) -> bool:
    found = _OF_CLOUD.fullmatch(key)
    return found is not None and found[2] is None


def schema_key(key: str) -> str:
    """Return the key with `NAME` for the name of a cloud: ``clouds.NAME.url`` for ``clouds.eu.url``."""
    found = _OF_CLOUD.fullmatch(key)
    return key if found is None or found[2] is None else f"{CLOUDS}.NAME{found[2]}"


@functools.cache
def leaf_keys() -> Mapping[str, object]:
    """Return the type of every key that is set as a whole."""
    return {key: annotation for key, annotation in leaves_of(Config).items() if key != CLOUDS}


def config_keys() -> list[str]:
    """Return every dotted key, in the order of the structs."""
    return list(leaf_keys())


def config_variable(key: str) -> str:
    """Return the environment variable of a key: ``server.port`` is ``CAUSEWAY_SERVER__PORT``."""
    return PREFIX + key.upper().replace(".", "__")


def load_config(path: Path | None, environ: Mapping[str, str], flags: Mapping[str, object]) -> Config:
    """Load the configuration from a file, the environment and command-line flags, later ones taking precedence.

    Paths are absolute then, and `clouds.NAME.key` holds the token read from `clouds.NAME.key_file`. `flags`: values by
    dotted key; None: the flag was not set. ConfigError names the file and line, the variable or the flag, and the key.
    """
    file = read_yaml(_read(path, "config file"), str(path), path.absolute().parent) if path else {}
    merged = _merge_secrets([file, read_environ(environ), read_flags(flags)])
    for key, setting in merged.items():
        if schema_key(key) == "clouds.NAME.url":
            _check_url(key, setting)
    config = build(merged)
    for name in config.clouds:
        if is_reserved(name):
            where = f"{merged[f'{CLOUDS}.{name}.url'].where}: {CLOUDS}.{name}"
            raise ConfigError(f"`{name}` is reserved: `cloud.{name}` is a signal. Choose another name.", where=where)
    return msgspec.structs.replace(
        config,
        state_dir=config.state_dir or _default_state_dir(environ),
        clouds={name: _with_secret(name, cloud) for name, cloud in config.clouds.items()},
    )


def _read(path: Path, description: str) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_FILE_BYTES).decode()
    except OSError as error:
        raise ConfigError(f"Cannot read the {description}: {error.strerror}.", where=str(path)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"The {description} is not UTF-8 text.", where=str(path)) from error


def _absolute(value: object, folder: Path) -> object:
    """Return a path, or each of several, that is relative to `folder`, as an absolute one; "" stays."""
    if isinstance(value, tuple):
        return tuple(_absolute(path, folder) for path in value)
    return str((folder / Path(value).expanduser()).absolute()) if isinstance(value, str) and value else value


def _merge_secrets(layers: list[dict[str, Setting]]) -> dict[str, Setting]:
    """Merge the layers. A token in a later layer replaces a token file of an earlier one, and the reverse."""
    merged: dict[str, Setting] = {}
    for layer in layers:
        for key, setting in layer.items():
            other = _OTHER_SECRET.get(schema_key(key))
            if other is None or not setting.value:
                continue
            other = f"{key.rpartition('.')[0]}.{other}"
            if other in layer and layer[other].value:
                raise ConfigError(f"Set either {key} or {other}, not both.", where=f"{setting.where}: {key}")
            merged.pop(other, None)
        merged |= layer
    return merged


def _check_url(key: str, setting: Setting) -> None:
    if not isinstance(setting.value, str):
        return
    parts = urlsplit(setting.value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        message = f"Must be a URL like https://cloud.example/v1, not {setting.value!r}."
        raise ConfigError(message, where=f"{setting.where}: {key}")


def _with_secret(name: str, cloud: CloudServer) -> CloudServer:
    url = cloud.url.rstrip("/")
    if not cloud.key_file:
        return msgspec.structs.replace(cloud, url=url)
    secret = _read(Path(cloud.key_file), "key file").strip()
    if not secret or len(secret) > _MAX_SECRET_BYTES or "\n" in secret:
        where = f"{cloud.key_file}: {CLOUDS}.{name}.key_file"
        raise ConfigError("The key file must contain the token on one line.", where=where)
    return msgspec.structs.replace(cloud, url=url, key=secret)


def _default_state_dir(environ: Mapping[str, str]) -> str:
    # systemd's StateDirectory= may name several folders, separated by colons; the first is the daemon's.
    if state_dir := environ.get("STATE_DIRECTORY", "").split(":")[0]:
        return state_dir
    state_home = environ.get("XDG_STATE_HOME") or str(
        Path(environ.get("HOME") or "~").expanduser() / ".local" / "state"
    )
    return str(Path(state_home) / "causeway")
