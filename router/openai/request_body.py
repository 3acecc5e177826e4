"""Parsing of a request's body into a JSON object and a checked struct, with the fields that all requests share.

For any bytes, only `InvalidRequest` and its subclasses are raised; each message names the fault, its place, and the
correction. `chat.py`, `completions.py` and `embeddings.py` build the `Request`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, TypeVar

import msgspec

from ..documents.data import table_of
from ..errors import InvalidJSON, InvalidRequest, MissingField, UnknownField, UnsupportedFeature, UnsupportedMediaType
from ..types import Prefer, RoutingHints, Sampling, Tool, ToolChoice
from .wire import WireGeneration, WireRoutingHints

JSONObject = dict[str, object]
T = TypeVar("T")
NONE: frozenset[str] = frozenset()

BOM: Final = b"\xef\xbb\xbf"
"""The UTF-8 byte order mark, which some editors and clients put before JSON."""
_JSON: Final = "application/json"
_JSON_TYPE: Final = re.compile(r"application/(json|[a-z0-9.!#$&^_-]+\+json)")
FUNCTION: Final = "function"
ALLOWED_TOOLS: Final = "allowed_tools"
"""The type of a `tool_choice` that lists the tools that may be called."""
_CONSTRAINTS: Final = frozenset(
    "guided_json guided_regex guided_choice guided_grammar guided_whitespace_pattern guided_decoding_backend"
    " structured_outputs structural_tag grammar json_schema regex ebnf".split()
)
"""Other servers' fields that constrain an answer, refused because ignoring them would unconstrain it."""
_DECODER = msgspec.json.Decoder()
_ENCODER = msgspec.json.Encoder()
_decode = msgspec.json.Decoder(JSONObject).decode

# msgspec says "<reason> - at `$.messages[0].content`", or "- at `key` in `$.logit_bias`" when a mapping's key is wrong.
_VALIDATION = re.compile(r"^(?P<reason>.*?)(?: - at (?:`key` in )?`\$(?P<path>.*)`)?$", re.DOTALL)
_FIELD = re.compile(r"^Object (?P<fault>missing required|contains unknown) field `(?P<name>.*)`$")
_STEP = re.compile(r"\[(\d+)\]|([^.\[\]]+)")


_ADVICE = table_of(__package__, "advice.json", dict[str, str])

# If a request has two preferences, the narrower one applies. Pairs that are missing here contradict each other.
_NARROWER: Final[dict[frozenset[Prefer], Prefer]] = {
    frozenset({"prefer_on_device", "only_on_device"}): "only_on_device",
    frozenset({"prefer_cloud", "only_cloud"}): "only_cloud",
}
HINTS: Final = tuple(field.encode_name for field in msgspec.structs.fields(WireRoutingHints))
# Fields of other servers (`models`: OpenRouter's fallbacks) that look like misspelt fields of OpenAI's, but are not.
_OTHER_SERVERS: Final = frozenset({"models"})
# The threshold allows one wrong letter in a name of four, two in a long one. `min_tokens` and `top_a`, which vLLM and
# others accept, differ more from `max_tokens` and `top_p`.
_FIELD_SIMILARITY: Final = 0.87
_OURS_SIMILARITY: Final = 0.75  # no other API uses these names
_HEADER: Final = "x-causeway-"


def check_media_type(content_type: str | None, content_encoding: str | None) -> None:
    """Raise UnsupportedMediaType unless the headers of these names (None: absent) declare uncompressed JSON. A body
    without a type is refused, because a browser sends it for any page without a CORS preflight.
    """
    if content_type is None:
        raise UnsupportedMediaType(f"The body has no type. Send `Content-Type: {_JSON}`.")
    if content_type != _JSON and not _JSON_TYPE.fullmatch(content_type.partition(";")[0].strip().lower()):
        raise UnsupportedMediaType(f"The body's type is {content_type[:64]!r}. Send `Content-Type: {_JSON}`.")
    if content_encoding is not None:
        check_encoding(content_encoding)


def check_encoding(content_encoding: str | None) -> None:
    """Check the header of this name. Raises UnsupportedMediaType for a compressed body."""
    if content_encoding is not None and content_encoding.lower() != "identity":
        raise UnsupportedMediaType(f"The body is encoded as {content_encoding[:32]!r}. Send the body uncompressed.")


