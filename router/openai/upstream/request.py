"""Request → the body for an OpenAI-compatible server. Routing hints are never sent.

The sampling extensions have vLLM's names. A stream always requests its usage, which is counted and billed, whatever the
client requests, unless the server is known to refuse that. Fields of messages, parts, tools and calls that we do not
interpret are sent as they came.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw

from ...types import AudioPart, FilePart, ImagePart, Message, Part, Request, TextPart, Tool, ToolCall
from ..request_body import with_extra
from ..wire import (
    WireAudio,
    WireChoice,
    WireFunctionCall,
    WireImage,
    WireImageUrl,
    WireInputAudio,
    WireNamed,
    WireText,
    WireToolCall,
)

_ENCODER = msgspec.json.Encoder()
_USAGE = {"include_usage": True}


class _File(msgspec.Struct, tag_field="type", tag="file"):
    file: Raw  # already JSON


_Part = WireText | WireImage | WireInputAudio | _File


class _UpstreamMessage(msgspec.Struct, omit_defaults=True):
    role: str
    content: str | list[_Part | Raw] | None
    name: str | None = None
    tool_calls: list[WireToolCall | Raw] | None = None
    tool_call_id: str | None = None


class _UpstreamFunction(msgspec.Struct, omit_defaults=True):
    name: str
    description: str = ""
    parameters: Raw | None = None
    strict: bool = False


class _Tool(msgspec.Struct):
    function: _UpstreamFunction
    type: str = "function"


class _Schema(msgspec.Struct, omit_defaults=True):
    schema: Raw
    name: str = ""
    strict: bool = False
    description: str = ""


class _Format(msgspec.Struct, omit_defaults=True):
    type: str
    json_schema: _Schema | None = None


class _Body(msgspec.Struct, omit_defaults=True, kw_only=True):
    model: str
    messages: list[_UpstreamMessage | Raw] | None = None
    prompt: object = None
    input: object = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[int, float] | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    stream: bool = False
    stream_options: dict[str, bool] | None = None
    tools: list[_Tool | Raw] | None = None
    tool_choice: str | WireChoice | None = None
    parallel_tool_calls: bool = True
    response_format: _Format | None = None
    logprobs: bool | int | None = None
    top_logprobs: int = 0
    echo: bool = False
    suffix: str | None = None
    dimensions: int | None = None
    reasoning_effort: str | None = None
    user: str | None = None
    causeway: dict[str, str] | None = None


def encode_request(
    request: Request, model: str, *, stream: bool | None = None, resume: str = "", ask_usage: bool = True
) -> bytes:
    """Encode the body of the upstream request.

    Args:
        model: the model's name at the server.
        stream: None means as the client requests it.
        resume: the server's continue token, for the rest of an answer that it cut short.
        ask_usage: send `stream_options`, which some servers refuse.
    """
    if request.kind == "embedding":
        # Vectors are always requested as numbers: base64 is specific to OpenAI, and we encode it ourselves.
        body = _Body(model=model, input=_prompts(request), dimensions=request.dimensions, user=request.user)
    else:
        body = _generation(request, model, request.stream if stream is None else stream, ask_usage)
        body.causeway = {"continue": resume} if resume else None
    encoded = _ENCODER.encode(body)
    if not request.extra or request.extra == "{}":
        return encoded
    return encoded[:-1] + b"," + request.extra[1:].encode()


def _generation(request: Request, model: str, stream: bool, ask_usage: bool) -> _Body:
    sampling = request.sampling
    body = _Body(
        model=model,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repeat_penalty,
        seed=sampling.seed,
        logit_bias=dict(sampling.logit_bias) if sampling.logit_bias else None,
        stop=request.stop,
        n=request.n,
        stream=stream,
        stream_options=_USAGE if stream and ask_usage else None,
        user=request.user,
    )
    if request.limit_name == "max_tokens":
        body.max_tokens = request.max_tokens
    else:
        body.max_completion_tokens = request.max_tokens
    if request.kind == "chat":
        _chat(body, request)
    else:
        _completion(body, request)
    return body


def _chat(body: _Body, request: Request) -> None:
    body.messages = [_message(message) for message in request.messages]
    if request.tools:
        body.tools = [_tool(tool) for tool in request.tools]
        body.parallel_tool_calls = request.parallel_tool_calls
        choice = request.tool_choice
        if choice.mode == "function":
            body.tool_choice = WireChoice("function", WireNamed(choice.name or ""))
        elif choice.mode != "auto":
            body.tool_choice = choice.mode
    body.reasoning_effort = request.reasoning_effort
    requested = request.response_format
    if requested is not None:
        schema = _Schema(Raw(requested.schema.encode()), requested.name, requested.strict, requested.description)
        body.response_format = _Format(requested.kind, schema if requested.kind == "json_schema" else None)
    if request.logprobs is not None:
        body.logprobs = True
        body.top_logprobs = request.logprobs


def _completion(body: _Body, request: Request) -> None:
    body.prompt = _prompts(request)
    body.logprobs = request.logprobs
    body.echo = request.echo
    body.suffix = request.suffix


def _prompts(request: Request) -> object:
    prompts = request.prompts
    return prompts[0] if len(prompts) == 1 else prompts


def _message(message: Message) -> _UpstreamMessage | Raw:
    wire = _wire_message(message)
    return with_extra(_ENCODER.encode(wire), message.extra) if message.extra else wire


def _wire_message(message: Message) -> _UpstreamMessage:
    content = message.content
    if isinstance(content, tuple):
        wire = _UpstreamMessage(message.role, [_part(part) for part in content], message.name)
    else:
        wire = _UpstreamMessage(message.role, content, message.name)
    if message.tool_calls:
        wire.tool_calls = [_call(call) for call in message.tool_calls]
    wire.tool_call_id = message.tool_call_id
    return wire


def _call(call: ToolCall) -> WireToolCall | Raw:
    wire = WireToolCall(call.id, WireFunctionCall(call.name, call.arguments))
    return with_extra(_ENCODER.encode(wire), call.extra) if call.extra else wire


def _part(part: Part) -> _Part | Raw:
    wire = _wire_part(part)
    return with_extra(_ENCODER.encode(wire), part.extra) if part.extra else wire


def _wire_part(part: Part) -> _Part:
    if isinstance(part, TextPart):
        return WireText(part.text)
    if isinstance(part, ImagePart):
        return WireImage(WireImageUrl(part.url, None if part.detail == "auto" else part.detail))
    if isinstance(part, AudioPart):
        return WireInputAudio(WireAudio(part.data, part.format))
    assert isinstance(part, FilePart)
    return _File(Raw(part.document.encode()))


def _tool(tool: Tool) -> _Tool | Raw:
    parameters = Raw(tool.parameters.encode()) if tool.parameters != "{}" else None
    wire = _Tool(_UpstreamFunction(tool.name, tool.description, parameters, tool.strict))
    return with_extra(_ENCODER.encode(wire), tool.extra) if tool.extra else wire
