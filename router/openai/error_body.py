"""OpenAI's error object, as a body with its headers and as the last event of a stream."""

from __future__ import annotations

import math

import msgspec

from ..errors import AuthenticationFailed, CausewayError, CloudRejected, MethodNotAllowed

_ENCODER = msgspec.json.Encoder()


class _Error(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str


class _Envelope(msgspec.Struct):
    error: _Error


def encode_error(error: CausewayError) -> bytes:
    """Encode OpenAI's error object. Characters that JSON cannot hold (lone surrogates) are replaced."""
    try:
        return _ENCODER.encode(_Envelope(_Error(error.message, error.type, error.param, error.code)))
    except UnicodeEncodeError:
        param = None if error.param is None else replace_surrogates(error.param)
        return _ENCODER.encode(_Envelope(_Error(replace_surrogates(error.message), error.type, param, error.code)))


def error_headers(error: CausewayError) -> dict[str, str]:
    """Return the headers of the error: when to retry and whether, how to authenticate, which methods there are."""
    headers = {}
    if error.retry_after_s is not None:
        # RFC 9110 allows whole seconds only: round up, so that the client does not retry too early.
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, CloudRejected):
        headers["x-should-retry"] = "false"  # OpenAI's clients repeat a 502 unless this says no
    if isinstance(error, AuthenticationFailed):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, MethodNotAllowed):
        headers["Allow"] = error.allow
    return headers


def error_event(error: CausewayError) -> bytes:
    """Encode an error that happens after the first byte was sent: the stream's last event, without ``[DONE]``."""
    return b"data: " + encode_error(error) + b"\n\n"


def replace_surrogates(text: str) -> str:
    """Return text without lone surrogates, which no encoder accepts: bytes of headers are decoded to them."""
    return text.encode("utf-8", "replace").decode("utf-8")
