"""Convert one setting to the type of its key, or reject it with the expected type, the value and its place."""

from __future__ import annotations

import math
import re
from pathlib import Path

import msgspec
from msgspec import inspect

from router.documents import strict_yaml
from router.documents.quantities import bytes_of, seconds_of
from router.errors import ConfigError

_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_PATTERN = re.compile("matching regex '(.*)'")
_FORMATS = {  # what the patterns of the schema stand for
    "^[0-9a-f]{64}$": "64 hexadecimal digits, as `printf %s KEY | sha256sum` prints them",
    "^([a-z]{2,3})?$": "a code of ISO 639-1, such as en",
}


class Leaf(msgspec.Struct, frozen=True):
    """The type of one key: the annotation with its limits, and msgspec's description of it."""

    annotation: object
    kind: inspect.Type


class Setting(msgspec.Struct, frozen=True):
    """One value as written. `is_text`: it is a string (environment, ``--set``) to be parsed as the key's type."""

    value: object
    where: str  # "edge.yaml:3", "$CAUSEWAY_LOG", "command line"
    is_text: bool = False
    base: Path = Path()  # the folder that a relative path is relative to


def coerce(setting: Setting, leaf: Leaf, key: str) -> object:
    """Return the value as the key's type. A duration may be written ``10m``, a size ``64MiB``.

    Raises:
        ConfigError: Names the expected type, the value, and where it was written.
    """
    value = setting.value
    if isinstance(value, str):
        value = _read_text(value, leaf.kind, key, is_text=setting.is_text)
    try:
        result: object = msgspec.convert(value, leaf.annotation)
    except msgspec.ValidationError as error:
        reason, inside, path = str(error).partition(" - at `$")
        message = f"must be {_expected(leaf.kind, key)}, not {_display(setting.value, key)}"
        if inside:  # a list: what is wrong is one of its values, which may be a secret
            message = _in_words(reason)
        raise ConfigError(message, where=f"{setting.where}: {key}{path.rstrip('`')}") from error
    if isinstance(result, float) and not math.isfinite(result):
        raise ConfigError(f"must be {_expected(leaf.kind, key)}, not {result}", where=f"{setting.where}: {key}")
    return result


def _read_text(text: str, kind: inspect.Type, key: str, *, is_text: bool) -> object:
    """Parse the text as this type. Returns the text itself if it cannot be parsed; the conversion then rejects it."""
    if isinstance(kind, (inspect.StrType, inspect.LiteralType)):
        return text
    if isinstance(kind, inspect.FloatType) and key.endswith("_s") and (seconds := seconds_of(text)) is not None:
        return seconds
    if isinstance(kind, inspect.IntType) and key.endswith("_bytes") and (size := bytes_of(text)) is not None:
        return size
    return _read_plain(text, kind) if is_text else text


def plain_value(tree: strict_yaml.Tree) -> object:
    """Convert a part of a YAML document to plain values.

    YAML's dates and base-60 numbers stay text, which is right for keys that expect text.
    """
    if isinstance(tree, strict_yaml.Mapping):
        return {key.text: plain_value(value) for key, value in zip(tree.keys, tree.values, strict=True)}
    if isinstance(tree, strict_yaml.Sequence):
        return [plain_value(item) for item in tree.items]
    if tree.kind == "null":
        return None
    if tree.kind == "bool":
        return tree.text.lower() in ("true", "yes", "on")
    try:
        if tree.kind == "int":
            return int(tree.text.replace("_", ""))
        if tree.kind == "float":
            return float(tree.text.replace("_", ""))
    except ValueError:
        return tree.text
    return tree.text


def read_list(text: str) -> object:
    """Return the items of a YAML list, or of ``a,b``; the text itself if it is a malformed YAML list."""
    if not text.lstrip().startswith("["):
        return [part.strip() for part in text.split(",") if part.strip()]
    try:
        return plain_value(strict_yaml.read_yaml(text, ""))
    except strict_yaml.YamlError:
        return text


def _read_plain(text: str, kind: inspect.Type) -> object:
    if isinstance(kind, inspect.BoolType):
        return _BOOLEANS.get(text.strip().lower(), text)
    if isinstance(kind, inspect.VarTupleType):
        return read_list(text)
    if isinstance(kind, inspect.UnionType):  # of a number and words
        return next((value for one in kind.types if (value := _read_plain(text, one)) != text), text)
    if isinstance(kind, inspect.LiteralType):
        return text
    try:
        return int(text) if isinstance(kind, inspect.IntType) else float(text)
    except ValueError:
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
    if key.endswith(("api_key", "keys")):
        return f"the given {type(value).__name__}"
    if value is None:
        return "empty (set a value or remove the key)"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _in_words(reason: str) -> str:
    """Return msgspec's reason, with what a pattern stands for."""
    pattern = _PATTERN.search(reason)
    return f"must be {_FORMATS[pattern[1]]}" if pattern and pattern[1] in _FORMATS else reason
