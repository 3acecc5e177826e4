"""The wire format of OpenAI-compatible servers: the request's body, and the values and tool calls of an answer.

Routing hints are never sent. The sampling extensions have vLLM's names. A stream always requests its usage, which is
counted and billed, whatever the client requests, unless the server is known to refuse that. Fields of messages, parts,
tools and calls that we do not interpret are sent as they came.

Answers are read in the dialects of OpenAI, vLLM, NIM, Gemini, Mistral and others. Other spellings of OpenAI's values
are understood; a value without a meaning is left out. Only bytes that are not an answer at all raise CloudUnreadable.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import msgspec
from msgspec import Raw

from ...errors import CausewayError, CloudFailed, CloudUnreadable, InvalidRequest, Phase
from ...tool_calls.schema import call_id
from ...types import (
    AudioPart,
    FinishReason,
    ImagePart,
    Message,
    Part,
    Request,
    ResponseFormat,
    Sampling,
    TextPart,
    TokenAlternative,
    TokenLogprob,
    Tool,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from ..completions import read_token_text
from ..request_body import JSONObject, inner_extra, with_extra
from ..wire import WireAudio, WireFunctionCall, WireImage, WireImageUrl, WireInputAudio, WireText, WireToolCall

_encode = msgspec.json.Encoder().encode
_USAGE = {"include_usage": True}
_STREAMED: Final = b',"stream_options":{"include_usage":true}}'


class _UpstreamMessage(msgspec.Struct, gc=False, omit_defaults=True):
    role: str
    content: str | list[object] | None
    name: str | None = None
    tool_calls: list[WireToolCall | Raw] | None = None
    tool_call_id: str | None = None


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
    tools: list[JSONObject | Raw] | None = None
    tool_choice: object = None
    parallel_tool_calls: bool = True
    response_format: JSONObject | None = None
    logprobs: bool | int | None = None
    top_logprobs: int = 0
    echo: bool = False
    suffix: str | None = None
    dimensions: int | None = None
    reasoning_effort: str | None = None
    user: str | None = None
    causeway: dict[str, str] | None = None


class _TextBody(msgspec.Struct, gc=False, omit_defaults=True):
    """The fields of `_Body` that a chat of texts alone has, in the same order."""

    model: str
    messages: list[_UpstreamMessage]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    stream: bool = False
    stream_options: dict[str, bool] | None = None
    user: str | None = None


def _texts(request: Request) -> list[_UpstreamMessage] | None:
    """Return the messages of a chat that has nothing but texts and the fields of `_TextBody`; None for any other."""
    if (
        request.kind != "chat"
        or request.tools
        or request.stop
        or request.extra
        or request.n != 1
        or request.response_format is not None
        or request.logprobs is not None
        or request.reasoning_effort is not None
        or request.sampling != Sampling(request.sampling.temperature)
    ):
        return None
    texts = []
    for message in request.messages:
        content = message.content
        if type(content) is not str or message.name or message.tool_calls or message.tool_call_id or message.extra:
            return None
        texts.append(_UpstreamMessage(message.role, content))
    return texts


def encode_request(request: Request, model: str, *, stream: bool | None = None, ask_usage: bool = True) -> bytes:
    """Encode the body of the upstream request. `model`: its name at the server; `stream`: None: as the client does;
    `ask_usage`: whether to send `stream_options`, which some servers refuse.
    """
    stream = request.stream if stream is None else stream
    if (texts := _texts(request)) is not None:
        old, new = request.max_tokens, None
        if request.limit_name != "max_tokens":
            old, new = new, old
        options = _USAGE if stream and ask_usage else None
        return _encode(_TextBody(model, texts, old, new, request.sampling.temperature, stream, options, request.user))
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
        **_content(request),
    )
    encoded = _encode(body)
    if not request.extra or request.extra == "{}":
        return encoded
    return encoded[:-1] + b"," + request.extra[1:].encode()


def exchange_model(encoded: bytes, request: Request, model: str, *, ask_usage: bool = True) -> bytes:
    """Return what `encode_request` would, but for the fields' order, from the client's body (`TextChat`)."""
    if model != request.model:
        encoded = _model(model) + encoded[len(_model(request.model)) :]
    return encoded[:-1] + _STREAMED if request.stream and ask_usage else encoded


@lru_cache(64)
def _model(name: str) -> bytes:
    return b'{"model":' + _encode(name)


def _present(fields: Mapping[str, object]) -> JSONObject:
    return {name: value for name, value in fields.items() if value is not None}


def _content(request: Request) -> dict[str, Any]:
    """Return the fields that differ between kinds of requests."""
    prompts = request.prompts[0] if len(request.prompts) == 1 else request.prompts
    if request.kind == "embedding":
        # Vectors are always requested as numbers: base64 is specific to OpenAI, and we encode it ourselves.
        return {"input": prompts, "dimensions": request.dimensions}
    fields: dict[str, Any] = {request.limit_name: request.max_tokens, "logprobs": request.logprobs}
    if request.kind == "completion":
        return fields | {"prompt": prompts, "echo": request.echo, "suffix": request.suffix}
    fields["messages"] = [_message(message) for message in request.messages]
    fields["reasoning_effort"] = request.reasoning_effort
    if request.tools:
        choice = request.tool_choice
        fields["tools"] = [_tool(tool) for tool in request.tools]
        fields["parallel_tool_calls"] = request.parallel_tool_calls
        if choice.mode == "function":
            fields["tool_choice"] = {"type": "function", "function": {"name": choice.name or ""}}
        elif choice.mode != "auto":
            fields["tool_choice"] = choice.mode
    if request.response_format is not None:
        fields["response_format"] = _format(request.response_format)
    if request.logprobs is not None:
        fields |= {"logprobs": True, "top_logprobs": request.logprobs}
    return fields


def _format(requested: ResponseFormat) -> JSONObject:
    if requested.kind != "json_schema":
        return {"type": requested.kind}
    schema = {
        "schema": Raw(requested.schema.encode()),
        "name": requested.name or None,
        "strict": requested.strict or None,
        "description": requested.description or None,
    }
    return {"type": requested.kind, "json_schema": _present(schema)}


def _message(message: Message) -> _UpstreamMessage | Raw:
    content = message.content
    wire = _UpstreamMessage(
        message.role,
        [_part(part) for part in content] if isinstance(content, tuple) else content,
        message.name,
        [_call(call) for call in message.tool_calls] if message.tool_calls else None,
        message.tool_call_id,
    )
    return with_extra(_encode(wire), message.extra) if message.extra else wire


def _call(call: ToolCall) -> WireToolCall | Raw:
    wire = WireToolCall(call.id, WireFunctionCall(call.name, call.arguments))
    return with_extra(_encode(wire), call.extra) if call.extra else wire


def _part(part: Part) -> object:
    wire: object
    if isinstance(part, TextPart):
        wire = WireText(part.text)
    elif isinstance(part, ImagePart):
        wire = WireImage(WireImageUrl(part.url, None if part.detail == "auto" else part.detail))
    elif isinstance(part, AudioPart):
        wire = WireInputAudio(WireAudio(part.data, part.format))
    else:
        wire = {"type": "file", "file": Raw(part.document.encode())}
    return with_extra(_encode(wire), part.extra) if part.extra else wire


def _tool(tool: Tool) -> JSONObject | Raw:
    function = {
        "name": tool.name,
        "description": tool.description or None,
        "parameters": Raw(tool.parameters.encode()) if tool.parameters != "{}" else None,
        "strict": tool.strict or None,
    }
    wire: JSONObject = {"function": _present(function), "type": "function"}
    return with_extra(_encode(wire), tool.extra) if tool.extra else wire


# --- answers ----------------------------------------------------------------------------------------------------------

_BOM: Final = b"\xef\xbb\xbf"
_MAX_REASON: Final = 64  # characters of an unknown finish_reason that a record keeps
_CALL: Final = frozenset({"index", "id", "type", "function"})
_FUNCTION: Final = frozenset({"name", "arguments"})
_decode = msgspec.json.Decoder().decode

# In lower case. The names of OpenAI, Text Generation Inference, Mistral, Gemini, Anthropic, Cohere and Bedrock.
_FINISH: Final[dict[str, FinishReason]] = {
    **dict.fromkeys(
        ("stop", "eos", "eos_token", "stop_sequence", "end_turn", "complete", "finish_reason_stop"), "stop"
    ),
    **dict.fromkeys(("length", "max_tokens", "model_length", "max_length", "finish_reason_max_tokens"), "length"),
    **dict.fromkeys(("tool_calls", "tool_call", "tool_use", "function_call"), "tool_calls"),
    **dict.fromkeys(
        (
            *("content_filter", "content_filtered", "safety", "recitation", "blocklist", "prohibited_content", "spii"),
            *("refusal", "error_toxic", "guardrail_intervened", "image_safety", "finish_reason_safety"),
        ),
        "content_filter",
    ),
}
_BAD_REQUEST: Final = 400
_NO_REASON: Final = ("", "null", "none", "finish_reason_unspecified")
# The server gave up in the middle. As `stop`, half an answer would look complete.
_BROKEN: Final = ("abort", "error", "cancelled", "insufficient_system_resource", "malformed_function_call")


def read_answer(data: bytes, phase: Phase) -> JSONObject:
    """Decode an answer, or an event of a stream. Raises CloudUnreadable unless it is a JSON object; if it reports an
    error, CloudFailed, or InvalidRequest if that is about the request.
    """
    try:
        answer = _decode(data.removeprefix(_BOM))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CloudUnreadable(f"The target's answer is malformed: {error}.", phase=phase) from None
    if not isinstance(answer, dict):
        raise CloudUnreadable("The target's answer is malformed: it is not a JSON object.", phase=phase)
    if answer.get("error") is not None or answer.get("object") == "error":
        raise _reported_error(answer, phase)
    return answer


def choices_of(answer: JSONObject, phase: Phase = "first_token") -> list[JSONObject]:
    """Return the choices. Raises CloudUnreadable if they are not objects."""
    choices = answer.get("choices")
    found = objects(choices)
    if len(found) != (len(choices) if isinstance(choices, list) else 0 if choices is None else 1):
        raise CloudUnreadable("The target's answer is malformed: its choices are not objects.", phase=phase)
    return found


def objects(value: object) -> list[JSONObject]:
    """Return the objects of a list; an empty list for any other value."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def index_of(choice: JSONObject, position: int) -> int:
    """Return the index of a choice, which some servers leave out or send as text."""
    index = number(choice.get("index"))
    return position if index is None or index < 0 else index


