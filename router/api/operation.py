"""One operation of an HTTP API as a value: a method on a path, with what it takes and what it answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from ..errors import CausewayError

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
FORM: Final = "multipart/form-data"
TEXT: Final = "text/plain"
_IN_PATH: Final = re.compile(r"\{([a-z0-9_]+)\}")


class Parameter(msgspec.Struct, frozen=True):
    """A parameter in the query or a header. `kind` is the type of its value."""

    name: str
    meaning: str
    place: Literal["query", "header"] = "query"
    kind: Any = str
    required: bool = False


class AnyOf(msgspec.Struct, frozen=True):
    """A body of one of the types `kinds`, and with `beside` of that type at the same time."""

    kinds: tuple[Any, ...]
    beside: Any = None


class ApiResponse(msgspec.Struct, frozen=True):
    """A response that is no error.

    Attributes:
        status: The HTTP status.
        content: The type of the body by media type; of server-sent events that of an event's data. None: any bytes.
        meaning: When it is sent.
        headers: Names of headers, with their meaning.
    """

    status: int = 200
    content: Mapping[str, Any] = {}
    meaning: str = "Success."
    headers: Mapping[str, str] = {}


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One operation.

    Attributes:
        path: With its parameters in braces, such as ``/v1/jobs/{id}``.
        summary: One sentence.
        caller: The role, or the scope of the token, that may call it; "anyone" needs no token.
        request: The type of the body by media type; empty: none.
        parameters: Those of query and headers; the path's are in `path`.
        responses: At least one.
        errors: The error classes that it sends.
        protocol: What the connection speaks after its response, such as ``websocket``; "": HTTP.
    """

    method: Literal["GET", "POST", "PUT", "DELETE"]
    path: str
    summary: str
    caller: str = "anyone"
    request: Mapping[str, Any] = {}
    parameters: tuple[Parameter, ...] = ()
    responses: tuple[ApiResponse, ...] = (ApiResponse(),)
    errors: tuple[type[CausewayError], ...] = ()
    protocol: str = ""

    @property
    def path_parameters(self) -> list[str]:
        return _IN_PATH.findall(self.path)
