"""The types and ranges of Anthropic's request bodies. Field names are those on the wire.

Source: the types of https://github.com/anthropics/anthropic-sdk-python, of 2023-06-01 and 2026-10-21. Fields of the
type `object` are refused with an explanation, see `request`. Other unknown fields are refused at every level, because
this dialect has no fields to pass on.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ..described import described
from ..openai.wire import Count, Name, StopText, WireRoutingHints, ZeroToOne

MIN_BUDGET = 1024


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    pass


class WireCacheControl(Strict):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class WireTextBlock(Strict, tag_field="type", tag="text"):
    text: str
    cache_control: WireCacheControl | None = None
    citations: object = None


class WireBase64(Strict, tag_field="type", tag="base64"):
    media_type: Annotated[str, Meta(pattern=r"^[\w.+-]+/[\w.+-]+\Z")]
    data: str


class WireUrl(Strict, tag_field="type", tag="url"):
    url: str


class WireUploaded(Strict, tag_field="type", tag="file"):
    file_id: str


class WirePlainText(Strict, tag_field="type", tag="text"):
    data: str
    media_type: Literal["text/plain"] = "text/plain"


class WireImageBlock(Strict, tag_field="type", tag="image"):
    source: WireBase64 | WireUrl | WireUploaded
    cache_control: WireCacheControl | None = None
    transformations: object = None


class WireDocumentBlock(Strict, tag_field="type", tag="document"):
    source: WireBase64 | WirePlainText | WireUploaded
    title: str | None = None
    cache_control: WireCacheControl | None = None
    context: object = None
    citations: object = None


class WireThinkingBlock(Strict, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""


class WireCaller(Strict):
    type: Literal["direct"]


class WireToolUse(Strict, tag_field="type", tag="tool_use"):
    id: Annotated[str, Meta(min_length=1)]
    name: Name
    input: dict[str, object]
    cache_control: WireCacheControl | None = None
    caller: WireCaller | None = None


ResultBlock = WireTextBlock | WireImageBlock | WireDocumentBlock


class WireToolResult(Strict, tag_field="type", tag="tool_result"):
    tool_use_id: Annotated[str, Meta(min_length=1)]
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None
    cache_control: WireCacheControl | None = None


Block = WireTextBlock | WireImageBlock | WireDocumentBlock | WireThinkingBlock | WireToolUse | WireToolResult


class WireSpeakerTurn(Strict):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Meta(min_length=1)]


class WireClientTool(Strict):
    """A tool of the client. `eager_input_streaming` has no effect, because arguments are always streamed at once."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    input_schema: dict[str, object]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    cache_control: WireCacheControl | None = None
    eager_input_streaming: bool | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None
    input_examples: object = None


class WireToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class WireThinking(Strict):
    """`display`: `summarized` gets the whole thought, because nothing here summarises it."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=MIN_BUDGET)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class WireJsonFormat(Strict):
    type: Literal["json_schema"]
    schema: dict[str, object]


class WireOutput(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: WireJsonFormat | None = None


class WireMetadata(Strict):
    user_id: str | None = None


@described
class WireCountTokens(Strict, kw_only=True):
    """The body of `/v1/messages/count_tokens`."""

    model: Name
    messages: Annotated[list[WireSpeakerTurn], Meta(min_length=1)]
    system: str | list[WireTextBlock] | None = None
    tools: list[WireClientTool] | None = None
    tool_choice: WireToolChoice | None = None
    thinking: WireThinking | None = None
    output_config: WireOutput | None = None
    output_format: WireJsonFormat | None = None
    cache_control: WireCacheControl | None = None
    speed: Literal["standard"] | None = None
    causeway: WireRoutingHints | None = None
    # Refused with an explanation.
    container: object = None
    context_management: object = None
    diagnostics: object = None
    inference_geo: object = None
    mcp_servers: object = None
    thread: object = None
    user_profile_id: object = None
    workspace_id: object = None


@described
class WireMessages(WireCountTokens, kw_only=True):
    """The body of `/v1/messages`."""

    max_tokens: Count
    temperature: ZeroToOne | None = None
    top_p: ZeroToOne | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    stop_sequences: Annotated[list[StopText], Meta(max_length=4)] | None = None
    stream: bool | None = None
    metadata: WireMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None  # there is one tier of service