def number(value: object) -> int | None:
    """Read a whole number, which may be sent as text or with a fraction of zero."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        return int(value) if value.isascii() and value.isdigit() and len(value) <= 18 else None
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 2**53 else None
    return value if isinstance(value, int) else None


def text(value: object) -> str:
    """Return a text; "" for any other value."""
    return value if isinstance(value, str) else ""


def content_of(message: JSONObject, phase: Phase) -> tuple[str, str, str | None]:
    """Return a message's text, reasoning and refusal. Raise CloudUnreadable unless its content is text or parts."""
    content = message.get("content")
    if isinstance(content, dict):
        content = [content]
    if content is not None and not isinstance(content, str | list):
        raise CloudUnreadable("The target's answer is malformed: its content is not text.", phase=phase)
    thought = text(message.get("reasoning_content")) or text(message.get("reasoning"))
    refusal = message.get("refusal")
    content_text = text(content)
    for part in objects(content):
        kind = part.get("type")
        if kind in ("thinking", "reasoning"):
            thought += _thought_of(part)
        elif kind == "refusal":
            refusal = text(refusal) + text(part.get("refusal"))
        else:
            content_text += text(part.get("text"))
    if isinstance(content, list):
        content_text += "".join(item for item in content if isinstance(item, str))
    return content_text, thought, text(refusal) or None