def load(body: bytes) -> JSONObject:
    """Decode the body, with or without a byte order mark (a parser may ignore it: RFC 8259, section 8.1). Raises
    InvalidJSON; InvalidRequest if it is not an object.
    """
    body = body.removeprefix(BOM)
    if not body.strip():
        raise InvalidJSON("The body is empty. Send a JSON object.")
    try:
        document = _DECODER.decode(body)
        if type(document) is not dict:
            raise InvalidRequest(f"The body is {_json_type(document)}. Send a JSON object.")
        _refuse_repeated_keys(body, document)
    except RecursionError:
        raise too_deep() from None
    except UnicodeDecodeError as error:
        raise InvalidJSON(f"The body is not UTF-8: {error.reason}. Send JSON encoded as UTF-8.") from None
    except ValueError as error:  # raised by msgspec, or by the standard library where it is stricter
        raise InvalidJSON(f"The body is not valid JSON: {error}{_surrogate_note(body)}. Send a JSON object.") from None
    return document


def validate(document: JSONObject, kind: type[T], advice: Mapping[str, str] = _ADVICE) -> T:
    """Convert the document to the struct `kind`. Raises InvalidRequest with OpenAI's `param` and the `advice` for a
    wrong value, by field; that for OpenAI's fields is the default.
    """
    try:
        return msgspec.convert(document, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _translate(str(error), document, {**_ADVICE, **advice}) from None


def canonical_json(value: object, *, sort: bool = False) -> str:
    """Encode as compact JSON. Keys keep their order unless `sort`: a model answers in its schema's order."""
    return msgspec.json.encode(value, order="sorted" if sort else None).decode()


def too_deep() -> InvalidJSON:
    return InvalidJSON("The body is nested too deeply. Send fewer levels of arrays and objects.")


# --- fields that the kinds of request share --------------------------------------------------------------------------


def generation_fields(
    wire: WireGeneration, document: JSONObject, known: frozenset[str], hints: RoutingHints
) -> dict[str, Any]:
    """Return the fields of a `Request` that chats, completions and responses share. `known`: the fields of this kind of
    request; `hints`: those of its headers. InvalidRequest names the wrong key.
    """
    return {
        "model": wire.model,
        "sampling": _sampling(wire),
        "stop": (wire.stop,) if isinstance(wire.stop, str) else tuple(wire.stop or ()),
        "stream": wire.stream is True,
        "user": wire.user,
        "extra": extra_of(document, known),
        "hints": merge_hints(hints, wire.causeway),
    }


def _sampling(wire: WireGeneration) -> Sampling:
    penalty, alias = wire.repeat_penalty, wire.repetition_penalty
    if penalty is not None and alias is not None and penalty != alias:
        raise InvalidRequest(
            "`repeat_penalty` and `repetition_penalty` differ. Send one of them.", param="repetition_penalty"
        )
    return Sampling(
        wire.temperature,
        wire.top_p,
        wire.top_k,
        wire.min_p,
        wire.presence_penalty,
        wire.frequency_penalty,
        alias if penalty is None else penalty,
        wire.seed,
        tuple(sorted(wire.logit_bias.items())) if wire.logit_bias else (),
    )


def includes_usage(wire: WireGeneration) -> bool:
    """Return whether the stream's usage is requested. Raises InvalidRequest for options without a stream."""
    if wire.stream_options is None:
        return False
    if wire.stream is not True:
        raise InvalidRequest(
            "`stream_options` is only valid with `stream`: true. Send both or neither.", param="stream_options"
        )
    return wire.stream_options.include_usage is True


def merge_hints(header: RoutingHints, body: WireRoutingHints | None) -> RoutingHints:
    """Combine the hints of headers and body: tags add up, the shorter deadline and the narrower preference apply.
    Raises InvalidRequest if the preferences contradict each other, so applying either would widen the other.
    """
    if body is None:
        return header
    deadlines = [ms for ms in (header.deadline_ms, body.deadline_ms) if ms is not None]
    return RoutingHints(
        prefer=_narrower(header.prefer, body.prefer),
        tags=(*header.tags, *(body.tags or ())),
        client=header.client,
        deadline_ms=min(deadlines, default=None),
        priority=header.priority,
    )


def _narrower(header: Prefer | None, body: Prefer | None) -> Prefer | None:
    if header is None or body is None or header == body:
        return header or body
    narrower = _NARROWER.get(frozenset({header, body}))
    if narrower is None:
        raise InvalidRequest(
            f"`causeway.prefer` is {body}, but {header} applies already, from a header, the session or an "
            "item of its conversation. Send only one of them.",
            param="causeway.prefer",
        )
    return narrower


def other_kinds(types: Iterable[str]) -> str:
    """Return the kinds of tools that are not functions, for a message; "" for none."""
    return ", ".join(sorted({kind[:64] for kind in types if kind != FUNCTION}))


def narrowed_tools(tools: Sequence[Tool], names: Mapping[int, str | None], param: str) -> tuple[Tool, ...]:
    """Return the tools with these names, in the order of `tools`; the others are hidden from the model and its target.
    Names are by their place in the list `param`, None without one. Raises InvalidRequest if one is not a tool's.
    """
    known = {tool.name for tool in tools}
    for at, name in names.items():
        if name not in known:
            message = f"`{param}[{at}]` does not name one of the functions in `tools`. Name one of them."
            raise InvalidRequest(message, param=f"{param}[{at}]")
    return tuple([tool for tool in tools if tool.name in names.values()])


def no_such_tools(kinds: str) -> UnsupportedFeature:
    return UnsupportedFeature(
        f"`tool_choice` asks for a tool of type {kinds}, which no target of this server has. Name a "
        "function, or send `auto`.",
        param="tool_choice",
    )


def tool_choice_of(choice: str | None, name: str | None, param: str, tools: Sequence[Tool], kinds: str) -> ToolChoice:
    """Return the choice among a request's tools. `choice` is none, auto (also None), required or function, whose `name`
    is at the path `param`; `kinds`: kinds of tools that are not functions. Raises InvalidRequest without such a tool.
    """
    if choice == "required" and kinds and not tools:
        raise no_such_tools(kinds)
    if choice is None or choice == "auto":
        return ToolChoice()
    if choice == "none":
        return ToolChoice("none")
    if not tools:
        raise InvalidRequest(
            "`tool_choice` asks for a call, but there are no tools. Send `tools` or remove it.", param="tool_choice"
        )
    if choice == "required":
        return ToolChoice("required")
    if name is None:
        where = param.rpartition(".")[0]
        raise MissingField(f"`{where}` is missing. Send an object with `name`.", param=where)
    if all(tool.name != name for tool in tools):
        raise InvalidRequest(f"`{param}` is not the name of one of `tools`. Name one of these tools.", param=param)
    return ToolChoice("function", name)


# --- fields that we do not know --------------------------------------------------------------------------------------


def extra_of(document: JSONObject, known: frozenset[str]) -> str:
    """Return the fields that we do not interpret, as canonical JSON, "" for none. One that looks like ours is refused:
    it would be sent to the target and have no effect here.
    """
    if document.keys() <= known:
        return ""
    unknown = {key: value for key, value in document.items() if key not in known}
    for name in sorted(_CONSTRAINTS & unknown.keys()):
        raise UnsupportedFeature(
            f"`{name}` is not supported. Constrain the answer by `response_format` of type json_schema.", param=name
        )
    check_field_names(unknown, known)
    return canonical_json(unknown, sort=True)


def check_field_names(unknown: Iterable[str], known: frozenset[str]) -> None:
    """Raise UnknownField for the first unknown field that looks like a known field or a routing hint: a misspelt
    `temperature` would be passed on, and misspelt `tags` lost. `known`: the fields of this kind of request; pass the
    same set each time, since results are cached for it.
    """
    for name in unknown:
        problem = _field_problem(name[:64], known)
        if problem:
            raise UnknownField(f"`{name[:64]}` is not a known field{problem}", param=name[:64])


def check_header_names(headers: Mapping[str, str], known: frozenset[str]) -> None:
    """Refuse a misspelt ``x-causeway-`` header, near one of `known` (lower case), but no other. Raises UnknownField."""
    for name in headers:
        if name[:11].lower() == _HEADER and name.lower() not in known:
            near = _near(name.lower().removeprefix(_HEADER), [header.removeprefix(_HEADER) for header in known], 0.7)
            if near:
                raise UnknownField(
                    f"`{name[:64]}` is not a known header, did you mean `{_HEADER}{near}`?", param=name[:64]
                )


def hint_advice(name: str) -> str:
    """Return advice for an unknown key of the object `causeway`."""
    if name == "continue":
        return ": a truncated answer is not continued. Leave `continue` out."
    near = _near(name, HINTS, 0.6)
    return f", did you mean `{near}`?" if near else f". Known keys are {', '.join(HINTS)}."


@lru_cache(maxsize=1024)
def _field_problem(name: str, known: frozenset[str]) -> str:
    plain = name.lower().replace("-", "_")
    if plain.startswith(("causeway", "x_causeway")):
        return ". Put routing hints in the object `causeway`."
    if hint := _near(plain, ("causeway",), _OURS_SIMILARITY):
        return f", did you mean `{hint}`?"
    if plain in HINTS:
        return f". Routing hints belong in the object `causeway`: write `causeway.{plain}`."
    if plain in _OTHER_SERVERS:
        return ""
    near = _near(plain, known, _FIELD_SIMILARITY)
    if near:
        return f", did you mean `{near}`?"
    hint = _near(plain, ("prefer", "deadline_ms"), _OURS_SIMILARITY)
    return f", did you mean `causeway.{hint}`?" if hint else ""


def _near(name: str, known: Iterable[str], similarity: float) -> str:
    from difflib import get_close_matches  # on demand: most requests have no error

    return next(iter(get_close_matches(name, sorted(known), n=1, cutoff=similarity)), "")


def unknown_fields(value: JSONObject, known: frozenset[str]) -> JSONObject:
    """Return the fields that we do not interpret. Null counts as absent."""
    return {name: field for name, field in value.items() if name not in known and field is not None}


def inner_extra(value: JSONObject, known: frozenset[str], inner: str = "", inner_known: frozenset[str] = NONE) -> str:
    """Return the uninterpreted fields of a message, part, tool or call, and of the object `inner` in it, as the text of
    a canonical JSON object; "" for none. Examples are thought signatures, cache marks and reasoning details. A server
    that receives its own answer back without them refuses the request, or reasons again.
    """
    nested = value.get(inner)
    if value.keys() <= known and not (isinstance(nested, dict) and nested.keys() - inner_known):
        return ""
    fields = unknown_fields(value, known)
    if isinstance(nested, dict) and (unknown := unknown_fields(nested, inner_known)):
        fields[inner] = unknown
    return encode_extra(fields)


def encode_extra(fields: JSONObject) -> str:
    """Encode fields that we do not interpret."""
    return canonical_json(fields, sort=True) if fields else ""


def with_extra(encoded: bytes, extra: str) -> msgspec.Raw:
    """Add the fields of `extra` to an encoded JSON object. The object's own fields win, also inside nested objects."""
    fields, own_fields = _decode(extra), _decode(encoded)
    for name, value in own_fields.items():
        inner = fields.get(name)
        fields[name] = {**inner, **value} if isinstance(inner, dict) and isinstance(value, dict) else value
    return msgspec.Raw(msgspec.json.encode(fields))


def merged_extra(parts: Iterable[str]) -> str:
    """Merge the fields of streamed pieces: join texts and lists, merge objects, replace other values."""
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


# --- faults, in words ------------------------------------------------------------------------------------------------


def _json_type(value: object) -> str:
    """Return the JSON type of a value in words, never its content, which may be private."""
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)[:32]
    return "a string" if isinstance(value, str) else "an array" if isinstance(value, list) else "an object"


