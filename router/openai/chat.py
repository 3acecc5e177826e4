"""The parsing of the body of `POST /v1/chat/completions` into a `Request`, with the rules that types cannot express."""

from __future__ import annotations

from typing import Annotated, Final, Literal, cast

import msgspec

from ..errors import InvalidRequest, MissingField, UnsupportedFeature
from ..types import (
    AudioPart,
    FilePart,
    ImagePart,
    Message,
    Part,
    Request,
    ResponseFormat,
    RoutingHints,
    Sampling,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
)
from .request_body import (
    ALLOWED_TOOLS,
    FUNCTION,
    JSONObject,
    canonical_json,
    generation_fields,
    includes_usage,
    inner_extra,
    load,
    narrowed_tools,
    no_such_tools,
    other_kinds,
    too_deep,
    tool_choice_of,
    validate,
)
from .wire import (
    Count,
    Name,
    WireAllowedTools,
    WireAudio,
    WireChat,
    WireChoice,
    WireFormat,
    WireFunction,
    WireFunctionCall,
    WireImage,
    WireImageUrl,
    WireInputAudio,
    WireMessage,
    WirePart,
    WireRefusal,
    WireText,
    WireTool,
    WireToolCall,
)

_NO_SAMPLING: Final = Sampling()
_FIELDS: Final = frozenset(WireChat.__struct_fields__)
_MESSAGE: Final = frozenset(WireMessage.__struct_fields__)
_CALL: Final = frozenset(WireToolCall.__struct_fields__)
_CALL_FUNCTION: Final = frozenset(WireFunctionCall.__struct_fields__)
_TOOL: Final = frozenset(WireTool.__struct_fields__)
_FUNCTION: Final = frozenset(WireFunction.__struct_fields__)
# By type: the field of a part that has its content, and the fields of that object.
_PARTS: Final[dict[object, tuple[str, frozenset[str]]]] = {
    "text": ("text", frozenset()),
    "refusal": ("refusal", frozenset()),
    "image_url": ("image_url", frozenset(WireImageUrl.__struct_fields__)),
    "input_audio": ("input_audio", frozenset(WireAudio.__struct_fields__)),
}


