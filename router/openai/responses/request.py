"""The parsing of the body of `POST /v1/responses` into a `Request`, and the fields that the answer repeats."""

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
    Prefer,
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
    merge_hints,
    narrowed_tools,
    no_such_tools,
    other_kinds,
    too_deep,
    tool_choice_of,
    validate,
)
from ..wire import (
    Alternatives,
    Count,
    Name,
    WireEmbedding,
    WireGeneration,
    WireInputAudio,
    WireRefusal,
    WireRoutingHints,
)
from .compaction import COMPACT, compaction_request, open_compaction


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
    file_url: str | None = None  # refused with an explanation


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


class WireCompactionItem(msgspec.Struct, tag_field="type", tag="compaction"):
    """A summary of earlier turns (`compaction`)."""

    encrypted_content: str


WireItem = WireMessageItem | WireCallItem | WireCallOutputItem | WireReasoningItem | WireCompactionItem


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
    verbosity: Literal["low", "medium", "high"] | None = None  # medium is the default, the others are refused


class WireReasoning(msgspec.Struct):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None  # auto lets the model decide, the others are refused


class WireConversationId(msgspec.Struct):
    id: str


class WireTurn(msgspec.Struct, frozen=True):
    """The fields that the answer of a response in the background repeats, and its id."""

    id: str
    fields: dict[str, object]


class WireResponseStreamOptions(msgspec.Struct):
    include_obfuscation: bool | None = None


_Key = Annotated[str, Meta(max_length=64)]


@described
class WireResponse(WireGeneration, kw_only=True):
    input: str | Annotated[list[WireItem], Meta(min_length=1)] | None = None
    stream_options: WireResponseStreamOptions | None = None  # type: ignore[assignment]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: list[WireFunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | WireFunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: WireTextConfig | None = None
    top_logprobs: Alternatives | None = None
    include: list[str] | None = None
    metadata: Annotated[dict[_Key, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)] | None = None
    max_tool_calls: Annotated[int, Meta(ge=1)] | None = None
    reasoning: WireReasoning | None = None
    # State: resolved before this body is parsed (`state`), and refused where nothing is stored.
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: str | WireConversationId | None = None
    background: bool | None = None
    stored_turn: WireTurn | None = None  # of a job, written by the server alone
    # Refused with an explanation.
    prompt: object = None
    context_management: object = None
    truncation: Literal["auto", "disabled"] | None = None
    # Accepted and repeated in the answer; not passed on, since prefixes are reused anyway, and no tier is bought.
    service_tier: str | None = None
    safety_identifier: _Key | None = None
    prompt_cache_key: _Key | None = None
    prompt_cache_retention: str | None = None


_FIELDS: Final = frozenset(WireResponse.__struct_fields__)
RESPONSE_ONLY: Final = _FIELDS - frozenset(WireEmbedding.__struct_fields__) - {"prompt"}
"""Keys that distinguish a request for a response from one for embeddings, which also has `input`."""
_LOGPROBS: Final = "message.output_text.logprobs"
ENCRYPTED: Final = "reasoning.encrypted_content"
_NAMES_STORED: Final = ("previous_response_id", "conversation", "prompt")
_WHOLE: Final = "Send the whole conversation as `input`."


class ResponseEcho(msgspec.Struct, frozen=True):
    """Fields of the body that the answer repeats, as JSON text of an object. `id`: the answer's; "": that of its
    request. `encrypts`: whether reasoning items have their text as `encrypted_content`, too. `compacts`: whether the
    answer is a compacted response.
    """

    fields: str
    id: str = ""
    encrypts: bool = False
    compacts: bool = False


def parse_response(body: bytes, hints: RoutingHints) -> tuple[Request, ResponseEcho]:
    """Parse a request for a response, a chat, with its headers' hints; return it with the fields that its answer
    repeats. InvalidRequest names the wrong key.
    """
    return parse_document(load(body), hints)


def parse_compaction(body: bytes, hints: RoutingHints) -> tuple[Request, ResponseEcho]:
    """Parse a request for a compacted response as `parse_response` does, where nothing is stored."""
    request, echo = parse_response(compaction_request(body), hints)
    return request, msgspec.structs.replace(echo, compacts=True)


def parse_document(
    document: JSONObject, hints: RoutingHints, *, wire: WireResponse | None = None
) -> tuple[Request, ResponseEcho]:
    """Parse a decoded body as `parse_response` does. `wire`: the body if it was validated already."""
    try:
        wire = validate(with_item_types(document), WireResponse) if wire is None else wire
        _refuse(wire)
        tools = _tools(wire.tools or [])
        kinds = other_kinds([tool.type for tool in wire.tools or ()])
        choice: str | WireFunctionChoice | None = wire.tool_choice
        if isinstance(choice, WireFunctionChoice) and choice.type == ALLOWED_TOOLS:
            tools, kinds, choice = _allowed_tools(choice, tools)
        system = (Message("system", wire.instructions),) if wire.instructions else ()
        items = [WireMessageItem("user", wire.input)] if isinstance(wire.input, str) else wire.input or []
        messages = (*system, *_messages(items))
        if len(messages) == len(system):
            raise MissingField("`input` has no message. Send a string or a list with a message.", param="input")
        wants_logprobs = wire.top_logprobs or _LOGPROBS in (wire.include or ())
        request = Request(
            kind="chat",
            messages=messages,
            max_tokens=wire.max_output_tokens,
            limit_name="max_completion_tokens",
            tools=tools,
            tool_choice=_tool_choice(choice, tools, kinds),
            parallel_tool_calls=wire.parallel_tool_calls is not False and wire.max_tool_calls is None,
            response_format=_response_format(None if wire.text is None else wire.text.format),
            logprobs=(wire.top_logprobs or 0) if wants_logprobs else None,
            reasoning_effort=None if wire.reasoning is None else wire.reasoning.effort,
            **generation_fields(wire, document, _FIELDS, _bound(hints, items)),
        )
    except RecursionError:
        raise too_deep() from None
    turn, echo = wire.stored_turn, _echo(wire)
    return request, echo if turn is None else ResponseEcho(canonical_json(turn.fields), turn.id, echo.encrypts)


