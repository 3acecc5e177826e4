"""Errors → gRPC's status codes, and the metadata behind them: what HTTP says with a status, headers and a body."""

from __future__ import annotations

from grpc import StatusCode

from router.errors import CausewayError
from router.openai import encode_error, error_headers

_BY_HTTP_STATUS = {
    401: StatusCode.UNAUTHENTICATED,
    403: StatusCode.PERMISSION_DENIED,
    404: StatusCode.NOT_FOUND,
    408: StatusCode.DEADLINE_EXCEEDED,
    409: StatusCode.ABORTED,
    413: StatusCode.RESOURCE_EXHAUSTED,  # as gRPC itself says of a message that is too large
    429: StatusCode.RESOURCE_EXHAUSTED,
    499: StatusCode.CANCELLED,
    502: StatusCode.UNAVAILABLE,
    503: StatusCode.UNAVAILABLE,
    504: StatusCode.DEADLINE_EXCEEDED,
}


def status_code(error: CausewayError) -> StatusCode:
    """Return the code of an error's HTTP status."""
    other = StatusCode.INVALID_ARGUMENT if error.status < 500 else StatusCode.INTERNAL
    return _BY_HTTP_STATUS.get(error.status, other)


def trailing_metadata(error: CausewayError, request_id: str) -> tuple[tuple[str, str | bytes], ...]:
    """Return what follows the status: the request's id, the error's code, HTTP's error body, and its headers."""
    headers = tuple((name.lower(), value) for name, value in error_headers(error).items())
    return (
        ("x-request-id", request_id),
        ("x-causeway-error-code", error.code),
        ("x-causeway-error-bin", encode_error(error)),
        *headers,
    )