class _TextMessage(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: str


class _TextChat(msgspec.Struct, gc=False, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A chat of texts alone: it means what `WireChat` would read, for a third of the time."""

    model: Name
    messages: Annotated[list[_TextMessage], msgspec.Meta(min_length=1)]
    temperature: Annotated[int, msgspec.Meta(ge=0, le=2)] | Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stream: bool | None = None
    user: str | None = None


_decode_plain = msgspec.json.Decoder(_TextChat).decode
_encode = msgspec.json.Encoder().encode


class TextChat(msgspec.Struct, frozen=True, gc=False):
    """A chat of texts alone. `encoded`: its body, which begins with the model, without blanks."""

    request: Request
    encoded: bytes


def text_chat(body: bytes, hints: RoutingHints) -> TextChat | None:
    """Parse a chat of texts alone; None for any other body, and for one that may be wrong."""
    try:
        wire = _decode_plain(body)
        # A repeated key, a null or another spelling makes the lengths differ, and takes the exact check.
        encoded = _encode(wire)
        if len(encoded) != len(body) and len(encoded) != len(msgspec.json.format(body, indent=-1)):
            return None
    except (ValueError, RecursionError):
        return None
    old, new = wire.max_tokens, wire.max_completion_tokens
    if old is not None and new is not None:
        return None
    temperature = wire.temperature
    request = Request(
        kind="chat",
        model=wire.model,
        messages=tuple([Message(message.role, message.content) for message in wire.messages]),
        max_tokens=old if new is None else new,
        limit_name="max_tokens" if new is None else "max_completion_tokens",
        sampling=_NO_SAMPLING if temperature is None else Sampling(float(temperature)),
        stream=wire.stream is True,
        user=wire.user,
        hints=hints,
    )
    return TextChat(request, encoded)


def parse_chat(body: bytes, hints: RoutingHints) -> Request:
    """Parse and validate a chat request, with the routing hints of its headers. InvalidRequest names the wrong key."""
    plain = text_chat(body, hints)
    return general_chat(body, hints) if plain is None else plain.request


def general_chat(body: bytes, hints: RoutingHints) -> Request:
    """Parse a chat as `parse_chat` does one that is not of texts alone. Raises InvalidRequest."""
    try:
        document = load(body)
        wire = validate(document, WireChat)
        _refuse_legacy(wire)
        tools = _tools(wire.tools, _raw(document, "tools")) if wire.tools else ()
        kinds = other_kinds([tool.type for tool in wire.tools or ()])
        choice: str | WireChoice | None = wire.tool_choice
        if isinstance(choice, WireChoice) and choice.type == ALLOWED_TOOLS:
            tools, kinds, choice = _allowed_tools(choice.allowed_tools, tools)
        raw = _raw(document, "messages")
        return Request(
            kind="chat",
            messages=tuple([_message(message, at, raw[at]) for at, message in enumerate(wire.messages)]),
            max_tokens=_token_limit(wire),
            limit_name="max_tokens" if wire.max_completion_tokens is None else "max_completion_tokens",
            n=wire.n or 1,
            include_usage=includes_usage(wire),
            tools=tools,
            # Without tools nothing can be called, so "none" means the same as no choice.
            tool_choice=_tool_choice(choice, tools, kinds),
            parallel_tool_calls=wire.parallel_tool_calls is not False,
            response_format=None if wire.response_format is None else _response_format(wire.response_format),
            logprobs=_logprobs(wire),
            reasoning_effort=wire.reasoning_effort,
            **generation_fields(wire, document, _FIELDS, hints),
        )
    except RecursionError:
        raise too_deep() from None


def _token_limit(wire: WireChat) -> int | None:
    new, old = wire.max_completion_tokens, wire.max_tokens
    if new is not None and old is not None and new != old:
        raise InvalidRequest(
            "`max_tokens` and `max_completion_tokens` differ. Send one of them.", param="max_completion_tokens"
        )
    return old if new is None else new


def _logprobs(wire: WireChat) -> int | None:
    if wire.logprobs:
        return wire.top_logprobs or 0
    if wire.top_logprobs:
        raise InvalidRequest("`top_logprobs` needs `logprobs` to be true. Send both.", param="top_logprobs")
    return None


def _raw(document: JSONObject, name: str) -> list[JSONObject]:
    """Return a list of objects as it was sent. Its types have been checked."""
    return cast("list[JSONObject]", document.get(name) or [])


def _message(wire: WireMessage, at: int, raw: JSONObject) -> Message:
    role, content = wire.role, wire.content
    extra = "" if raw.keys() <= _MESSAGE else inner_extra(raw, _MESSAGE)
    if (role == "user" or role == "system") and type(content) is str and not wire.tool_calls:
        return Message(role, content, wire.name, extra=extra)  # the usual message
    path = f"messages[{at}]"
    _check(wire, path)
    if content is None and wire.refusal is not None:
        content = wire.refusal  # an assistant's refusal is read as its text
    parts = content if not isinstance(content, list) else tuple(map(_part, content, _raw(raw, "content")))
    calls = tuple(map(_call, wire.tool_calls or (), _raw(raw, "tool_calls")))
    return Message(role, parts, wire.name, calls, wire.tool_call_id, extra)


def _call(wire: WireToolCall, raw: JSONObject) -> ToolCall:
    extra = inner_extra(raw, _CALL, "function", _CALL_FUNCTION)
    return ToolCall(wire.id, wire.function.name, wire.function.arguments, extra)


def _check(wire: WireMessage, path: str) -> None:
    role = wire.role
    if wire.function_call is not None:
        raise _legacy("function_call", "tool_calls", f"{path}.function_call")
    if wire.content is None and role != "assistant":
        raise MissingField(f"`{path}.content` is missing. Send the {role} message's text.", param=f"{path}.content")
    if wire.tool_calls and role != "assistant":
        raise InvalidRequest(
            f"`{path}.tool_calls` belongs to an assistant message, but this one is from {role}. Remove `tool_calls`.",
            param=f"{path}.tool_calls",
        )
    if role == "tool" and not wire.tool_call_id:
        raise MissingField(
            f"`{path}.tool_call_id` is missing. Send the id of the call that this message answers.",
            param=f"{path}.tool_call_id",
        )
    if role == "function" and not wire.name:
        raise MissingField(f"`{path}.name` is missing. Send the function's name.", param=f"{path}.name")


def _part(wire: WirePart, raw: JSONObject) -> Part:
    if not isinstance(wire, WireText | WireRefusal | WireImage | WireInputAudio):
        return FilePart(canonical_json(wire.file), inner_extra(raw, frozenset({"type", "file"})))
    inner, known = _PARTS[raw["type"]]
    extra = inner_extra(raw, frozenset({"type", inner}), inner, known)
    if isinstance(wire, WireText):
        return TextPart(wire.text, extra)
    if isinstance(wire, WireRefusal):
        return TextPart(wire.refusal, extra)
    if isinstance(wire, WireImage):
        return ImagePart(wire.image_url.url, wire.image_url.detail or "auto", extra)
    return AudioPart(wire.input_audio.data, wire.input_audio.format, extra)


def _refuse_legacy(wire: WireChat) -> None:
    """Refuse `functions`, replaced by tools, and audio answers: such a client could not read our answer."""
    if wire.functions is not None:
        raise _legacy("functions", "tools", "functions")
    if wire.function_call is not None:
        raise _legacy("function_call", "tool_choice", "function_call")
    if wire.audio is not None or (wire.modalities is not None and wire.modalities != ["text"]):
        param = "audio" if wire.audio is not None else "modalities"
        raise UnsupportedFeature(f"`{param}`: answers are text only. Remove the field.", param=param)


def _legacy(old: str, new: str, param: str) -> InvalidRequest:
    return UnsupportedFeature(f"`{param}`: OpenAI replaced `{old}` by `{new}`. Use `{new}`.", param=param)


def _tools(wire: list[WireTool], raw: list[JSONObject]) -> tuple[Tool, ...]:
    """Return the tools. Raises InvalidRequest if two share a name, because a call would be ambiguous."""
    functions: dict[str, Tool] = {}
    for at, tool in enumerate(wire):
        if tool.type != FUNCTION:
            continue
        param = f"tools[{at}].function"
        if tool.function is None:
            raise MissingField(f"`{param}` is missing. Send an object with `name`.", param=param)
        if tool.function.name in functions:
            raise InvalidRequest(f"`{param}.name`: another tool has the same name. Rename one.", param=f"{param}.name")
        functions[tool.function.name] = _tool(tool.function, raw[at])
    return tuple(functions.values())


def _tool(function: WireFunction, raw: JSONObject) -> Tool:
    extra = inner_extra(raw, _TOOL, "function", _FUNCTION)
    parameters = "{}" if function.parameters is None else canonical_json(function.parameters)
    return Tool(function.name, function.description or "", parameters, function.strict is True, extra)


def _allowed_tools(
    wire: WireAllowedTools | None, tools: tuple[Tool, ...]
) -> tuple[tuple[Tool, ...], str, Literal["auto", "required"]]:
    """Return the allowed tools, the kinds of those that are not functions, and the choice among them."""
    param = "tool_choice.allowed_tools"
    if wire is None:
        raise MissingField(f"`{param}` is missing. Send an object with `mode` and `tools`.", param=param)
    functions = {at: tool.function for at, tool in enumerate(wire.tools) if tool.type == FUNCTION}
    names = {at: None if function is None else function.name for at, function in functions.items()}
    return narrowed_tools(tools, names, f"{param}.tools"), other_kinds(tool.type for tool in wire.tools), wire.mode


def _tool_choice(wire: str | WireChoice | None, tools: tuple[Tool, ...], kinds: str) -> ToolChoice:
    """Return the choice among the tools. `kinds`: the kinds of tools that are not functions."""
    if not isinstance(wire, WireChoice):
        return tool_choice_of(wire, None, "", tools, kinds)
    if wire.type != FUNCTION:
        raise no_such_tools(wire.type)
    name = None if wire.function is None else wire.function.name
    return tool_choice_of(FUNCTION, name, "tool_choice.function.name", tools, kinds)


def _response_format(wire: WireFormat) -> ResponseFormat:
    if wire.type == "json_object" and wire.schema is not None:
        return ResponseFormat("json_schema", "answer", canonical_json(wire.schema))
    if wire.type != "json_schema":
        return ResponseFormat(wire.type)
    schema = wire.json_schema
    if schema is None:
        param = "response_format.json_schema"
        raise MissingField(f"`{param}` is missing. Send an object with `name` and `schema`.", param=param)
    return ResponseFormat(
        "json_schema", schema.name, canonical_json(schema.schema), schema.strict is True, schema.description or ""
    )
