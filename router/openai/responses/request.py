"""The parsing of the body of `POST /v1/responses` into a `Request`, and the fields of the body that the answer
repeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from ...described import described
from ...errors import InvalidRequest, MissingField, UnsupportedFeature
from ...types import (
    AudioPart,
    Effort,
    FilePart,
    ImagePart,
    Message,
    Part,
    Request,
    ResponseFormat,
    RoutingHints,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
)
from ..request_body import (
    ALLOWED_TOOLS,
    FUNCTION,
    JSONObject,
    canonical_json,
    generation_fields,
    load,
    narrowed_tools,
    no_such_tools,
    other_kinds,
    too_deep,
    tool_choice_of,
    validate,
)
from ..wire import Alternatives, Count, Name, WireEmbedding, WireGeneration, WireInputAudio, WireRefusal


class WireInputText(msgspec.Struct, tag_field="type", tag="input_text"):
    text: str


class WireOutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str


class WireInputImage(msgspec.Struct, tag_field="type", tag="input_image"):
    image_url: str | None = None
    file_id: str | None = None
    detail: Literal["auto", "low", "high"] | None = None


class WireInputFile(msgspec.Struct, tag_field="type", tag="input_file"):
    filename: str | None = None
    file_data: str | None = None
    file_id: str | None = None


WireContent = WireInputText | WireOutputText | WireRefusal | WireInputImage | WireInputAudio | WireInputFile


class WireMessageItem(msgspec.Struct, tag_field="type", tag="message"):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[WireContent], Meta(min_length=1)]


class WireCallItem(msgspec.Struct, tag_field="type", tag="function_call"):
    call_id: str
    name: Name
    arguments: str


class WireCallOutputItem(msgspec.Struct, tag_field="type", tag="function_call_output"):
    call_id: str
    output: str | Annotated[list[WireContent], Meta(min_length=1)]


class WireReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    """The reasoning of an earlier turn. It is dropped, because models are not shown their earlier reasoning."""


WireItem = WireMessageItem | WireCallItem | WireCallOutputItem | WireReasoningItem


class WireFunctionTool(msgspec.Struct):
    """A tool. Only tools of type function need a name and are offered to the model."""

    type: str
    name: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class WireAllowedFunction(msgspec.Struct, omit_defaults=True):
    type: str
    name: str | None = None


class WireFunctionChoice(msgspec.Struct, omit_defaults=True):
    """The function to call, or, with the type allowed_tools, the tools that may be called."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[WireAllowedFunction] | None = None


class WireTextFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    name: str = ""
    schema: dict[str, object] | None = None
    strict: bool | None = None
    description: str | None = None


class WireTextConfig(msgspec.Struct):
    format: WireTextFormat | None = None


class WireReasoning(msgspec.Struct):
    effort: Effort | None = None


class WireConversationId(msgspec.Struct):
    id: str


class WireTurn(msgspec.Struct, frozen=True):
    """The fields that the answer of a response in the background repeats, and its id."""

    id: str
    fields: dict[str, object]


