"""Fields that we do not interpret, of messages, parts, tools and calls: they travel with what they belong to.

Thought signatures, cache marks and reasoning details are such fields: a server that gets its own answer back without
them refuses the request, or thinks again. They are kept as the text of a canonical JSON object, "" for none.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

JSONObject = dict[str, object]
NONE: frozenset[str] = frozenset()

_encode = msgspec.json.Encoder(order="sorted").encode
_decode = msgspec.json.Decoder(JSONObject).decode


def unknown_fields(value: JSONObject, known: frozenset[str]) -> JSONObject:
    """Return the fields that we do not interpret. Null counts as absent."""
    return {name: field for name, field in value.items() if name not in known and field is not None}


def extra_of(value: JSONObject, known: frozenset[str], inner: str = "", inner_known: frozenset[str] = NONE) -> str:
    """Return the fields that we do not interpret, those of the object `inner` in it included."""
    nested = value.get(inner)
    if value.keys() <= known and not (isinstance(nested, dict) and nested.keys() - inner_known):
        return ""
    fields = unknown_fields(value, known)
    if isinstance(nested, dict) and (unknown := unknown_fields(nested, inner_known)):
        fields[inner] = unknown
    return encode_extra(fields)


def encode_extra(fields: JSONObject) -> str:
    """Encode fields that we do not interpret."""
    return _encode(fields).decode() if fields else ""


def with_extra(encoded: bytes, extra: str) -> msgspec.Raw:
    """Add the fields of `extra` to an encoded JSON object, whose own fields win, also those of an object in both."""
    fields, own = _decode(extra), _decode(encoded)
    for name, value in own.items():
        inner = fields.get(name)
        fields[name] = {**inner, **value} if isinstance(inner, dict) and isinstance(value, dict) else value
    return msgspec.Raw(msgspec.json.encode(fields))


def merged_extra(parts: Iterable[str]) -> str:
    """Merge the fields of streamed pieces: texts and lists are joined, objects merged, and of other values the last."""
    whole: JSONObject = {}
    for part in parts:
        whole = _merged(whole, _decode(part))
    return encode_extra(whole)


def _merged(one: JSONObject, other: JSONObject) -> JSONObject:
    merged = dict(one)
    for name, value in other.items():
        before = merged.get(name)
        if isinstance(before, str) and isinstance(value, str):
            merged[name] = before + value
        elif isinstance(before, list) and isinstance(value, list):
            merged[name] = [*before, *value]
        elif isinstance(before, dict) and isinstance(value, dict):
            merged[name] = _merged(before, value)
        else:
            merged[name] = value
    return merged
