"""The parsing of the bodies of `POST /v1/messages` and `/v1/messages/count_tokens` into a `Request`.

tool_use, tool_result      calls of an assistant, and one message of the role tool for each result; `is_error`
                           is told to the model in words
thinking blocks            an assistant's `reasoning_content`, as a chat's client sends it back
thinking.budget_tokens     the greatest effort that stays within the budget; a default of the model without it
documents                  files; plain text becomes one, too
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Final, Literal

import msgspec

from ..documents.data import table_of
from ..errors import InvalidRequest, MissingField, ThreadsUnsupported, UnsupportedFeature
from ..openai.request_body import canonical_json, encode_extra, load, merge_hints, too_deep, tool_choice_of
from ..openai.request_body import validate as convert
from ..openai.wire import Count, Name
from ..reasoning import EFFORT_TOKENS
from ..types import (
    Effort,
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
from .wire import (
    MIN_BUDGET,
    Block,
    WireClientTool,
    WireCountTokens,
    WireDocumentBlock,
    WireImageBlock,
    WireJsonFormat,
    WireMessages,
    WirePlainText,
    WireSpeakerTurn,
    WireTextBlock,
    WireThinking,
    WireThinkingBlock,
    WireToolChoice,
    WireToolResult,
    WireToolUse,
    WireUploaded,
    WireUrl,
)

_NO_SAMPLING: Final = Sampling()
_MODES: Final[Mapping[str, str]] = {"auto": "auto", "any": "required", "tool": "function", "none": "none"}
_ADVICE: Final = table_of(__package__, "advice.json", dict[str, str]) | {
    "budget_tokens": f"Send a whole number of at least {MIN_BUDGET}, below `max_tokens`."
}
_ERROR: Final = "Error: "
"""Before the result of a tool that failed."""
_NO_CITATIONS: Final = "answers here cite nothing. Remove it."
_UNSUPPORTED: Final = {
    "container": "there are no containers here. Remove it.",
    "context_management": "a conversation is never edited here. Send the messages that the model shall see.",
    "diagnostics": "nothing is compared with earlier requests. Remove it.",
    "inference_geo": "the policy or the gateway's grants decide on regions. Remove it.",
    "mcp_servers": "tools run at the client. Offer them in `tools`.",
    "user_profile_id": "there are no user profiles here. Send `metadata.user_id`.",
    "workspace_id": "there are no workspaces here. Remove it.",
}


class MessageTerms(msgspec.Struct, frozen=True):
    """The terms of an answer that its `Request` does not have. `hides_thinking`: whether the texts of thinking blocks
    are left empty (`thinking.display: omitted`).
    """

    hides_thinking: bool = False


_USUAL: Final = MessageTerms()


class _TextTurn(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant"]
    content: str


class _TextTurns(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A conversation of texts alone: it means what `WireMessages` would read, for a third of the time."""

    model: Name
    max_tokens: Count
    messages: Annotated[list[_TextTurn], msgspec.Meta(min_length=1)]
    system: str | None = None
    temperature: Annotated[int, msgspec.Meta(ge=0, le=1)] | Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    stream: bool | None = None


_decode_plain = msgspec.json.Decoder(_TextTurns).decode
_encode = msgspec.json.Encoder().encode


def parse_messages(body: bytes, hints: RoutingHints) -> tuple[Request, MessageTerms]:
    """Parse and validate the body of `POST /v1/messages`, with its headers' hints. InvalidRequest names the key."""
    if (plain := _text_messages(body, hints)) is not None:
        return plain, _USUAL
    try:
        wire = convert(load(body), WireMessages, _ADVICE)
        _check_thinking(wire)
        request = _request(wire, hints)
        asked = wire.temperature, wire.top_p, wire.top_k
        request = msgspec.structs.replace(
            request,
            max_tokens=wire.max_tokens,
            sampling=_NO_SAMPLING if asked == (None, None, None) else Sampling(*asked),
            stop=tuple(wire.stop_sequences or ()),
            stream=wire.stream is True,
            user=None if wire.metadata is None else wire.metadata.user_id,
        )
    except RecursionError:
        raise too_deep() from None
    hidden = wire.thinking is not None and wire.thinking.display == "omitted"
    return request, MessageTerms(hidden) if hidden else _USUAL


def parse_count(body: bytes, hints: RoutingHints) -> Request:
    """Parse and validate the body of `POST /v1/messages/count_tokens`; arguments and errors as for `parse_messages`."""
    try:
        return _request(convert(load(body), WireCountTokens, _ADVICE), hints)
    except RecursionError:
        raise too_deep() from None