def _thought_of(part: JSONObject) -> str:
    thinking = part.get("thinking", part.get("text"))
    return text(thinking) + "".join(text(inner.get("text")) for inner in objects(thinking))


def finish_of(reason: object, phase: Phase) -> tuple[FinishReason | None, str]:
    """Return OpenAI's finish reason and a note for the record, or (None, "") while the choice continues. An unknown
    reason counts as `stop`, with a note. Raises CloudFailed if the server reports that it gave up.
    """
    if not isinstance(reason, str):
        return None, ""
    name = reason.lower()
    if name in _NO_REASON:
        return None, ""
    if name in _BROKEN:
        raise CloudFailed(f"The target ended its answer with finish_reason {reason[:_MAX_REASON]!r}.", phase=phase)
    finish = _FINISH.get(name)
    if finish is None:
        return "stop", f"the target's finish_reason was {reason[:_MAX_REASON]!r}, read as stop"
    return finish, ""


def usage_of(value: object) -> Usage | None:
    """Read the usage; None where there is none."""
    if not isinstance(value, dict):
        return None
    return Usage(
        number(value.get("prompt_tokens")) or 0,
        number(value.get("completion_tokens")) or 0,
        _detail(value, "prompt_tokens_details", "cached_tokens"),
        _detail(value, "completion_tokens_details", "reasoning_tokens"),
    )


