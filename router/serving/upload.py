"""A multipart upload → a file, written as it arrives: bounded in bytes, in memory and in time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import anyio
import msgspec
from aiohttp import BodyPartReader, hdrs, web
from aiohttp.http import HttpProcessingError
from aiohttp.web_protocol import RequestPayloadError

from ..errors import BodyTooLarge, InvalidRequest, RequestTimeout
from ..openai.audio import check_form
from ..parts.uploads import clean_filename

_WHOLE_S = 900.0
_PIECE_BYTES = 64 * 1024
_MAX_FIELD_BYTES = 1024
_MAX_FIELDS = 16
_OVERHEAD_BYTES = 16 * 1024
"""At most so much of the body is not the file."""

WriteFile = Callable[[bytes], Awaitable[None]]


class UploadForm(msgspec.Struct, frozen=True):
    """The fields of an upload. `filename`: cleaned, for people; `is_empty`: the file has no bytes."""

    filename: str
    fields: dict[str, str]
    is_empty: bool


def check_upload(http: web.BaseRequest) -> int:
    """Return the least size that the file can have; 0 if that is unknown. Raises UnsupportedMediaType."""
    check_form(http.headers.get(hdrs.CONTENT_TYPE), http.headers.get(hdrs.CONTENT_ENCODING))
    return max(0, (http.content_length or 0) - _OVERHEAD_BYTES)


async def read_upload(http: web.BaseRequest, write: WriteFile, piece_s: float) -> UploadForm:
    """Read an upload and pass its file to `write`, which bounds its size.

    Args:
        piece_s: longest time in which nothing arrives.

    Raises:
        InvalidRequest: it is malformed.
        RequestTimeout: it did not arrive in time.
    """
    try:
        with anyio.fail_after(_WHOLE_S):
            return await _read(http, write, piece_s)
    except TimeoutError:
        raise RequestTimeout(f"The file did not arrive within {_WHOLE_S:g} s, or {piece_s:g} s passed idly.") from None
    except (ValueError, AssertionError, HttpProcessingError, RequestPayloadError):
        raise InvalidRequest("The body is not valid multipart/form-data.") from None


async def _read(http: web.BaseRequest, write: WriteFile, piece_s: float) -> UploadForm:
    filename: str | None = None
    fields: dict[str, str] = {}
    count, is_empty = 0, True
    with anyio.fail_after(piece_s):
        reader = await http.multipart()
    while True:
        with anyio.fail_after(piece_s):
            part = await reader.next()
        if part is None:
            break
        count += 1
        if not isinstance(part, BodyPartReader) or count > _MAX_FIELDS:
            raise InvalidRequest("The form has too many fields, or a form in it. Send plain fields.")
        if part.name == "file":
            if filename is not None:
                raise InvalidRequest("`file` is there twice. Send one file for each request.", param="file")
            filename = clean_filename(part.filename or "")
            async for piece in _pieces(part, piece_s):
                is_empty = False
                await write(piece)
        else:
            fields[part.name or ""] = await _field(part, piece_s)
    if filename is None:
        raise InvalidRequest("`file` is missing. Send the file as the form's field `file`.", param="file")
    return UploadForm(filename, fields, is_empty)


async def _field(part: BodyPartReader, piece_s: float) -> str:
    value = bytearray()
    async for piece in _pieces(part, piece_s):
        value += piece
        if len(value) > _MAX_FIELD_BYTES:
            raise BodyTooLarge(f"A field of the form has more than {_MAX_FIELD_BYTES} bytes.")
    return value.decode("utf-8", "replace")


async def _pieces(part: BodyPartReader, piece_s: float) -> AsyncIterator[bytes]:
    while True:
        with anyio.fail_after(piece_s):
            piece = await part.read_chunk(_PIECE_BYTES)
        if not piece:
            return
        yield bytes(piece)
