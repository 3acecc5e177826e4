"""The keys of configuration files, which are structs: limits, shared sections, descriptions, and the JSON schema.

A key is described where it is declared: `max_files: Annotated[Positive, doc("Maximum uploaded files.")] = 200`. Pages,
`config --keys` and the schemas for editors come from there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, get_args, get_origin

import msgspec
from msgspec import Meta

from .numbers import unit_pattern, with_unit

_DIALECT = "https://json-schema.org/draft/2020-12/schema"

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
Pause = Annotated[float, Meta(ge=0)]


def doc(description: str) -> Meta:
    """Return the description of a configuration key, as in `Annotated[Positive, doc("Maximum open connections.")]`."""
    return Meta(description=description)


class ListenerTls(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A section `tls` of an address to listen on. The files are read again when they change."""

    cert_file: Annotated[
        str, doc("PEM file of the server's certificate and those between it and its CA. Empty: no TLS.")
    ] = ""
    key_file: Annotated[str, doc("PEM file with the certificate's private key.")] = ""
    client_ca_file: Annotated[
        str,
        doc(
            "PEM file of the CAs, and perhaps their revocation lists, of client certificates, which every client then "
            "needs (mTLS). Empty: none."
        ),
    ] = ""


NamesModel = Annotated[
    str,
    doc(
        "Folder of a token classification model that finds names and addresses: `model.onnx`, `tokenizer.json` and "
        "`config.json`. Empty: neither is found. No such model ships."
    ),
]


class SessionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The section `realtime`: live sessions over WebSocket."""

    max_sessions: Annotated[
        Positive,
        doc(
            "Maximum live sessions; one client may hold half. Further sessions get 429, unless a "
            "disconnected session can be evicted. Keep it below `server.max_connections`."
        ),
    ] = 256
    max_items: Annotated[int, Meta(ge=2), doc("Maximum items in a session's conversation; the oldest are dropped.")] = (
        256
    )
    max_bytes: Annotated[
        int, Meta(ge=4096), doc("Maximum size of a session's conversation. One client event may be twice as large.")
    ] = 256 * 1024
    replay_bytes: Annotated[Count, doc("Maximum size of sent events kept for a resumed connection.")] = 256 * 1024
    max_audio_s: Annotated[
        Seconds,
        doc(
            "Maximum length of all audio in a conversation, and of the audio being sent; the oldest items are "
            "dropped. One second takes 64 kB."
        ),
    ] = 30.0
    resume_s: Annotated[
        Pause,
        doc(
            "Time in which a disconnected session can be resumed. Its answer continues meanwhile. 0: the "
            "session ends at once."
        ),
    ] = 30.0
    idle_s: Annotated[Seconds, doc("Time without client events or an answer after which a session ends.")] = 900.0
    ping_s: Annotated[
        float,
        Meta(ge=1),
        doc("Interval between pings. A client that does not reply within half of it is disconnected."),
    ] = 20.0


class EgressLedgerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The section `egress_ledger`."""

    enabled: Annotated[
        bool, doc("Keep a signed log of what left a device or arrived at a gateway, without its content.")
    ] = False
    commit_s: Annotated[
        Seconds, doc("Longest time until a record is on disk, and so what a crash leaves undecided.")
    ] = 1.0
    max_bytes: Annotated[
        int, Meta(ge=1 << 20), doc("Maximum size of the log; the oldest records are deleted first.")
    ] = 64 * 1024 * 1024


class TracingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The section `tracing`."""

    endpoint: Annotated[
        str, doc("URL of an OpenTelemetry collector (OTLP over HTTP), such as `http://host:4318`. Empty: no traces.")
    ] = ""
    sample_ratio: Annotated[
        float,
        Meta(ge=0, le=1),
        doc("Share, 0 to 1, of the requests without an incoming trace context that are traced."),
    ] = 1.0
    region: Annotated[str, doc("Region of the collector. Requests that are bound to other regions are not traced.")] = (
        ""
    )


class ConfigKey(msgspec.Struct, frozen=True):
    """A key of a configuration file.

    Attributes:
        annotation: Type with limits, as `msgspec.convert` takes it.
        default: Value without the key; `msgspec.NODEFAULT` for a required key.
        description: Sentence or noun phrase.
    """

    annotation: object
    default: object
    description: str


@functools.cache
def keys_of(struct: type[msgspec.Struct]) -> Mapping[str, ConfigKey]:
    """Return every key of `struct` by its dotted name, in the order of the fields.

    The keys of a section stand for the section. Those of the items of a list or a mapping follow the key itself, as
    `tiers[].name` or `targets.NAME.at`; the keys of a section that can be written instead of text follow the key
    itself.
    """
    return dict(_keys(struct, "", None, set()))


def _keys(
    struct: type[msgspec.Struct], prefix: str, section: object, alternatives: set[object]
) -> Iterator[tuple[str, ConfigKey]]:
    """Yield the keys below `prefix`. `section`: the struct's default, if it has one; `alternatives`: those listed."""
    for field in msgspec.structs.fields(struct):
        name = prefix + field.name
        default = getattr(section, field.name, field.default)
        if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        description = _description(field.type)
        inner, suffix = _struct_in(field.type)
        if description or inner is None or suffix:
            yield name, ConfigKey(field.type, default, description)
        if inner is None or inner in alternatives:
            continue
        if str in get_args(_bare(field.type)):
            alternatives.add(inner)
        yield from _keys(inner, f"{name}{suffix}.", None if suffix else default, alternatives)


def _bare(annotation: object) -> object:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _description(annotation: object) -> str:
    return next((meta.description for meta in getattr(annotation, "__metadata__", ()) if meta.description), "")


def _struct_in(annotation: object) -> tuple[type[msgspec.Struct] | None, str]:
    """Return the struct in an annotation, if there is one, and the path between the key and the struct's keys."""
    bare = _bare(annotation)
    if isinstance(bare, type) and issubclass(bare, msgspec.Struct):
        return bare, ""
    suffix = {tuple: "[]", dict: ".NAME"}.get(get_origin(bare), "")  # type: ignore[arg-type]
    found = (_struct_in(part)[0] for part in get_args(bare))
    return next((inner for inner in found if inner is not None), None), suffix


@functools.cache
def leaves_of(struct: type[msgspec.Struct]) -> Mapping[str, object]:
    """Return the type with its limits of every key that is set as a whole, such as a list."""
    return {name: key.annotation for name, key in keys_of(struct).items() if "[]" not in name}


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
    """Return the JSON schema of a file for editors: indented JSON text that ends in a newline.

    The loader refuses all that the schema refuses, and checks more. A duration or a size may be a number or text.
    """
    schema = {"$schema": _DIALECT, "title": title, **msgspec.json.schema(struct)}
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