def _bound(hints: RoutingHints, items: Sequence[WireItem]) -> RoutingHints:
    """Return the hints with what binds the turns that a compaction item of the input stands for."""
    for item in items:
        if isinstance(item, WireCompactionItem):
            compacted = open_compaction(item.encrypted_content)
            prefer: Prefer | None = "only_on_device" if compacted.private else None
            hints = merge_hints(hints, WireRoutingHints(prefer=prefer, tags=list(compacted.tags)))
    return hints


def with_item_types(document: JSONObject) -> JSONObject:
    """Give input items without a type the type message, as OpenAI's API does."""
    items = document.get("input")
    if not isinstance(items, list):
        return document
    return {**document, "input": [_typed(i) if isinstance(i, dict) else i for i in items]}


def _typed(item: JSONObject) -> JSONObject:
    kind = "item_reference" if item.keys() <= {"id", "type"} else "message"
    return {**item, "type": kind} if item.get("type") is None else item


def _refuse(wire: WireResponse) -> None:
    """Refuse fields that need stored responses, or that no target honours."""
    for at, name in enumerate(wire.include or ()):
        if name not in (_LOGPROBS, ENCRYPTED):
            message = f"`include[{at}]`: {name[:80]!r} is not known here. Use {_LOGPROBS} or {ENCRYPTED}."
            raise UnsupportedFeature(message, param=f"include[{at}]")
    for param, is_refused, advice in (
        ("text.verbosity", wire.text and wire.text.verbosity in ("low", "high"), "Ask for it in `instructions`."),
        ("reasoning.summary", wire.reasoning and wire.reasoning.summary not in (None, "auto"), "Send auto."),
        ("stream_options.include_obfuscation", wire.stream_options and wire.stream_options.include_obfuscation, ""),
        ("max_tool_calls", (wire.max_tool_calls or 1) > 1, "Send 1, or limit the calls where the tools run."),
        ("context_management", wire.context_management is not None, "Compact with `POST /v1/responses/compact`."),
        *((name, getattr(wire, name) is not None, _WHOLE) for name in _NAMES_STORED),
        ("background", wire.background, "Answers are not stored. Use `stream`, or a job."),
        ("truncation", wire.truncation == "auto", "Send `disabled`, or leave it out: a long conversation is refused."),
    ):
        if is_refused:
            raise UnsupportedFeature(f"`{param}`: this server cannot do that. {advice or 'Leave it out.'}", param=param)
    if (wire.n or 1) != 1:
        raise InvalidRequest("`n`: a response has only one answer. Remove `n`.", param="n")


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
            case WireCompactionItem():
                messages += (
                    Message("user", COMPACT),
                    Message("assistant", open_compaction(item.encrypted_content).summary),
                )
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
    if part.file_url is not None:
        message = "`input`: an `input_file` has a `file_url`, which is not fetched. Send `file_data` or `file_id`."
        raise UnsupportedFeature(message, param="input")
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
    if wire.tools is None:
        raise MissingField(
            "`tool_choice.tools` is missing. List the tools that may be called.", param="tool_choice.tools"
        )
    names = {at: tool.name for at, tool in enumerate(wire.tools) if tool.type == FUNCTION}
    return (
        narrowed_tools(tools, names, "tool_choice.tools"),
        other_kinds(tool.type for tool in wire.tools),
        wire.mode or "auto",
    )


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
    form, reasoning = None if wire.text is None else wire.text.format, wire.reasoning
    choice: object = "auto" if wire.tool_choice is None else wire.tool_choice
    if isinstance(choice, WireFunctionChoice) and choice.type == ALLOWED_TOOLS:
        choice = msgspec.structs.replace(choice, mode=choice.mode or "auto")
    schema: dict[str, object] = {"description": None, "strict": False} if form and form.type == "json_schema" else {}
    return ResponseEcho(
        canonical_json(
            {
                "background": False,
                "frequency_penalty": wire.frequency_penalty or 0,
                "instructions": wire.instructions,
                "max_output_tokens": wire.max_output_tokens,
                "max_tool_calls": wire.max_tool_calls,
                "metadata": wire.metadata or {},
                "parallel_tool_calls": wire.parallel_tool_calls is not False,
                "presence_penalty": wire.presence_penalty or 0,
                "previous_response_id": None,
                "prompt_cache_key": wire.prompt_cache_key,
                "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
                "safety_identifier": wire.safety_identifier,
                "service_tier": "default",
                "store": False,
                "temperature": 1.0 if wire.temperature is None else wire.temperature,
                "text": {"format": {"type": "text"} if form is None else {**schema, **_without_none(form)}},
                "tool_choice": choice,
                "tools": [{**_TOOL, **_without_none(tool)} for tool in wire.tools or ()],
                "top_logprobs": wire.top_logprobs or 0,
                "top_p": 1.0 if wire.top_p is None else wire.top_p,
                "truncation": "disabled",
                "user": wire.user,
            }
        ),
        encrypts=ENCRYPTED in (wire.include or ()),
    )


_TOOL: Final = dict.fromkeys(("description", "parameters", "strict"))


def _without_none(struct: msgspec.Struct) -> dict[str, object]:
    return {name: value for name, value in msgspec.structs.asdict(struct).items() if value not in (None, "")}
