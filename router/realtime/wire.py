"""The types of a client's events, the settings of a session, and the fields of it that a client changes.

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
    """Turns are detected by their audio: speech that silence of `silence_duration_ms` follows.

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
    """`voice`: one of the device, or a language that it speaks; `speed`: 1.0 is the voice's own."""

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
    "noise_reduction": "the audio is taken as it comes",
    "idle_timeout_ms": "silence alone is not answered",
}
"""The same of the settings of audio."""


T = TypeVar("T", bound=msgspec.Struct)
_SEMANTIC: Final = "semantic_vad"
_NO_SEMANTICS: Final = "turns are detected by their audio; send the type `server_vad`"
_AUDIO: Final[Mapping[type[msgspec.Struct], Mapping[str, type[msgspec.Struct]]]] = {
    RealtimeSettings: {"audio": SessionAudio},
    SessionAudio: {"input": InputAudio, "output": OutputAudio},
    InputAudio: {"format": PCMFormat, "transcription": InputTranscription, "turn_detection": ServerVAD},
    OutputAudio: {"format": PCMFormat},
}
"""The parts of the settings whose fields are optional, too."""


def supported(document: JSONObject, where: str) -> JSONObject:
    """The fields without those that have no meaning here and are null. Raises UnsupportedFeature if one is not."""
    for name, why in UNSUPPORTED.items():
        if document.get(name) is not None:
            raise UnsupportedFeature(f"`{where}.{name}`: {why}.", param=f"{where}.{name}")
    return {name: value for name, value in document.items() if name not in UNSUPPORTED}


def known_fields(
    document: JSONObject, fields: type[msgspec.Struct], where: str
) -> tuple[JSONObject, list[UnsupportedFeature]]:
    """Return the fields that a session has, those of its audio's parts included, and an error for each other one.

    Raises:
        UnknownField: One of the others looks like a misspelt field.
    """
    names = {field.encode_name for field in msgspec.structs.fields(fields)}
    reasons = UNSUPPORTED if fields is RealtimeSettings else UNSUPPORTED_AUDIO
    has = names - reasons.keys()
    others = [name for name, value in document.items() if value is not None and _is_other(name, value, has)]
    try:  # a misspelt field, above all one of privacy, must not be passed over
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
            if unknown and not known[name] and part in _AUDIO:  # an empty `transcription` means something
                del known[name]
    return known, errors


def together(errors: Sequence[UnsupportedFeature], *, applied: bool) -> UnsupportedFeature:
    """Return one error that names all of them. `applied`: the other settings of the update are in force."""
    message = " ".join(error.message for error in errors) + (" The rest was applied." if applied else "")
    return UnsupportedFeature(message, param=errors[0].param)


def _is_other(name: str, value: object, has: Container[str]) -> bool:
    if name == "turn_detection" and isinstance(value, dict):
        return value.get("type") == _SEMANTIC
    return name not in has


def _no_such_setting(name: str, where: str, reasons: Mapping[str, str]) -> UnsupportedFeature:
    reason = _NO_SEMANTICS if name == "turn_detection" else reasons.get(name, "there is no such setting here")
    return UnsupportedFeature(f"`{where}.{name[:64]}`: {reason}.", param=f"{where}.{name[:64]}")


def merged(fields: T, update: JSONObject, where: str) -> T:
    """The fields with those of the update; null means the default. Raises InvalidRequest."""
    both: JSONObject = {**msgspec.to_builtins(fields), **update}
    try:
        return validate({name: value for name, value in both.items() if value is not None}, type(fields))
    except InvalidRequest as error:
        raise within(where, error) from None


def within(where: str, error: InvalidRequest) -> InvalidRequest:
    """The same error of a field inside `where`."""
    param = where if error.param is None else f"{where}.{error.param}"
    message = error.message if error.param is None else error.message.replace(f"`{error.param}`", f"`{param}`")
    return type(error)(message, param=param)
