"""Anthropic's error object, the count of tokens, and the list of models, as its clients read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec

from ..errors import CausewayError, Draining, InvalidRequest, Shed
from ..numbers import whole_number
from ..openai.answer import ModelObject, error_headers
from ..types import replace_surrogates

_encode = msgspec.json.Encoder().encode
VERSION_HEADER: Final = "anthropic-version"
_VERSIONS: Final = ("2023-06-01", "2026-10-21")
"""The versions of the API. The later one differs in what it refuses: of that we take `temperature`, `top_p` and `top_k`
in either, because models here have them.
"""
MESSAGES: Final = "/v1/messages"
COUNT_TOKENS: Final = "/v1/messages/count_tokens"
UNCOUNTED: Final = "`{}`: tokens of text are counted. Those of other parts are in the `usage` of the answer."
_MODELS: Final = "/v1/models"
_MAX_PAGE: Final = 1000
_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}
"""The type of an error by its status; other ones are `invalid_request_error` below 500, else `api_error`."""


class FaultDetails(msgspec.Struct, frozen=True):
    """`error_code`: our stable code. `param`: the path of the field that is wrong."""

    error_code: str
    param: str | None


class Fault(msgspec.Struct, frozen=True):
    type: str
    message: str
    details: FaultDetails


class FaultDocument(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """The JSON body of an error."""

    error: Fault
    request_id: str


class TokenCount(msgspec.Struct, frozen=True):
    """The answer of `/v1/messages/count_tokens`."""

    input_tokens: int


class ModelInfo(msgspec.Struct, frozen=True):
    """A model. `created_at`: RFC 3339.."""

    id: str
    display_name: str
    created_at: str
    type: str = "model"
    lifecycle: str = "active"


class ModelPage(msgspec.Struct, frozen=True):
    data: list[ModelInfo]
    first_id: str | None
    last_id: str | None
    has_more: bool


def is_anthropic(path: str, headers: Mapping[str, str]) -> bool:
    """Return whether a request is answered in this dialect: it is for Messages, or a client of it lists models."""
    return path.startswith(MESSAGES) or (path.startswith(_MODELS) and VERSION_HEADER in headers)


def check_version(headers: Mapping[str, str]) -> None:
    """Refuse an unknown version of the API. Without the header the latest is meant. Raises InvalidRequest."""
    version = headers.get(VERSION_HEADER)
    if version is not None and version not in _VERSIONS:
        message = f"`{VERSION_HEADER}` must be {' or '.join(_VERSIONS)}, not {version[:32]!r}."
        raise InvalidRequest(message, param=VERSION_HEADER)


def encode_error(error: CausewayError, request_id: str) -> bytes:
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    if isinstance(error, Draining | Shed):
        kind = "overloaded_error"
    details = FaultDetails(error.code, None if error.param is None else replace_surrogates(error.param))
    return _encode(FaultDocument(Fault(kind, replace_surrogates(error.message), details), request_id))


def error_event(error: CausewayError, request_id: str) -> bytes:
    """Encode an error that happens after the first byte was sent: the stream's last event."""
    return b"event: error\ndata: " + encode_error(error, request_id) + b"\n\n"


def model_info(model: ModelObject) -> ModelInfo:
    """Return a model as this dialect describes it."""
    return ModelInfo(model.id, model.id, datetime.fromtimestamp(model.created, UTC).isoformat())


def model_page(models: Sequence[ModelObject], query: Mapping[str, str]) -> ModelPage:
    """Return a page of the models. Raises InvalidRequest for a malformed query."""
    limit = whole_number(query.get("limit", "20"), _MAX_PAGE)
    if not limit:
        raise InvalidRequest(f"`limit` must be a whole number from 1 to {_MAX_PAGE}.", param="limit")
    ids = [model.id for model in models]
    first, last = 0, len(ids)
    for name in ("after_id", "before_id"):
        known = query.get(name)
        if known is not None and known not in ids:
            raise InvalidRequest(f"`{name}` does not name a model of the list.", param=name)
    if (after := query.get("after_id")) is not None:
        first = ids.index(after) + 1
    if (before := query.get("before_id")) is not None:
        last = ids.index(before)
        first = max(first, last - limit)
    page = [model_info(model) for model in models[first:last][:limit]]
    more = first + len(page) < last if before is None else first > 0
    return ModelPage(page, page[0].id if page else None, page[-1].id if page else None, more)


def error_head(error: CausewayError, request_id: str) -> dict[str, str]:
    """Return the headers of an error; its client reads the request's id from a name of its own."""
    return {**error_headers(error), "request-id": request_id}
