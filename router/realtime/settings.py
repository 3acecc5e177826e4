"""The fields that a client changes: those of a session, and those of one response."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from ..errors import InvalidRequest, UnsupportedFeature
from ..openai.request_body import validate
from .wire import UNSUPPORTED, JSONObject

T = TypeVar("T", bound=msgspec.Struct)


def supported(document: JSONObject, where: str) -> JSONObject:
    """The fields without those that have no meaning here and are null. Raises UnsupportedFeature if one is not."""
    for name, why in UNSUPPORTED.items():
        if document.get(name) is not None:
            raise UnsupportedFeature(f"`{where}.{name}`: {why}.", param=f"{where}.{name}")
    return {name: value for name, value in document.items() if name not in UNSUPPORTED}


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