def _detail(usage: JSONObject, details: str, name: str) -> int:
    found = usage.get(details)
    return (number(found.get(name)) or 0) if isinstance(found, dict) else 0


def _reported_error(answer: JSONObject, phase: Phase) -> CausewayError:
    message = answer.get("message") if answer.get("error") is None else answer.get("error")
    code = answer.get("code")
    if isinstance(message, dict):
        code, message = message.get("code"), message.get("message", message.get("code", "no message"))
    if code == _BAD_REQUEST and phase == "first_token":  # as vLLM says in a stream what its engine refuses
        return InvalidRequest(str(message)[:500])
    return CloudFailed(f"The target reported: {str(message)[:500]}", phase=phase)


# --- logprobs --------------------------------------------------------------------------------------------------------


class _ReceivedAlternative(msgspec.Struct):
    token: str
    logprob: float | None = None
    bytes: tuple[int, ...] | None = None


class _ReceivedToken(msgspec.Struct):
    token: str
    logprob: float | None = None
    bytes: tuple[int, ...] | None = None
    top_logprobs: list[_ReceivedAlternative] | None = None


class _Logprobs(msgspec.Struct):
    content: list[_ReceivedToken] | None = None  # of chats
    tokens: list[str] | None = None  # of completions, as parallel lists
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


def logprobs_of(value: object) -> tuple[TokenLogprob, ...]:
    """Read the logprobs of a chat or a completion; () if they are in neither form."""
    if not isinstance(value, dict):
        return ()
    try:
        wire = msgspec.convert(value, _Logprobs, strict=False)
    except msgspec.ValidationError:
        return ()
    if wire.content is not None:
        return tuple([_token(token) for token in wire.content])
    tokens = wire.tokens or []
    chosen = wire.token_logprobs or [None] * len(tokens)
    tops = wire.top_logprobs or [None] * len(tokens)
    # Lists of different lengths: only the common prefix is complete.
    return tuple(
        [_named_token(token, logprob, top or {}) for token, logprob, top in zip(tokens, chosen, tops, strict=False)]
    )


def _named_token(name: str, logprob: float | None, top: dict[str, float]) -> TokenLogprob:
    spelt, raw = read_token_text(name)
    return TokenLogprob(spelt, _nan(logprob), raw, tuple([_named_alternative(*item) for item in top.items()]))


