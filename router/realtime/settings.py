"""The fields that a client changes: those of a session, and those of one response."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from ..errors import InvalidRequest, UnsupportedFeature
from ..openai.request_body import validate
from ..openai.spelling import check_field_names
from .wire import UNSUPPORTED, JSONObject

T = TypeVar("T", bound=msgspec.Struct)


def supported(document: JSONObject, where: str) -> JSONObject:
    """The fields without those that have no meaning here and are null. Raises UnsupportedFeature if one is not."""
    for name, why in UNSUPPORTED.items():
        if document.get(name) is not None:
            raise UnsupportedFeature(f"`{where}.{name}`: {why}.", param=f"{where}.{name}")
    return {name: value for name, value in document.items() if name not in UNSUPPORTED}


def known_fields(
    document: JSONObject, fields: type[msgspec.Struct], where: str
) -> tuple[JSONObject, UnsupportedFeature | None]:
    """Return the fields that a session has, and an error that names the others; None: there are no others.

    Raises:
        UnknownField: One of the others looks like a misspelt field.
    """
    names = {field.encode_name for field in msgspec.structs.fields(fields)}
    known = {name: value for name, value in document.items() if name in names}
    others = [name for name, value in document.items() if name not in names and value is not None]
    if not others:
        return known, None
    try:  # a misspelt field, above all one of privacy, must not be passed over
        check_field_names([name for name in others if name not in UNSUPPORTED], frozenset(names))
    except InvalidRequest as error:
        raise within(where, error) from None
    reasons = [f"`{where}.{name[:64]}`: {UNSUPPORTED.get(name, 'there is no such setting here')}" for name in others]
    return known, UnsupportedFeature(f"{'; '.join(reasons)}. The rest was applied.", param=f"{where}.{others[0][:64]}")


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