def _text_messages(body: bytes, hints: RoutingHints) -> Request | None:
    """Parse a conversation of texts alone; None for any other body, and for one that may be wrong."""
    try:
        wire = _decode_plain(body)
        # A repeated key, a null or another spelling makes the lengths differ, and takes the exact check.
        if len(_encode(wire)) != len(msgspec.json.format(body, indent=-1)) or wire.messages[-1].role != "user":
            return None
    except (ValueError, RecursionError):
        return None
    messages = [Message(message.role, message.content) for message in wire.messages]
    if wire.system:
        messages.insert(0, Message("system", wire.system))
    return Request(
        kind="chat",
        model=wire.model,
        messages=tuple(messages),
        max_tokens=wire.max_tokens,
        sampling=_NO_SAMPLING if wire.temperature is None else Sampling(float(wire.temperature)),
        stream=wire.stream is True,
        hints=hints,
    )


def _request(wire: WireCountTokens, hints: RoutingHints) -> Request:
    for name, reason in _UNSUPPORTED.items():
        _refuse(getattr(wire, name), name, reason)
    if wire.thread not in (None, False):
        raise ThreadsUnsupported(
            "`thread` is not supported, because this server does not keep conversations. Send all messages.",
            param="thread",
        )
    if wire.messages[-1].role == "assistant":
        message = "an answer cannot continue a last message of the assistant (prefill). End with one of the user."
        raise UnsupportedFeature(f"`messages`: {message}", param="messages")
    tools = _tools(wire.tools or ())
    choice = wire.tool_choice
    messages = [*_system(wire.system), *(found for at, one in enumerate(wire.messages) for found in _messages(one, at))]
    return Request(
        kind="chat",
        model=wire.model,
        messages=tuple(messages),
        tools=tools,
        tool_choice=_tool_choice(choice, tools),
        parallel_tool_calls=choice is None or choice.disable_parallel_tool_use is not True,
        response_format=_response_format(wire),
        reasoning_effort=_effort(wire),
        hints=merge_hints(hints, wire.causeway),
    )


def _refuse(value: object, param: str, reason: str) -> None:
    """Refuse a field that is set. Raises UnsupportedFeature."""
    if value is not None:
        raise UnsupportedFeature(f"`{param}`: {reason}", param=param)


# --- messages and blocks ---------------------------------------------------------------------------------------------


def _system(wire: str | list[WireTextBlock] | None) -> Iterator[Message]:
    if isinstance(wire, str):
        if wire:
            yield Message("system", wire)
    elif wire:
        yield Message("system", _content([_part(block, f"system[{at}]") for at, block in enumerate(wire)]))


def _messages(wire: WireSpeakerTurn, at: int) -> Iterator[Message]:
    """Yield the messages that a message stands for: one for each result of a tool, then the rest."""
    if isinstance(wire.content, str):
        yield Message(wire.role, wire.content)
        return
    parts: list[Part] = []
    calls: list[ToolCall] = []
    thoughts: list[str] = []
    begun = False
    for index, block in enumerate(wire.content):
        path = f"messages[{at}].content[{index}]"
        _check_place(wire.role, block, path)
        if isinstance(block, WireToolResult):
            if begun:
                message = f"`{path}`: results come before a message's other blocks. Move it to the beginning."
                raise InvalidRequest(message, param=path)
            yield _result(block, path)
            continue
        begun = True
        if isinstance(block, WireToolUse):
            calls.append(ToolCall(block.id, block.name, canonical_json(block.input)))
        elif isinstance(block, WireThinkingBlock):
            thoughts.append(block.thinking)
        else:
            parts.append(_part(block, path))
    if begun:
        extra = encode_extra({"reasoning_content": thought}) if (thought := "\n".join(filter(None, thoughts))) else ""
        yield Message(wire.role, _content(parts), tool_calls=tuple(calls), extra=extra)


def _check_place(role: str, block: Block, path: str) -> None:
    """Refuse a block in a message of the wrong role. Raises InvalidRequest."""
    if isinstance(block, WireTextBlock):
        return
    owner = "assistant" if isinstance(block, WireToolUse | WireThinkingBlock) else "user"
    if role != owner:
        kind = block.__struct_config__.tag
        raise InvalidRequest(f"`{path}`: a block of type {kind} belongs to the {owner}'s messages.", param=path)


def _result(block: WireToolResult, path: str) -> Message:
    content: str | tuple[Part, ...]
    if block.content is None or isinstance(block.content, str):
        content = block.content or ""
    else:
        content = _content([_part(part, f"{path}.content[{at}]") for at, part in enumerate(block.content)]) or ""
    if block.is_error:
        content = f"{_ERROR}{content}" if isinstance(content, str) else (TextPart(_ERROR), *content)
    return Message("tool", content, tool_call_id=block.tool_use_id)