def _refuse_repeated_keys(body: bytes, document: JSONObject) -> None:
    # Decoding drops a repeated key, so the document encoded again is shorter than the body. Comparing lengths, the
    # usual case, costs a microsecond; other spellings (1e2, \u00e9) also change the length and take the exact check.
    if len(msgspec.json.format(body, indent=-1)) != len(_ENCODER.encode(document)):
        json.loads(body, object_pairs_hook=_check_unique, parse_int=len, parse_float=len)  # numbers are not converted


def _check_unique(pairs: list[tuple[str, object]]) -> None:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise InvalidJSON(f"The key `{key[:64]}` appears twice in one object. Send it once.", param=key[:64])
        seen.add(key)


def _surrogate_note(body: bytes) -> str:
    return " (or a \\ud800-\\udfff escape without its pair)" if b"\\ud" in body.lower() else ""


def _translate(text: str, document: JSONObject, all_advice: Mapping[str, str]) -> InvalidRequest:
    match = _VALIDATION.match(text)
    reason, path = (match["reason"], match["path"] or "") if match else (text, "")
    path = path.removeprefix(".").replace("[...]", "")
    field = _FIELD.match(reason)
    if field is not None:
        name = f"{path}.{field['name']}" if path else field["name"]
        return _field_error(field["fault"], name, all_advice.get(field["name"], ""))
    names = [name for _, name in _STEP.findall(path) if name]
    advice = all_advice.get(".".join(names[-2:])) or all_advice.get(names[-1] if names else "", "")
    reason = reason.replace("Invalid enum value", "unknown value").replace("Invalid value", "unknown value")
    got = "" if "got" in reason or "unknown value" in reason else f", got {_value_at(document, path, reason)}"
    return InvalidRequest(f"`{path}`: {reason[:1].lower()}{reason[1:200]}{got}. {advice}".rstrip(), param=path or None)


def _field_error(fault: str, path: str, advice: str) -> InvalidRequest:
    if fault == "missing required":
        return MissingField(f"`{path}` is missing. {advice or 'Send this field.'}", param=path)
    parent, _, name = path.rpartition(".")
    mend = hint_advice(name) if parent == "causeway" else ". Remove the field, or correct its name."
    return UnknownField(f"`{path}` is not a known field{mend}", param=path)


def _value_at(document: JSONObject, path: str, reason: str) -> str:
    """Return a description of the value at `path`: its length if the `reason` is about length, else its type."""
    value: object = document
    for index, name in _STEP.findall(path):
        if isinstance(value, list) and index and int(index) < len(value):
            value = value[int(index)]
        elif isinstance(value, dict) and name in value:
            value = value[name]
        else:
            return "another value"
    return f"{len(value)}" if "of length" in reason and isinstance(value, str | list) else _json_type(value)