def _named_alternative(name: str, logprob: float) -> TokenAlternative:
    spelt, raw = read_token_text(name)
    return TokenAlternative(spelt, logprob, raw)


def _token(wire: _ReceivedToken) -> TokenLogprob:
    top = tuple([TokenAlternative(t.token, _nan(t.logprob), t.bytes) for t in wire.top_logprobs or ()])
    return TokenLogprob(wire.token, _nan(wire.logprob), wire.bytes, top)


def _nan(logprob: float | None) -> float:
    """Return NaN for a missing logprob (the first token of an echo)."""
    return math.nan if logprob is None else logprob


# --- tool calls ------------------------------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class _Call:
    """A tool call that has begun. `position`: the server's index of it, or its number."""

    number: int
    position: int
    identity: str
    name: str
    arguments: str

    @property
    def complete(self) -> bool:
        try:
            msgspec.json.decode(self.arguments)
        except (msgspec.DecodeError, RecursionError):
            return False
        return True


class CallTracker:
    """Assigns streamed pieces to the tool calls of a choice. Some servers leave out the index or the id, send every
    call at index 0, repeat the name with each piece, or send the arguments as an object. A piece continues a call if it
    has

    1. the id of a call that has begun at the same index, or an id without a name for one that has none
    2. no id, and the index of a call, or no index and a call before it: if the piece has no name, or repeats the name
       of a call whose arguments are not complete JSON yet

    and any other piece begins a new call. `request_id` makes the ids unique of calls that the server sends without one.
    """

    def __init__(self, request_id: str, choice: int) -> None:
        self._request_id = request_id
        self._choice = choice
        self._calls: list[_Call] = []

    def __bool__(self) -> bool:
        return bool(self._calls)

    def delta(self, piece: JSONObject) -> ToolCallDelta | None:
        """Return the delta of a streamed piece; None if it adds nothing."""
        return self._delta(piece, self._find(piece))

    def whole(self, piece: JSONObject) -> ToolCallDelta | None:
        """Return a whole call, which always is a new one."""
        return self._delta(piece, None)

    def _delta(self, piece: JSONObject, call: _Call | None) -> ToolCallDelta | None:
        function = piece.get("function")
        function = function if isinstance(function, dict) else {}
        name, arguments = text(function.get("name")), _arguments(function.get("arguments"))
        extra = inner_extra(piece, _CALL, "function", _FUNCTION)
        if call is not None:
            call.arguments += arguments
            call.name = call.name or name
            return ToolCallDelta(call.number, arguments, extra=extra) if arguments or extra else None
        identity, position, count = text(piece.get("id")), number(piece.get("index")), len(self._calls)
        if not (name or arguments or identity):
            return None
        ours = not identity or any(call.identity == identity for call in self._calls)
        self._calls.append(_Call(count, count if position is None else position, identity, name, arguments))
        own_id = call_id(self._request_id, self._choice, count) if ours else identity
        return ToolCallDelta(count, arguments, own_id, name or None, extra)

    def _find(self, piece: JSONObject) -> _Call | None:
        """Return the call that this piece continues; None if it begins a new one."""
        identity, position = text(piece.get("id")), number(piece.get("index"))
        function = piece.get("function")
        name = text(function.get("name")) if isinstance(function, dict) else ""
        last = next((call for call in reversed(self._calls) if position in (call.position, None)), None)
        if identity:  # (1)
            known = (call for call in self._calls if call.identity == identity and position in (call.position, None))
            nameless = last if last is not None and not last.identity and not name else None
            return next(known, nameless)
        if last is not None and (not name or (name == last.name and not last.complete)):  # (2)
            return last
        return None


def _arguments(value: object) -> str:
    """Return arguments as JSON text; some servers send an object instead."""
    return value if isinstance(value, str) else "" if value is None else _encode(value).decode()