def _content(parts: list[Part]) -> str | tuple[Part, ...] | None:
    """Return texts as one text, which every target takes, and parts of several kinds as they are; None for none."""
    texts = [part.text for part in parts if isinstance(part, TextPart)]
    if len(texts) < len(parts):
        return tuple(parts)
    return "\n".join(texts) if texts else None


def _part(block: WireTextBlock | WireImageBlock | WireDocumentBlock, path: str) -> Part:
    if isinstance(block, WireTextBlock):
        if block.citations:
            raise UnsupportedFeature(f"`{path}.citations`: {_NO_CITATIONS}", param=f"{path}.citations")
        return TextPart(block.text)
    return _image(block, path) if isinstance(block, WireImageBlock) else _document(block, path)


def _image(block: WireImageBlock, path: str) -> ImagePart:
    _refuse(block.transformations, f"{path}.transformations", "images reach the model as they are. Remove it.")
    match block.source:
        case WireUploaded(file_id=url) | WireUrl(url=url):
            return ImagePart(url)
        case source:
            return ImagePart(_data_url(source.media_type, source.data))


def _document(block: WireDocumentBlock, path: str) -> FilePart:
    _refuse(block.context, f"{path}.context", "send it as a text block before the document.")
    if block.citations not in (None, {}, {"enabled": False}):
        raise UnsupportedFeature(f"`{path}.citations`: {_NO_CITATIONS}", param=f"{path}.citations")
    match block.source:
        case WireUploaded(file_id=name):
            file = {"file_id": name}
        case WirePlainText(data=text, media_type=kind):
            file = {"file_data": _data_url(kind, base64.b64encode(text.encode()).decode())}
        case source:
            file = {"file_data": _data_url(source.media_type, source.data)}
    return FilePart(canonical_json(file | ({"filename": block.title} if block.title else {})))


def _data_url(media_type: str, encoded: str) -> str:
    return f"data:{media_type};base64,{encoded}"


# --- tools, thinking and format --------------------------------------------------------------------------------------


def _tools(wire: Sequence[WireClientTool]) -> tuple[Tool, ...]:
    """Return the tools. Raises InvalidRequest if two share a name, because a call would be ambiguous."""
    tools: dict[str, Tool] = {}
    for at, tool in enumerate(wire):
        param = f"tools[{at}]"
        _refuse(tool.input_examples, f"{param}.input_examples", "models get none. Put them into `description`.")
        if tool.name in tools:
            message = f"`{param}.name`: another tool has the same name. Rename one."
            raise InvalidRequest(message, param=f"{param}.name")
        schema = canonical_json(tool.input_schema)
        tools[tool.name] = Tool(tool.name, tool.description or "", schema, tool.strict is True)
    return tuple(tools.values())


def _tool_choice(wire: WireToolChoice | None, tools: Sequence[Tool]) -> ToolChoice:
    if wire is None:
        return ToolChoice()
    if wire.type != "tool":
        _refuse(wire.name, "tool_choice.name", "only a choice of type tool has a name. Remove it.")
    return tool_choice_of(_MODES[wire.type], wire.name, "tool_choice.name", tools, "")


def _check_thinking(wire: WireMessages) -> None:
    """Check the budget of thinking against the answer's limit. Raises InvalidRequest."""
    budget = None if wire.thinking is None else wire.thinking.budget_tokens
    if budget is not None and budget >= wire.max_tokens:
        param = "thinking.budget_tokens"
        raise InvalidRequest(f"`{param}` must be below `max_tokens`, which is {wire.max_tokens}.", param=param)


def _effort(wire: WireCountTokens) -> Effort | None:
    thinking = wire.thinking or WireThinking("adaptive")
    if thinking.type == "disabled":
        return "none"
    if thinking.type == "adaptive":
        _refuse(thinking.budget_tokens, "thinking.budget_tokens", "only thinking of type enabled has one. Remove it.")
        effort = None if wire.output_config is None else wire.output_config.effort
        return "xhigh" if effort == "max" else effort
    budget = thinking.budget_tokens
    if budget is None:
        param = "thinking.budget_tokens"
        raise MissingField(f"`{param}` is missing. {_ADVICE['budget_tokens']}", param=param)
    within = [effort for effort, tokens in EFFORT_TOKENS.items() if tokens is not None and tokens <= budget]
    return within[-1]


def _response_format(wire: WireCountTokens) -> ResponseFormat | None:
    newer: WireJsonFormat | None = None if wire.output_config is None else wire.output_config.format
    form = wire.output_format if newer is None else newer
    return None if form is None else ResponseFormat("json_schema", "answer", canonical_json(form.schema), strict=True)
