"""A multipart form (RFC 7578) → its fields, from a whole body."""

from __future__ import annotations

from email.message import Message
from email.parser import HeaderParser
from email.utils import collapse_rfc2231_value

from ...errors import InvalidRequest, UnsupportedMediaType
from ..request_body import check_encoding

_FORM = "multipart/form-data"
_MAX_FIELDS = 16
_MAX_BOUNDARY = 70  # RFC 2046


def check_form(content_type: str | None, content_encoding: str | None) -> None:
    """Check the headers of these names; None: the header is absent.

    Raises:
        UnsupportedMediaType: the body is not said to be a form, or is compressed.
    """
    if content_type is None:
        raise UnsupportedMediaType(f"The body has no type. Send `Content-Type: {_FORM}`.")
    if content_type.partition(";")[0].strip().lower() != _FORM:
        raise UnsupportedMediaType(f"The body's type is {content_type[:64]!r}. Send `Content-Type: {_FORM}`.")
    check_encoding(content_encoding)


def parse_form(body: bytes, content_type: str) -> list[tuple[str, bytes]]:
    """Return the fields of a whole form, names with their values.

    Raises:
        InvalidRequest: it is malformed, or has too many fields.
    """
    delimiter = b"\r\n--" + _boundary(content_type)
    _preamble, *fields = (b"\r\n" + body).split(delimiter, _MAX_FIELDS + 1)
    if not fields:
        raise _malformed()
    *fields, end = fields
    if not end.startswith(b"--"):
        raise InvalidRequest("The form has too many fields.") if len(fields) == _MAX_FIELDS else _malformed()
    return [_field(field) for field in fields]


def _boundary(content_type: str) -> bytes:
    message = Message()
    message["Content-Type"] = content_type
    boundary = message.get_boundary("").encode("utf-8", "replace")
    if not 0 < len(boundary) <= _MAX_BOUNDARY:
        raise _malformed()
    return boundary


def _field(field: bytes) -> tuple[str, bytes]:
    """Read what stands between two delimiters: padding, a line's end, headers, an empty line, the value."""
    head, _, value = field.lstrip(b" \t").partition(b"\r\n\r\n")
    if not head.startswith(b"\r\n"):
        raise _malformed()
    headers = HeaderParser().parsestr(head[2:].decode("utf-8", "replace"))
    if headers.get_content_maintype() == "multipart":
        raise InvalidRequest("The form has a form in it. Send plain fields.")
    name = headers.get_param("name", "", "content-disposition")
    return collapse_rfc2231_value(name), value


def _malformed() -> InvalidRequest:
    return InvalidRequest(f"The body is not valid {_FORM}.")
