"""The types of the body of `POST /v1/responses`. Source: https://platform.openai.com/docs/api-reference/responses."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ...types import Effort
from ..wire import Alternatives, Count, Name, WireGeneration, WireInputAudio


class WireInputText(msgspec.Struct, tag_field="type", tag="input_text"):
    text: str


class WireOutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str


class WireOutputRefusal(msgspec.Struct, tag_field="type", tag="refusal"):
    refusal: str


class WireInputImage(msgspec.Struct, tag_field="type", tag="input_image"):
    image_url: str | None = None
    file_id: str | None = None
    detail: Literal["auto", "low", "high"] | None = None


class WireInputFile(msgspec.Struct, tag_field="type", tag="input_file"):
    filename: str | None = None
    file_data: str | None = None
    file_id: str | None = None


WireContent = WireInputText | WireOutputText | WireOutputRefusal | WireInputImage | WireInputAudio | WireInputFile


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
    """What the model thought in an earlier turn. Models are not shown their earlier thoughts: it is dropped."""


WireItem = WireMessageItem | WireCallItem | WireCallOutputItem | WireReasoningItem


class WireFunctionTool(msgspec.Struct):
    """A tool; only those of type function need a name, and are offered to a model."""

    type: str
    name: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class WireAllowedFunction(msgspec.Struct, omit_defaults=True):
    type: str
    name: str | None = None


class WireFunctionChoice(msgspec.Struct, omit_defaults=True):
    """The function to call, or of type allowed_tools those of the tools that may be called."""

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
    # Refused with an explanation, see request.py.
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: object = None
    background: bool | None = None
    prompt: object = None
    truncation: Literal["auto", "disabled"] | None = None
    # Without a meaning here, and not passed on.
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    max_tool_calls: int | None = None
