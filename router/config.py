"""The keys of configuration files, which are structs: limits, shared sections, descriptions, and the JSON schema.

`keys.yaml` of a package describes the fields of its structs. Pages, `config --keys` and the schemas for editors have
their texts from there.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, get_args, get_origin

import msgspec
from msgspec import Meta

from .numbers import unit_pattern, with_unit

_DIALECT = "https://json-schema.org/draft/2020-12/schema"

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
Pause = Annotated[float, Meta(ge=0)]


class ListenerTls(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A section `tls` of an address to listen on. The files are read again when they change."""

    cert_file: str = ""
    key_file: str = ""
    client_ca_file: str = ""


class SessionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The section `realtime`: live sessions over WebSocket."""

    max_sessions: Positive = 256
    max_items: Annotated[int, Meta(ge=2)] = 256
    max_bytes: Annotated[int, Meta(ge=4096)] = 256 * 1024
    replay_bytes: Count = 256 * 1024
    max_audio_s: Seconds = 30.0
    resume_s: Pause = 30.0
    idle_s: Seconds = 900.0
    ping_s: Annotated[float, Meta(ge=1)] = 20.0


class EgressLedgerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The section `egress_ledger`."""

    enabled: bool = False
    commit_s: Seconds = 1.0
    max_bytes: Annotated[int, Meta(ge=1 << 20)] = 64 * 1024 * 1024


class TracingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The section `tracing`."""

    endpoint: str = ""
    sample_ratio: Annotated[float, Meta(ge=0, le=1)] = 1.0
    region: str = ""


class ConfigKey(msgspec.Struct, frozen=True):
    """A key of a configuration file."""

    annotation: object  # type with limits, as `msgspec.convert` takes it
    default: object  # value without the key; `msgspec.NODEFAULT` for a required key
    struct: type[msgspec.Struct]  # the struct that has the key as a field
    field: str  # the field's name
    is_section: bool  # whether its keys are set one by one

    @property
    def description(self) -> str:
        """The sentence or noun phrase of `keys.yaml`; "" without one."""
        return _description(self.struct, self.field)


def _description(struct: type[msgspec.Struct], field: str) -> str:
    described = (_descriptions(one.__module__).get(one.__name__, {}) for one in struct.__mro__)
    return next((fields[field] for fields in described if field in fields), "")


@functools.cache
def _descriptions(module: str) -> Mapping[str, Mapping[str, str]]:
    """Return the descriptions of a module's package: a text by struct and field. The file is a part of the code."""
    package = ".".join(module.split(".")[:2])
    text = pkgutil.get_data(package, "keys.yaml") if package.startswith("causeway_server.") else None
    return {} if text is None else msgspec.yaml.decode(text, type=dict[str, dict[str, str]])


@functools.cache
def keys_of(struct: type[msgspec.Struct]) -> Mapping[str, ConfigKey]:
    """Return every key of `struct` by its dotted name, in the order of the fields.

    The keys of a section stand for the section, unless it is described. Those of the items of a list or a mapping
    follow the key itself, as `tiers[].name` or `targets.NAME.at`; the keys of a section that can be written instead of
    text follow the key itself.
    """
    return {name: key for name, key in _keys(struct, "", None, set()) if key.description or not key.is_section}


def _keys(
    struct: type[msgspec.Struct], prefix: str, section: object, alternatives: set[object]
) -> Iterator[tuple[str, ConfigKey]]:
    """Yield the keys below `prefix`. `section`: the struct's default, if it has one; `alternatives`: those listed."""
    for field in msgspec.structs.fields(struct):
        name = prefix + field.name
        default = getattr(section, field.name, field.default)
        if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        inner, suffix = _struct_in(field.type)
        is_text = str in get_args(_bare(field.type))  # a section that may be written as text instead
        yield name, ConfigKey(field.type, default, struct, field.name, not (inner is None or suffix or is_text))
        if inner is None or inner in alternatives:
            continue
        if is_text:
            alternatives.add(inner)
        yield from _keys(inner, f"{name}{suffix}.", None if suffix else default, alternatives)


