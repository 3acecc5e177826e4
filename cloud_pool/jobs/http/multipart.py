"""A multipart upload of a batch's input, bounded in bytes and in time."""

from __future__ import annotations

import anyio
import msgspec
from aiohttp import BodyPartReader, hdrs, web

from router.errors import BodyTooLarge, InvalidRequest, RequestTimeout, UnsupportedMediaType

_READ_S = 60.0
_PIECE = 256 * 1024
_MAX_FIELD_BYTES = 1024
_MAX_PARTS = 16


class UploadedFile(msgspec.Struct, frozen=True):
    filename: str
    purpose: str
    pieces: tuple[bytes, ...]


async def read_upload(http: web.BaseRequest, max_bytes: int) -> UploadedFile:
    """Raises BodyTooLarge, RequestTimeout, UnsupportedMediaType or InvalidRequest."""
    if not http.headers.get(hdrs.CONTENT_TYPE, "").lower().startswith("multipart/form-data"):
        raise UnsupportedMediaType("Send the file as multipart/form-data with `purpose` and `file`.")
    if (http.content_length or 0) > max_bytes + _MAX_PARTS * _MAX_FIELD_BYTES:
        raise _too_large(max_bytes)
    try:
        with anyio.fail_after(_READ_S):
            return await _read(http, max_bytes)
    except TimeoutError:
        raise RequestTimeout(f"The file did not arrive within {_READ_S:g} s.") from None
    except (ValueError, AssertionError, RuntimeError):
        raise InvalidRequest("The body is not multipart/form-data as it should be.") from None


async def _read(http: web.BaseRequest, max_bytes: int) -> UploadedFile:
    reader = await http.multipart()
    purpose, filename, pieces, seen = "", "", None, 0
    async for part in reader:
        seen += 1
        if not isinstance(part, BodyPartReader) or seen > _MAX_PARTS:
            raise InvalidRequest("The body has parts that no upload has.")
        if part.name == "file":
            pieces = await _pieces(part, max_bytes)
            filename = (part.filename or "input.jsonl")[:255]
        else:
            value = b"".join(await _pieces(part, _MAX_FIELD_BYTES))
            purpose = value.decode("utf-8", "replace") if part.name == "purpose" else purpose
    if pieces is None:
        raise InvalidRequest("There is no `file` in the body.", param="file")
    return UploadedFile(filename, purpose, pieces)


async def _pieces(part: BodyPartReader, most: int) -> tuple[bytes, ...]:
    found, size, piece = [], 0, bytearray()
    while data := await part.read_chunk(_PIECE):
        size += len(data)
        if size > most:
            raise _too_large(most)
        piece += data
        if len(piece) >= _PIECE:
            found.append(bytes(piece))
            piece = bytearray()
    return (*found, bytes(piece)) if piece else tuple(found)


def _too_large(most: int) -> BodyTooLarge:
    return BodyTooLarge(f"The file is larger than {most} bytes. Split it.")
