"""A multipart form (RFC 7578) → its fields, in memory only: what a client uploads is never on disk."""

from __future__ import annotations

import asyncio

from aiohttp import BodyPartReader, MultipartReader, StreamReader, hdrs
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http import HttpProcessingError

from router.errors import InvalidRequest, UnsupportedMediaType

_FORM = "multipart/form-data"
_MAX_FIELDS = 16


def check_form(content_type: str) -> None:
    """Raises UnsupportedMediaType for a body that is said to be something else."""
    if content_type.partition(";")[0].strip().lower() != _FORM:
        raise UnsupportedMediaType(f"The body's type is {content_type[:64]!r}. Send `Content-Type: {_FORM}`.")


async def read_form(body: bytes, content_type: str) -> list[tuple[str, bytes]]:
    """Return the fields of a whole form, names with their values.

    Raises:
        InvalidRequest: it is malformed, or has too many fields.
    """
    # Its buffer is never too full, so it pauses no connection.
    stream = StreamReader(BaseProtocol(asyncio.get_running_loop()), limit=len(body) + 1)
    stream.feed_data(body)
    stream.feed_eof()
    fields: list[tuple[str, bytes]] = []
    try:
        async for part in MultipartReader({hdrs.CONTENT_TYPE: content_type}, stream):
            if not isinstance(part, BodyPartReader) or len(fields) == _MAX_FIELDS:
                raise InvalidRequest("The form has too many fields, or a nested one.")
            fields.append((part.name or "", bytes(await part.read())))
    except (ValueError, AssertionError, LookupError, RuntimeError, HttpProcessingError):
        raise InvalidRequest(f"The body is not valid {_FORM}.") from None
    return fields