@described
class WireResponse(WireGeneration, kw_only=True):
    input: str | Annotated[list[WireItem], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: list[WireFunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | WireFunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: WireTextConfig | None = None
    top_logprobs: Alternatives | None = None
    include: list[str] | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
    reasoning: WireReasoning | None = None
    # State: resolved before this body is parsed (`state`), and refused where nothing is stored.
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: str | WireConversationId | None = None
    background: bool | None = None
    stored_turn: WireTurn | None = None  # of a job, written by the server alone
    prompt: object = None  # refused with an explanation
    truncation: Literal["auto", "disabled"] | None = None
    # Accepted without effect, and not passed on.
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    max_tool_calls: int | None = None


_FIELDS: Final = frozenset(WireResponse.__struct_fields__)
RESPONSE_ONLY: Final = _FIELDS - frozenset(WireEmbedding.__struct_fields__) - {"prompt"}
"""Keys that distinguish a request for a response from one for embeddings, which also has `input`."""
_LOGPROBS: Final = "message.output_text.logprobs"
_NOT_STORED: Final = "This request cannot name stored responses. Send the whole conversation as `input`."


class ResponseEcho(msgspec.Struct, frozen=True):
    """Fields of the body that the answer repeats, as JSON text of an object. `id`: the answer's; "": that of its
    request.
    """

    fields: str
    id: str = ""


def parse_response(body: bytes, hints: RoutingHints, *, resumes: bool = False) -> tuple[Request, ResponseEcho]:
    """Parse and validate a request for a response.

    Args:
        hints: The routing hints from the request's headers.
        resumes: Whether this server can continue an answer that was cut short; if not, `causeway.continue` is refused.

    Returns:
        The request, which is a chat, and the fields that its answer repeats.

    Raises:
        InvalidRequest: Names the key that is wrong.
    """
    try:
        document = load(body)
        wire = validate(with_item_types(document), WireResponse)
        _refuse_state(wire)
        tools = _tools(wire.tools or [])
        kinds = other_kinds([tool.type for tool in wire.tools or ()])
        choice: str | WireFunctionChoice | None = wire.tool_choice
        if isinstance(choice, WireFunctionChoice) and choice.type == ALLOWED_TOOLS:
            tools, kinds, choice = _allowed_tools(choice, tools)
        system = (Message("system", wire.instructions),) if wire.instructions else ()
        items = [WireMessageItem("user", wire.input)] if isinstance(wire.input, str) else wire.input
        messages = (*system, *_messages(items))
        if len(messages) == len(system):
            raise MissingField("`input` has no message. Send a string or a list with a message.", param="input")
        request = Request(
            kind="chat",
            messages=messages,
            max_tokens=wire.max_output_tokens,
            limit_name="max_completion_tokens",
            tools=tools,
            tool_choice=_tool_choice(choice, tools, kinds),
            parallel_tool_calls=wire.parallel_tool_calls is not False,
            response_format=_response_format(None if wire.text is None else wire.text.format),
            logprobs=(wire.top_logprobs or 0) if _LOGPROBS in (wire.include or ()) else None,
            reasoning_effort=None if wire.reasoning is None else wire.reasoning.effort,
            **generation_fields(wire, document, _FIELDS, hints, resumes=resumes),
        )
    except RecursionError:
        raise too_deep() from None
    turn = wire.stored_turn
    return request, _echo(wire) if turn is None else ResponseEcho(canonical_json(turn.fields), turn.id)


def with_item_types(document: JSONObject) -> JSONObject:
    """Give input items without a type the type message, as OpenAI's API does."""
    items = document.get("input")
    if not isinstance(items, list):
        return document
    return {**document, "input": [{"type": "message", **i} if isinstance(i, dict) else i for i in items]}


def _refuse_state(wire: WireResponse) -> None:
    """Refuse fields that need stored responses, or that would change the conversation silently."""
    for name in ("previous_response_id", "conversation", "prompt"):
        if getattr(wire, name) is not None:
            raise UnsupportedFeature(f"`{name}`: {_NOT_STORED}", param=name)
    if wire.background:
        raise UnsupportedFeature("`background`: answers are not stored. Use `stream`, or a job.", param="background")
    if wire.truncation == "auto":
        raise UnsupportedFeature(
            (
                "`truncation`: a conversation that is too long is refused, not shortened. Send `disabled`, "
                "or leave it out."
            ),
            param="truncation",
        )
    if (wire.n or 1) != 1:
        raise InvalidRequest("`n`: a response has only one answer. Remove it.", param="n")


def _messages(items: Sequence[WireItem]) -> list[Message]:
    """Translate the items to messages; an assistant's text and the calls right after it form one message."""
    messages: list[Message] = []
    for item in items:
        match item:
            case WireMessageItem():
                messages.append(Message(item.role, _content(item.content)))
            case WireCallItem():
                call = ToolCall(item.call_id, item.name, item.arguments)
                last = messages.pop() if messages and messages[-1].role == "assistant" else Message("assistant")
                messages.append(msgspec.structs.replace(last, tool_calls=(*last.tool_calls, call)))
            case WireCallOutputItem():
                messages.append(Message("tool", _content(item.output), tool_call_id=item.call_id))
            case WireReasoningItem():
                pass
    return messages


def _content(content: str | list[WireContent]) -> str | tuple[Part, ...]:
    if isinstance(content, str):
        return content
    parts = tuple([_part(part) for part in content])
    alone = parts[0] if len(parts) == 1 else None
    return alone.text if isinstance(alone, TextPart) else parts  # a text alone is the same as a string


def _part(part: WireContent) -> Part:
    if isinstance(part, WireInputImage):
        url = part.image_url or part.file_id
        if not url:
            raise MissingField("`input`: an `input_image` has no `image_url`. Send a data: URL.", param="input")
        return ImagePart(url, part.detail or "auto")
    if isinstance(part, WireInputAudio):
        return AudioPart(part.input_audio.data, part.input_audio.format)
    if isinstance(part, WireRefusal):
        return TextPart(part.refusal)
    if hasattr(part, "text"):
        return TextPart(part.text)
    fields = {name: value for name, value in msgspec.structs.asdict(part).items() if value is not None}
    return FilePart(canonical_json(fields))


def _tools(wire: list[WireFunctionTool]) -> tuple[Tool, ...]:
    """Return the tools. Raises InvalidRequest if two share a name, because a call would be ambiguous."""
    tools: dict[str, Tool] = {}
    for at, tool in enumerate(wire):
        if tool.type != FUNCTION:
            continue
        param = f"tools[{at}].name"
        if tool.name is None:
            raise MissingField(f"`{param}` is missing. Send the function's name.", param=param)
        if tool.name in tools:
            raise InvalidRequest(f"`{param}`: another tool has the same name. Rename one.", param=param)
        parameters = "{}" if tool.parameters is None else canonical_json(tool.parameters)
        tools[tool.name] = Tool(tool.name, tool.description or "", parameters, tool.strict is True)
    return tuple(tools.values())


def _allowed_tools(
    wire: WireFunctionChoice, tools: tuple[Tool, ...]
) -> tuple[tuple[Tool, ...], str, Literal["auto", "required"]]:
    """Return the allowed tools, the kinds of those that are not functions, and the choice among them."""
    if wire.mode is None or wire.tools is None:
        param = "tool_choice.mode" if wire.mode is None else "tool_choice.tools"
        raise MissingField(f"`{param}` is missing. Send `mode` and `tools`.", param=param)
    names = {at: tool.name for at, tool in enumerate(wire.tools) if tool.type == FUNCTION}
    return narrowed_tools(tools, names, "tool_choice.tools"), other_kinds(tool.type for tool in wire.tools), wire.mode


def _tool_choice(wire: str | WireFunctionChoice | None, tools: tuple[Tool, ...], kinds: str) -> ToolChoice:
    """Return the choice among the tools. `kinds`: the kinds of tools that are not functions."""
    if not isinstance(wire, WireFunctionChoice):
        return tool_choice_of(wire, None, "", tools, kinds)
    if wire.type != FUNCTION:
        raise no_such_tools(wire.type)
    return tool_choice_of(FUNCTION, wire.name or "", "tool_choice.name", tools, kinds)


def _response_format(wire: WireTextFormat | None) -> ResponseFormat | None:
    if wire is None or wire.type == "text":  # the default of every response
        return None
    if wire.type == "json_object":
        return ResponseFormat("json_object")
    if wire.schema is None:
        raise MissingField("`text.format.schema` is missing. Send a JSON schema.", param="text.format.schema")
    schema = canonical_json(wire.schema)
    return ResponseFormat("json_schema", wire.name, schema, wire.strict is True, wire.description or "")


def _echo(wire: WireResponse) -> ResponseEcho:
    form = None if wire.text is None else wire.text.format
    return ResponseEcho(
        canonical_json(
            {
                "background": False,
                "instructions": wire.instructions,
                "max_output_tokens": wire.max_output_tokens,
                "max_tool_calls": wire.max_tool_calls,
                "metadata": wire.metadata or {},
                "parallel_tool_calls": wire.parallel_tool_calls is not False,
                "previous_response_id": None,
                "reasoning": {"effort": None if wire.reasoning is None else wire.reasoning.effort, "summary": None},
                "service_tier": "default",
                "store": False,
                "temperature": wire.temperature,
                "text": {"format": {"type": "text"} if form is None else _without_none(form)},
                "tool_choice": "auto" if wire.tool_choice is None else wire.tool_choice,
                "tools": [{"parameters": None, "strict": None, **_without_none(tool)} for tool in wire.tools or ()],
                "top_logprobs": wire.top_logprobs or 0,
                "top_p": wire.top_p,
                "truncation": "disabled",
                "user": wire.user,
            }
        )
    )


def _without_none(struct: msgspec.Struct) -> dict[str, object]:
    return {name: value for name, value in msgspec.structs.asdict(struct).items() if value not in (None, "")}
