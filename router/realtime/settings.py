"""The fields that a client changes: those of a session, and those of one response."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Final, TypeVar

import msgspec

from ..errors import InvalidRequest, UnsupportedFeature
from ..openai.request_body import check_field_names, validate
from .wire import (
    UNSUPPORTED,
    UNSUPPORTED_AUDIO,
    InputAudio,
    InputTranscription,
    JSONObject,
    OutputAudio,
    PCMFormat,
    RealtimeSettings,
    ServerVAD,
    SessionAudio,
)

T = TypeVar("T", bound=msgspec.Struct)
_SEMANTIC: Final = "semantic_vad"
_NO_SEMANTICS: Final = "turns are detected by their sound; send the type `server_vad`"
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
