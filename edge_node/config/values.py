"""One setting as written, read as the type of its key, or refused: what was expected, what was found, and where."""

from __future__ import annotations

import math
import re
from pathlib import Path

import msgspec
from msgspec import inspect

from router.errors import ConfigError

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)")
# As systemd reads them: K, M, G are powers of 1024; with a B they are what they say.
_BYTES = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_BYTES |= {"kb": 10**3, "mb": 10**6, "gb": 10**9}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?i?b?)", re.IGNORECASE)
_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


class Leaf(msgspec.Struct, frozen=True):
    """The type of one key: as annotated (limits included), and taken apart."""

    annotation: object
    kind: inspect.Type


class Setting(msgspec.Struct, frozen=True):
    """One value as written. `is_text`: it came as a string (environment, ``--set``) and has to be read as its type."""

    value: object
    where: str  # "edge.yaml:3", "$CAUSEWAY_LOG", "command line"
    is_text: bool = False
    base: Path = Path()  # what a relative path is relative to


def coerce(setting: Setting, leaf: Leaf, key: str) -> object:
    """The value as the key's type. A duration may be written ``10m``, a size ``64MiB``. Raises ConfigError."""
    value = setting.value
    if isinstance(value, str):
        value = _read_text(value, leaf.kind, key, is_text=setting.is_text)
    try:
        result: object = msgspec.convert(value, leaf.annotation)
    except msgspec.ValidationError as error:
        told = f"must be {_expected(leaf.kind, key)}, not {_shown(setting.value, key)}{_inside(error)}"
        raise ConfigError(told, where=f"{setting.where}: {key}") from error
    if isinstance(result, float) and not math.isfinite(result):
        raise ConfigError(f"must be {_expected(leaf.kind, key)}, not {result}", where=f"{setting.where}: {key}")
    return result


def _read_text(text: str, kind: inspect.Type, key: str, *, is_text: bool) -> object:
    """What the text says for this kind, or the text itself, which the conversion then refuses."""
    if isinstance(kind, (inspect.StrType, inspect.LiteralType)):
        return text
    if isinstance(kind, inspect.FloatType) and key.endswith("_s") and (match := _DURATION.fullmatch(text.strip())):
        return float(match[1]) * _SECONDS[match[2]]
    if isinstance(kind, inspect.IntType) and key.endswith("_bytes") and (match := _SIZE.fullmatch(text.strip())):
        factor = _BYTES.get(match[2].lower())
        return int(float(match[1]) * factor) if factor else text
    return _read_plain(text, kind) if is_text else text


def _read_plain(text: str, kind: inspect.Type) -> object:
    if isinstance(kind, inspect.BoolType):
        return _BOOLEANS.get(text.strip().lower(), text)
    if isinstance(kind, inspect.VarTupleType):
        if text.lstrip().startswith("["):
            try:
                return msgspec.json.decode(text)
            except msgspec.DecodeError:
                return text
        return [part.strip() for part in text.split(",") if part.strip()]
    try:
        return int(text) if isinstance(kind, inspect.IntType) else float(text)
    except ValueError:
        return text


def _expected(kind: inspect.Type, key: str) -> str:
    if isinstance(kind, inspect.LiteralType):
        return f"one of {', '.join(str(value) for value in kind.values)}"
    if isinstance(kind, inspect.BoolType):
        return "true or false"
    if isinstance(kind, inspect.StrType):
        return "text"
    if isinstance(kind, inspect.VarTupleType):
        return f"a list of {'mappings' if isinstance(kind.item_type, inspect.StructType) else 'texts'}"
    if isinstance(kind, (inspect.IntType, inspect.FloatType)):
        return _number(kind, key) + _limits(kind)
    raise AssertionError(f"{key}: no words for {kind!r}")


def _number(kind: inspect.IntType | inspect.FloatType, key: str) -> str:
    if key.endswith("_bytes"):
        return "a size in bytes (1048576, 64MiB, 1GB)"
    if key.endswith("_s"):
        return "a duration in seconds (30, 500ms, 10m, 7d)"
    return "a whole number" if isinstance(kind, inspect.IntType) else "a number"


def _limits(kind: inspect.IntType | inspect.FloatType) -> str:
    words = []
    if kind.ge is not None:
        words.append(f"at least {kind.ge}")
    if kind.gt is not None:
        words.append(f"more than {kind.gt}")
    if kind.le is not None:
        words.append(f"at most {kind.le}")
    return f", {' and '.join(words)}" if words else ""


def _shown(value: object, key: str) -> str:
    """The value for an error message: a secret is never shown, a long one is cut."""
    if key.endswith(("api_key", "keys")):
        return f"this {type(value).__name__}"
    if value is None:
        return "empty (give a value or remove the key)"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _inside(error: msgspec.ValidationError) -> str:
    """Where inside a list it went wrong, in msgspec's words."""
    _, found, path = str(error).partition(" - at `$")
    return f" (at `{path.rstrip('`')}`: {str(error).partition(' - ')[0]})" if found else ""
