"""Chat messages, tools and formats: from the wire's shapes to the vocabulary, with the rules that types cannot say."""

from __future__ import annotations

from ..errors import InvalidRequest, MissingField, UnsupportedFeature
from ..types import AudioPart, FilePart, ImagePart, Message, Part, ResponseFormat, TextPart, Tool, ToolCall, ToolChoice
from .validation import canonical
from .wire import (
    WireChat,
    WireChoice,
    WireFormat,
    WireImage,
    WireInputAudio,
    WireMessage,
    WirePart,
    WireRefusal,
    WireText,
    WireTool,
)


def messages_of(wire: list[WireMessage]) -> tuple[Message, ...]:
    return tuple([_message(message, at) for at, message in enumerate(wire)])


def _message(wire: WireMessage, at: int) -> Message:
    role, content = wire.role, wire.content
    if (role == "user" or role == "system") and type(content) is str and not wire.tool_calls:
        return Message(role, content, wire.name)  # nearly every message
    path = f"messages[{at}]"
    _check(wire, path)
    if content is None and wire.refusal is not None:
        content = wire.refusal  # an assistant turn that was a refusal reads as its text
    parts = tuple([_part(part) for part in content]) if isinstance(content, list) else content
    calls = tuple([ToolCall(call.id, call.function.name, call.function.arguments) for call in wire.tool_calls or ()])
    return Message(role, parts, wire.name, calls, wire.tool_call_id)


def _check(wire: WireMessage, path: str) -> None:
    role = wire.role
    if wire.function_call is not None:
        raise _legacy("function_call", "tool_calls", f"{path}.function_call")
    if wire.content is None and role != "assistant":
        raise MissingField(f"`{path}.content` is missing. Send the {role} message's text.", param=f"{path}.content")
    if wire.tool_calls and role != "assistant":
        raise InvalidRequest(
            f"`{path}.tool_calls` belongs to an assistant message, this one is from {role}. Remove it.",
            param=f"{path}.tool_calls",
        )
    if role == "tool" and not wire.tool_call_id:
        raise MissingField(
            f"`{path}.tool_call_id` is missing. Send the id of the call that this message answers.",
            param=f"{path}.tool_call_id",
        )
    if role == "function" and not wire.name:
        raise MissingField(f"`{path}.name` is missing. Send the function's name.", param=f"{path}.name")


def _part(wire: WirePart) -> Part:
    if isinstance(wire, WireText):
        return TextPart(wire.text)
    if isinstance(wire, WireRefusal):
        return TextPart(wire.refusal)
    if isinstance(wire, WireImage):
        return ImagePart(wire.image_url.url, wire.image_url.detail or "auto")
    if isinstance(wire, WireInputAudio):
        return AudioPart(wire.input_audio.data, wire.input_audio.format)
    return FilePart(canonical(wire.file))


def refuse_legacy(wire: WireChat) -> None:
    """Functions, the form before tools, and spoken answers: a client that asks for them could not read our answer."""
    if wire.functions is not None:
        raise _legacy("functions", "tools", "functions")
    if wire.function_call is not None:
        raise _legacy("function_call", "tool_choice", "function_call")
    if wire.audio is not None or (wire.modalities is not None and wire.modalities != ["text"]):
        param = "audio" if wire.audio is not None else "modalities"
        raise UnsupportedFeature(f"`{param}`: answers are text only. Remove it.", param=param)


def _legacy(old: str, new: str, param: str) -> InvalidRequest:
    return UnsupportedFeature(f"`{param}`: OpenAI replaced `{old}` by `{new}`. Use `{new}`.", param=param)


def tools_of(wire: list[WireTool]) -> tuple[Tool, ...]:
    """Raises InvalidRequest when two tools share a name: a call could not say which it means."""
    seen: set[str] = set()
    for at, tool in enumerate(wire):
        if tool.function.name in seen:
            param = f"tools[{at}].function.name"
            raise InvalidRequest(f"`{param}`: another tool has the same name. Rename one.", param=param)
        seen.add(tool.function.name)
    return tuple([_tool(tool) for tool in wire])


def _tool(wire: WireTool) -> Tool:
    function = wire.function
    parameters = "{}" if function.parameters is None else canonical(function.parameters)
    return Tool(function.name, function.description or "", parameters, function.strict is True)


def choice_of(wire: str | WireChoice | None, tools: tuple[Tool, ...]) -> ToolChoice:
    if wire is None or wire == "auto":
        return ToolChoice()
    if wire == "none":
        return ToolChoice("none")
    if not tools:
        raise InvalidRequest(
            "`tool_choice` asks for a call, but there are no tools. Send `tools` or remove it.", param="tool_choice"
        )
    if isinstance(wire, str):
        return ToolChoice("required")
    name = wire.function.name
    if all(tool.name != name for tool in tools):
        raise InvalidRequest(
            "`tool_choice.function.name` is not the name of one of `tools`. Name one of them.",
            param="tool_choice.function.name",
        )
    return ToolChoice("function", name)


def format_of(wire: WireFormat) -> ResponseFormat:
    if wire.type != "json_schema":
        return ResponseFormat(wire.type)
    schema = wire.json_schema
    if schema is None:
        param = "response_format.json_schema"
        raise MissingField(f"`{param}` is missing. Send an object with `name` and `schema`.", param=param)
    return ResponseFormat(
        "json_schema", schema.name, canonical(schema.schema), schema.strict is True, schema.description or ""
    )
