"""The types of a client's events, and a session's settings. Field names are those on the wire.

Source: https://platform.openai.com/docs/api-reference/realtime-client-events and the types of the `openai` package. All
fields are checked: a misspelt name is refused.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ..openai.responses.request import WireFunctionChoice, WireFunctionTool, WireReasoning
from ..openai.wire import Count, Name, WireRoutingHints
from ..types import AUTO

Id = Annotated[str, Meta(min_length=1, max_length=64)]
EventId = Annotated[str, Meta(max_length=512)]
JSONObject = dict[str, object]


class ClientEvent(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What all of them have; `type` chose the struct."""

    type: str
    event_id: EventId | None = None


class SessionUpdate(ClientEvent, kw_only=True):
    session: JSONObject


class ItemCreate(ClientEvent, kw_only=True):
    item: JSONObject
    previous_item_id: Id | None = None


class ItemReference(ClientEvent, kw_only=True):
    """`conversation.item.delete` and `.retrieve`."""

    item_id: Id


class ResponseCreate(ClientEvent, kw_only=True):
    response: JSONObject | None = None


class ResponseCancel(ClientEvent, kw_only=True):
    response_id: str | None = None


class BufferAppend(ClientEvent, kw_only=True):
    audio: str


class PCMFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["audio/pcm"] = "audio/pcm"
    rate: Literal[24_000] = 24_000


class InputTranscription(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """With it the client gets the transcript of its speech. `model`: the server has one."""

    model: str | None = None


class ServerVAD(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Turns are detected by their sound: speech that silence of `silence_duration_ms` follows.

    `threshold`: of the probability of speech. `create_response`: a turn is answered. `interrupt_response`: a turn that
    starts cancels the answer.
    """

    type: Literal["server_vad"] = "server_vad"
    threshold: Annotated[float, Meta(ge=0, le=1)] = 0.5
    prefix_padding_ms: Annotated[int, Meta(ge=0, le=5000)] = 300
    silence_duration_ms: Annotated[int, Meta(ge=0, le=10_000)] = 500
    create_response: bool = True
    interrupt_response: bool = True
    idle_timeout_ms: None = None


class InputAudio(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`turn_detection`: null: the client says where its turns end."""

    format: PCMFormat = PCMFormat()
    transcription: InputTranscription | None = None
    turn_detection: ServerVAD | None = None
    noise_reduction: None = None


class OutputAudio(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`voice`: one of the box, or a language that it speaks; `speed`: 1.0 is the voice's own."""

    format: PCMFormat = PCMFormat()
    voice: Annotated[str, Meta(min_length=1, max_length=64)] = "en-us"
    speed: Annotated[float, Meta(ge=0.25, le=1.5)] = 1.0


class SessionAudio(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the session does not take or give is not there."""

    input: InputAudio | msgspec.UnsetType = msgspec.UNSET
    output: OutputAudio | msgspec.UnsetType = msgspec.UNSET


class RealtimeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings of a session, or of one response where they are its own."""

    type: Literal["realtime"] = "realtime"
    model: Name = AUTO
    output_modalities: tuple[Literal["text", "audio"]] = ("text",)
    instructions: str = ""
    tools: tuple[WireFunctionTool, ...] = ()
    tool_choice: Literal["none", "auto", "required"] | WireFunctionChoice = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: Count | Literal["inf"] = "inf"
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    reasoning: WireReasoning | None = None
    truncation: Literal["auto", "disabled"] = "auto"
    audio: SessionAudio = SessionAudio()
    causeway: WireRoutingHints | None = None


class ResponseFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What only a response has. Its other fields are those of `RealtimeSettings`."""

    conversation: Literal["auto", "none"] | None = None
    input: list[JSONObject] | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None


UNSUPPORTED = {
    "include": "there is nothing to include in text",
    "prompt": "no prompts are stored here; send `instructions`",
    "tracing": "traces are configured at the server",
}
"""Settings of OpenAI's that have no meaning here, and why; null is accepted."""
UNSUPPORTED_AUDIO = {
    "noise_reduction": "the sound is taken as it comes",
    "idle_timeout_ms": "silence alone is not answered",
}
"""The same of the settings of audio."""
