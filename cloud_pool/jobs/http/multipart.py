"""Multipart upload of a file, written as it arrives: bounded in bytes, in memory and in time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import anyio
import msgspec
from aiohttp import BodyPartReader, hdrs, web
from aiohttp.http import HttpProcessingError

from router.errors import BodyTooLarge, InvalidRequest, RequestTimeout
from router.openai.audio.form import check_form

_READ_S = 900.0
_PIECE_S = 20.0  # a client that sends less than a piece in this time is too slow
_PIECE_BYTES = 64 * 1024
_MAX_FIELD_BYTES = 1024
_MAX_PARTS = 16
OVERHEAD_BYTES = _MAX_PARTS * _MAX_FIELD_BYTES
"""At most so much of the body is not the file."""

WriteFile = Callable[[bytes], Awaitable[None]]


class UploadFields(msgspec.Struct, frozen=True):
    """What an upload says about its file. `filename`: as it was sent; `fields`: the others of the form."""

    filename: str
    fields: dict[str, str]
    is_empty: bool


def check_upload(request: web.BaseRequest) -> int:
    """Return the least size that the file can have; 0 if it is unknown. Raises UnsupportedMediaType."""
    check_form(request.headers.get(hdrs.CONTENT_TYPE), request.headers.get(hdrs.CONTENT_ENCODING))
    return max(0, (request.content_length or 0) - OVERHEAD_BYTES)


async def read_upload(request: web.BaseRequest, write: WriteFile) -> UploadFields:
    """Read an upload and pass its file to `write`, which bounds its size.

    Raises InvalidRequest or RequestTimeout, and what `write` raises.
    """
    try:
        with anyio.fail_after(_READ_S):
            return await _read(request, write)
    except TimeoutError:
        raise RequestTimeout(f"The file did not arrive within {_READ_S:g} s, or {_PIECE_S:g} s passed idly.") from None
    except (ValueError, AssertionError, HttpProcessingError, web.RequestPayloadError):
        raise InvalidRequest("The body is not valid multipart/form-data.") from None


async def _read(request: web.BaseRequest, write: WriteFile) -> UploadFields:
    reader = await request.multipart()
    filename, fields, parts, is_empty = None, {}, 0, True
    async for part in reader:
        parts += 1
        if not isinstance(part, BodyPartReader) or parts > _MAX_PARTS:
            raise InvalidRequest("The body has too many parts, or a nested one.")
        if part.name == "file":
            if filename is not None:
                raise InvalidRequest("There is more than one `file` in the body.", param="file")
            filename = (part.filename or "input.jsonl")[:255]
            async for piece in _pieces(part):
                is_empty = False
                await write(piece)
        else:
            fields[part.name or ""] = await _field(part)
    if filename is None:
        raise InvalidRequest("There is no `file` in the body.", param="file")
    return UploadFields(filename, fields, is_empty)


async def _field(part: BodyPartReader) -> str:
    value = bytearray()
    async for piece in _pieces(part):
        value += piece
        if len(value) > _MAX_FIELD_BYTES:
            raise BodyTooLarge(f"A field of the upload has more than {_MAX_FIELD_BYTES} bytes.")
    return value.decode("utf-8", "replace")


async def _pieces(part: BodyPartReader) -> AsyncIterator[bytes]:
    while True:
        with anyio.fail_after(_PIECE_S):
            piece = await part.read_chunk(_PIECE_BYTES)
        if not piece:
            return
        yield bytes(piece)