def _bare(annotation: object) -> object:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _struct_in(annotation: object) -> tuple[type[msgspec.Struct] | None, str]:
    """Return the struct in an annotation, if there is one, and the path between the key and the struct's keys."""
    bare = _bare(annotation)
    if isinstance(bare, type) and issubclass(bare, msgspec.Struct):
        return bare, ""
    suffix = {tuple: "[]", dict: ".NAME"}.get(get_origin(bare), "")  # type: ignore[arg-type]
    found = (_struct_in(part)[0] for part in get_args(bare))
    return next((inner for inner in found if inner is not None), None), suffix


def describe(schemas: Mapping[str, dict[str, Any]], annotations: Iterable[object]) -> None:
    """Add the descriptions of `keys.yaml` to schemas, which have the names of structs in the annotations."""
    found: set[type[msgspec.Struct]] = set()
    for annotation in annotations:
        _find_structs(annotation, found)
    for struct in found:
        for name, node in schemas[struct.__name__].get("properties", {}).items():
            if text := _description(struct, name):
                node["description"] = text


def _find_structs(annotation: object, found: set[type[msgspec.Struct]]) -> None:
    """Add the structs in an annotation, and those in their fields, to `found`."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct) and annotation not in found:
        found.add(annotation)
        for field in msgspec.structs.fields(annotation):
            _find_structs(field.type, found)
    for part in get_args(annotation):
        _find_structs(part, found)


@functools.cache
def leaves_of(struct: type[msgspec.Struct]) -> Mapping[str, object]:
    """Return the type with its limits of every key that is set as a whole, such as a list."""
    keys = _keys(struct, "", None, set())
    return {name: key.annotation for name, key in keys if "[]" not in name and not key.is_section}


def default_text(name: str, key: ConfigKey) -> str:
    """Return a key's default as people write it, such as `35d`, `8MiB` or `[chat, completion]`; "" without one."""
    value = msgspec.to_builtins(key.default) if key.default not in (msgspec.NODEFAULT, msgspec.UNSET) else None
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return with_unit(name, value)
    if isinstance(value, (list, tuple)):
        items = [with_unit("", item) if isinstance(item, float) else item for item in value]
        return f"[{', '.join(items)}]" if items and isinstance(items[0], str) else ""
    return value if isinstance(value, str) else ""


def schema_of(struct: type[msgspec.Struct], title: str) -> bytes:
    """Return a file's JSON schema for editors: indented text that ends in a newline. The loader refuses all that it
    refuses, and checks more. A duration or a size may be a number or text.
    """
    schema = {"$schema": _DIALECT, "title": title, **msgspec.json.schema(struct)}
    describe(schema["$defs"], [struct])
    return msgspec.json.format(msgspec.json.encode(_for_editors(schema), order="deterministic"), indent=2) + b"\n"


def _for_editors(node: Any, name: str = "") -> Any:
    """Return a part of a schema in which durations and sizes may be text, too, and patterns are JavaScript's."""
    if isinstance(node, list):
        return [_for_editors(part) for part in node]
    if not isinstance(node, dict):
        return node.replace(r"\Z", "$") if name == "pattern" else node
    return {
        key: {each: _with_text(each, _for_editors(part)) for each, part in value.items()}
        if key == "properties"
        else value
        if key in ("default", "examples")
        else _for_editors(value, key)
        for key, value in node.items()
    }


def _with_text(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a key that, if it is a duration or a size, may be text with a unit."""
    pattern = unit_pattern(name)
    if pattern is None:
        return schema
    shared = {key: schema.pop(key) for key in ("description", "default") if key in schema}
    return shared | {"anyOf": [*schema.get("anyOf", [schema]), {"type": "string", "pattern": pattern}]}
