"""Multipart upload of a batch's input file, bounded in bytes and in time."""

from __future__ import annotations

import anyio
import msgspec
from aiohttp import BodyPartReader, hdrs, web

from router.errors import BodyTooLarge, InvalidRequest, RequestTimeout, UnsupportedMediaType

_READ_S = 60.0
_PIECE_BYTES = 256 * 1024
_MAX_FIELD_BYTES = 1024
_MAX_PARTS = 16


class UploadedFile(msgspec.Struct, frozen=True):
    """An upload."""

    filename: str
    purpose: str
    pieces: tuple[bytes, ...]


async def read_upload(request: web.BaseRequest, max_bytes: int) -> UploadedFile:
    """Read an upload whose file has at most `max_bytes`.

    Raises BodyTooLarge, RequestTimeout, UnsupportedMediaType or InvalidRequest.
    """
    if not request.headers.get(hdrs.CONTENT_TYPE, "").lower().startswith("multipart/form-data"):
        raise UnsupportedMediaType("Send the file as multipart/form-data with `purpose` and `file`.")
    if (request.content_length or 0) > max_bytes + _MAX_PARTS * _MAX_FIELD_BYTES:
        raise _too_large(max_bytes)
    try:
        with anyio.fail_after(_READ_S):
            return await _read(request, max_bytes)
    except TimeoutError:
        raise RequestTimeout(f"The file did not arrive within {_READ_S:g} s.") from None
    except (ValueError, AssertionError, RuntimeError):
        raise InvalidRequest("The body is not valid multipart/form-data.") from None


async def _read(request: web.BaseRequest, max_bytes: int) -> UploadedFile:
    reader = await request.multipart()
    purpose, filename, pieces, parts = "", "", None, 0
    async for part in reader:
        parts += 1
        if not isinstance(part, BodyPartReader) or parts > _MAX_PARTS:
            raise InvalidRequest("The body has too many parts, or a nested one.")
        if part.name == "file":
            pieces = await _pieces(part, max_bytes)
            filename = (part.filename or "input.jsonl")[:255]
        else:
            value = b"".join(await _pieces(part, _MAX_FIELD_BYTES))
            purpose = value.decode("utf-8", "replace") if part.name == "purpose" else purpose
    if pieces is None:
        raise InvalidRequest("There is no `file` in the body.", param="file")
    return UploadedFile(filename, purpose, pieces)


async def _pieces(part: BodyPartReader, max_bytes: int) -> tuple[bytes, ...]:
    pieces, size, piece = [], 0, bytearray()
    while data := await part.read_chunk(_PIECE_BYTES):
        size += len(data)
        if size > max_bytes:
            raise _too_large(max_bytes)
        piece += data
        if len(piece) >= _PIECE_BYTES:
            pieces.append(bytes(piece))
            piece = bytearray()
    return (*pieces, bytes(piece)) if piece else tuple(pieces)


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The file is larger than {max_bytes} bytes. Split it.")
