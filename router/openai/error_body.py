"""OpenAI's error object, as a body and as the last event of a stream."""

from __future__ import annotations

import msgspec

from ..errors import CausewayError

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
        param = None if error.param is None else _replace_surrogates(error.param)
        return _ENCODER.encode(_Envelope(_Error(_replace_surrogates(error.message), error.type, param, error.code)))


def error_event(error: CausewayError) -> bytes:
    """Encode an error that happens after the first byte was sent: the stream's last event, without ``[DONE]``."""
    return b"data: " + encode_error(error) + b"\n\n"


def _replace_surrogates(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")
