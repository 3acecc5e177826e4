"""The types and ranges of OpenAI's request bodies. Field names are those on the wire.

Source: https://platform.openai.com/docs/api-reference, with vLLM's sampling extensions (top_k, min_p,
repetition_penalty) and llama.cpp's name for the last (repeat_penalty). Unknown fields inside messages, parts and tools
are ignored; unknown fields of the body itself are passed on in `Request.extra`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ..described import described
from ..types import Effort, Prefer

INT32_MAX = 2**31 - 1

ZeroToOne = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Factor = Annotated[float, Meta(gt=0, le=10)]
Count = Annotated[int, Meta(ge=1, le=INT32_MAX)]
TokenId = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
StopText = Annotated[str, Meta(min_length=1)]
TAG = r"[^\s,\x00-\x1f\x7f-\x9f]{1,64}"
"""The pattern of a tag: without spaces, commas and control characters, it fits a body and a header."""
MAX_TAGS = 32
Tag = Annotated[str, Meta(min_length=1, max_length=64, pattern=rf"^{TAG}(?![\s\S])")]
Alternatives = Annotated[int, Meta(ge=0, le=20)]
Tokens = list[TokenId]


class WireImageUrl(msgspec.Struct, omit_defaults=True):
    url: str
    detail: Literal["auto", "low", "high"] | None = None


class WireAudio(msgspec.Struct):
    data: str
    format: str


class WireText(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class WireImage(msgspec.Struct, tag_field="type", tag="image_url"):
    image_url: WireImageUrl


class WireInputAudio(msgspec.Struct, tag_field="type", tag="input_audio"):
    input_audio: WireAudio


class WireFile(msgspec.Struct, tag_field="type", tag="file"):
    file: dict[str, object]


class WireRefusal(msgspec.Struct, tag_field="type", tag="refusal"):
    refusal: str


WirePart = WireText | WireImage | WireInputAudio | WireFile | WireRefusal


class WireFunctionCall(msgspec.Struct):
    name: Name
    arguments: str


class WireToolCall(msgspec.Struct):
    id: str
    function: WireFunctionCall
    type: Literal["function"] = "function"


class WireMessage(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[WirePart], Meta(min_length=1)] | None = None
    name: str | None = None
    tool_calls: list[WireToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    function_call: object = None


class WireFunction(msgspec.Struct):
    name: Annotated[str, Meta(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class WireTool(msgspec.Struct):
    """A tool. Kinds other than functions are accepted, and refused only if one of them must be called."""

    type: str
    function: WireFunction | None = None


class WireNamed(msgspec.Struct):
    name: str


class WireAllowedTool(msgspec.Struct):
    type: str
    function: WireNamed | None = None


class WireAllowedTools(msgspec.Struct):
    """The tools that may be called."""

    mode: Literal["auto", "required"]
    tools: list[WireAllowedTool]


class WireChoice(msgspec.Struct, omit_defaults=True):
    type: str
    function: WireNamed | None = None
    allowed_tools: WireAllowedTools | None = None


class WireSchema(msgspec.Struct):
    schema: dict[str, object]
    name: str = ""
    description: str | None = None
    strict: bool | None = None


class WireFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: WireSchema | None = None
    schema: dict[str, object] | None = None  # with json_object, as in llama.cpp's server


class WireStreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class WireRoutingHints(msgspec.Struct, forbid_unknown_fields=True):
    """Our only field in the body. Unknown keys are refused, so that no misspelt wish for privacy is ignored."""

    prefer: Prefer | None = None
    tags: Annotated[list[Tag], Meta(max_length=MAX_TAGS)] | None = None
    deadline_ms: Count | None = None


class WireGeneration(msgspec.Struct, kw_only=True):
    """The common fields of chat completions and completions."""

    model: Name
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: ZeroToOne | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None
    min_p: ZeroToOne | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repeat_penalty: Factor | None = None
    repetition_penalty: Factor | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    logit_bias: dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=4)] | None = None
    n: Annotated[int, Meta(ge=1, le=16)] | None = None
    stream: bool | None = None
    stream_options: WireStreamOptions | None = None
    user: str | None = None
    causeway: WireRoutingHints | None = None


@described
class WireChat(WireGeneration, kw_only=True):
    messages: Annotated[list[WireMessage], Meta(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    tools: list[WireTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | WireChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: WireFormat | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    reasoning_effort: Effort | None = None
    # Refused with an explanation, see chat.py.
    functions: object = None
    function_call: object = None
    modalities: list[str] | None = None
    audio: object = None


@described
class WireCompletion(WireGeneration, kw_only=True):
    prompt: str | Annotated[list[str | TokenId | Tokens], Meta(min_length=1, max_length=2048)]
    max_tokens: Count | None = None
    best_of: Count | None = None
    logprobs: Alternatives | None = None
    echo: bool | None = None
    suffix: str | None = None


@described
class WireEmbedding(msgspec.Struct, kw_only=True):
    model: Name
    input: str | Annotated[list[str | TokenId | Tokens], Meta(min_length=1, max_length=2048)]
    dimensions: Annotated[int, Meta(ge=1, le=65536)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    user: str | None = None
    causeway: WireRoutingHints | None = None
