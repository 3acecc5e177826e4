"""The errors of the SDK. Catch `CausewayError` for all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .answers import Decision


class CausewayError(Exception):
    """Base class of every error that the SDK raises."""


class CausewayUnreachable(CausewayError):
    """The connection could not be opened; the request was not sent."""


class CausewayTimeout(CausewayError):
    """The answer, or the next chunk of it, did not arrive within the timeout or the deadline."""


class CausewayConnectionBroken(CausewayError):
    """The connection ended before the answer was complete. Chunks that arrived are not the whole answer."""


class OutboxError(CausewayError):
    """The file of an outbox cannot be read or written, or is full."""


class CausewayAPIError(CausewayError):
    """The device answered with an error object in OpenAI's form.

    Attributes:
        message: The fault, its place, and the remedy.
        status: The HTTP status. 200 if the error came in the middle of a stream, after the response head.
        type: OpenAI's error type, for example ``invalid_request_error``.
        code: The code, for example ``context_length_exceeded``.
        param: The path of the invalid field of the request, if there is one.
        retry_after_s: Seconds until the request may be sent again, if the device named a time.
        decision: The `Decision` headers of the response.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int,
        type: str = "",  # noqa: A002 -- OpenAI's name
        code: str = "",
        param: str | None = None,
        retry_after_s: float | None = None,
        decision: Decision | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.type = type
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.decision = decision
