"""The types of a client's events, and the settings of a session that a client can change.

Source: https://platform.openai.com/docs/api-reference/realtime-client-events and the types of the `openai` package.
Field names are those on the wire. All fields are checked: a misspelt name is refused.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from ..errors import InvalidRequest, UnsupportedFeature
from ..openai.request_body import check_field_names, validate
from ..openai.responses.request import WireFunctionChoice, WireFunctionTool, WireReasoning
from ..openai.wire import Count, Name, WireRoutingHints
from ..types import AUTO

Id = Annotated[str, Meta(min_length=1, max_length=64)]
EventId = Annotated[str, Meta(max_length=512)]
JSONObject = dict[str, object]


class ClientEvent(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The common fields of all client events; `type` selects the struct."""

    type: str
    event_id: EventId | None = None


class SessionUpdate(ClientEvent, kw_only=True):
    session: JSONObject


class ItemCreate(ClientEvent, kw_only=True):
    item: JSONObject
    previous_item_id: Id | None = None


class ItemReference(ClientEvent, kw_only=True):
    """The events `conversation.item.delete` and `.retrieve`."""

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
    """The setting with which the client gets the transcript of its speech. `model` is ignored: the server has one."""

    model: str | None = None


class ServerVAD(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of turn detection: a turn is speech followed by silence of `silence_duration_ms`. `threshold`:
    minimum probability of speech. `create_response`: turns are answered. `interrupt_response`: the start of a turn
    cancels the answer.
    """

    type: Literal["server_vad"] = "server_vad"
    threshold: Annotated[float, Meta(ge=0, le=1)] = 0.5
    prefix_padding_ms: Annotated[int, Meta(ge=0, le=5000)] = 300
    silence_duration_ms: Annotated[int, Meta(ge=0, le=10_000)] = 500
    create_response: bool = True
    interrupt_response: bool = True
    idle_timeout_ms: None = None


class InputAudio(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of input audio. `turn_detection`: null if the client marks the end of turns."""

    format: PCMFormat = PCMFormat()
    transcription: InputTranscription | None = None
    turn_detection: ServerVAD | None = None
    noise_reduction: None = None


class OutputAudio(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of output audio. `voice`: a voice of the device, or a language; `speed`: 1.0 is normal."""

    format: PCMFormat = PCMFormat()
    voice: Annotated[str, Meta(min_length=1, max_length=64)] = "en-us"
    speed: Annotated[float, Meta(ge=0.25, le=1.5)] = 1.0


class SessionAudio(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The audio settings of a session. Directions that the session does not support are left out."""

    input: InputAudio | msgspec.UnsetType = msgspec.UNSET
    output: OutputAudio | msgspec.UnsetType = msgspec.UNSET


class RealtimeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings of a session, or a response's own settings."""

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
    """The fields that only a response has, besides those of `RealtimeSettings`."""

    conversation: Literal["auto", "none"] | None = None
    input: list[JSONObject] | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None


UNSUPPORTED = {
    "include": "a text has no further data to include",
    "prompt": "this server does not store prompts; send `instructions`",
    "tracing": "traces are configured at the server",
}
"""Settings of OpenAI's that are not supported, with the reason; null is accepted."""
UNSUPPORTED_AUDIO = {
    "noise_reduction": "the audio is used as it is",
    "idle_timeout_ms": "an answer to silence is not supported",
}
"""Audio settings of OpenAI's that are not supported, with the reason; null is accepted."""


T = TypeVar("T", bound=msgspec.Struct)
_SEMANTIC: Final = "semantic_vad"
_NO_SEMANTICS: Final = "turns are only detected by their audio; send the type `server_vad`"
_AUDIO: Final[Mapping[type[msgspec.Struct], Mapping[str, type[msgspec.Struct]]]] = {
    RealtimeSettings: {"audio": SessionAudio},
    SessionAudio: {"input": InputAudio, "output": OutputAudio},
    InputAudio: {"format": PCMFormat, "transcription": InputTranscription, "turn_detection": ServerVAD},
    OutputAudio: {"format": PCMFormat},
}
"""The nested settings, whose fields are optional, too."""


def supported(document: JSONObject, where: str) -> JSONObject:
    """Return the fields without unsupported ones that are null. Raises UnsupportedFeature if one is not null."""
    for name, why in UNSUPPORTED.items():
        if document.get(name) is not None:
            raise UnsupportedFeature(f"`{where}.{name}`: {why}.", param=f"{where}.{name}")
    return {name: value for name, value in document.items() if name not in UNSUPPORTED}


def known_fields(
    document: JSONObject, fields: type[msgspec.Struct], where: str
) -> tuple[JSONObject, list[UnsupportedFeature]]:
    """Return the known fields, and an error for each unknown one. Raises UnknownField for what looks misspelt."""
    names = {field.encode_name for field in msgspec.structs.fields(fields)}
    reasons = UNSUPPORTED if fields is RealtimeSettings else UNSUPPORTED_AUDIO
    has = names - reasons.keys()
    others = [name for name, value in document.items() if value is not None and _is_other(name, value, has)]
    try:  # a misspelt field, above all a privacy setting, must not be ignored
        check_field_names([name for name in others if name not in names | reasons.keys()], frozenset(names))
    except InvalidRequest as error:
        raise within(where, error) from None
    known: JSONObject = {name: value for name, value in document.items() if name in names and name not in others}
    errors = [_no_such_setting(name, where, reasons) for name in others]
    for name, part in _AUDIO.get(fields, {}).items():
        inner = known.get(name)
        if isinstance(inner, dict):
            known[name], unknown = known_fields(inner, part, f"{where}.{name}")
            errors += unknown
            if unknown and not known[name] and part in _AUDIO:  # an empty `transcription` has a meaning
                del known[name]
    return known, errors


def together(errors: Sequence[UnsupportedFeature], *, applied: bool) -> UnsupportedFeature:
    """Return one error that names all of the errors. `applied`: the other settings of the update were applied."""
    message = " ".join(error.message for error in errors) + (" The rest was applied." if applied else "")
    return UnsupportedFeature(message, param=errors[0].param)


def _is_other(name: str, value: object, has: Container[str]) -> bool:
    if name == "turn_detection" and isinstance(value, dict):
        return value.get("type") == _SEMANTIC
    return name not in has


def _no_such_setting(name: str, where: str, reasons: Mapping[str, str]) -> UnsupportedFeature:
    reason = _NO_SEMANTICS if name == "turn_detection" else reasons.get(name, "this setting does not exist")
    return UnsupportedFeature(f"`{where}.{name[:64]}`: {reason}.", param=f"{where}.{name[:64]}")


def merged(fields: T, update: JSONObject, where: str) -> T:
    """Return the fields merged with those of the update; null sets the default. Raises InvalidRequest."""
    both: JSONObject = {**msgspec.to_builtins(fields), **update}
    try:
        return validate({name: value for name, value in both.items() if value is not None}, type(fields))
    except InvalidRequest as error:
        raise within(where, error) from None


def within(where: str, error: InvalidRequest) -> InvalidRequest:
    """Return the same error for a field inside `where`."""
    param = where if error.param is None else f"{where}.{error.param}"
    message = error.message if error.param is None else error.message.replace(f"`{error.param}`", f"`{param}`")
    return type(error)(message, param=param)
