"""HTTP/2 as far as a gRPC client needs it: frames, and header blocks without a dynamic table. Pure.

Sources: RFC 9113 (frames), RFC 7541 (HPACK), grpc/doc/PROTOCOL-HTTP2.md. The client announces a header table of 0
bytes, so the server can only use the static table and literals: a block's bytes then mean the same each time, and are
decoded once. Of the static table only `:status` is needed, because the headers of gRPC have names that are not in it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Final
from urllib.parse import unquote

import msgspec

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_HEAD_BYTES: Final = 9
MAX_FRAME_BYTES: Final = 16_384
FIRST_WINDOW: Final = 65_535
"""Bytes that a peer may send before it hears of another window, on a stream and on the connection."""
DATA, HEADERS, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 5, 6, 7, 8, 9
END_STREAM, END_HEADERS, ACK, PADDED, PRIORITY = 0x1, 0x4, 0x1, 0x8, 0x20
HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_STREAMS, INITIAL_WINDOW, MAX_FRAME_SIZE = 1, 2, 3, 4, 5
CANCEL: Final = 8
_HEAD = struct.Struct(">HBBBI")  # length in 16 + 8 bits, type, flags, stream
_SETTING = struct.Struct(">HI")
_GRPC_STATUS = (
    *("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS"),
    *("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED"),
    *("INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"),
)
_HTTP_STATUS = {"400": "INTERNAL", "401": "UNAUTHENTICATED", "403": "PERMISSION_DENIED", "404": "UNIMPLEMENTED"} | (
    dict.fromkeys(("429", "502", "503", "504"), "UNAVAILABLE")
)
_RESETS = {7: "UNAVAILABLE", CANCEL: "CANCELLED", 11: "RESOURCE_EXHAUSTED", 12: "PERMISSION_DENIED"}
_STATUSES = dict(zip(range(8, 15), ("200", "204", "206", "304", "400", "404", "500"), strict=True))
_STATIC_ENTRIES = 61
# Lengths in bits, plus 60, of the codes of the 257 symbols (RFC 7541, appendix B); the code is canonical.
_CODE_LENGTHS: Final = (
    "ISXXXXXXXTZXXZXXXXXXXXZXXXXXXXXXBFFHIBDGFFDGDBBBAAABBBBBBBCDKBHFIBCCCCCCCCCCCCCCCCCCCCCCDCDIOIJBKABABABBBACCBBBABCBAABC"
    "CCCCKGJIXPRPPRRRSRSSSSSTSTTRSTSSSSQRSRSSTRQPRRSSQSRRTQRSSQQRQSRSSPRRRSRRSVVPORSRUVVVWWVTUOQVWWVWTQQVVXWWWPTPQRQQSRRUUTTV"
    "SVWVVWWWWWXWWWWWVZ"
)


class ProtocolError(Exception):
    """The peer violates the protocol, or uses a part of it that it was told not to use."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return _HEAD.pack(len(payload) >> 8, len(payload) & 0xFF, kind, flags, stream) + payload


def settings(values: Mapping[int, int]) -> bytes:
    """Encode a SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join([_SETTING.pack(*item) for item in values.items()]))


def window_update(stream: int, size: int) -> bytes:
    """Encode a WINDOW_UPDATE frame: the peer may send `size` more bytes on the stream, or on the connection (0)."""
    return frame(WINDOW_UPDATE, 0, stream, size.to_bytes(4, "big"))


def read_settings(payload: bytes) -> dict[int, int]:
    """Return the values of a SETTINGS frame. Raises ProtocolError."""
    if len(payload) % _SETTING.size:
        raise ProtocolError("The server sent a SETTINGS frame whose length is not a multiple of a setting's.")
    return dict(_SETTING.iter_unpack(payload))


def split_frames(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield type, flags, stream and payload of each whole frame. Raises ProtocolError for one that is too long."""
    at, end = 0, len(data)
    while end - at >= FRAME_HEAD_BYTES:
        high, low, kind, flags, stream = _HEAD.unpack_from(data, at)
        length = high << 8 | low
        if length > MAX_FRAME_BYTES:
            raise ProtocolError(f"The server sent a frame of {length} bytes, which is too long.")
        at += FRAME_HEAD_BYTES
        if end - at < length:
            return
        yield kind, flags, stream & 0x7FFFFFFF, data[at : at + length]
        at += length


def without_padding(flags: int, payload: bytes) -> bytes:
    """Return the payload of DATA or HEADERS without padding. Raises ProtocolError."""
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise ProtocolError("The server sent a frame whose padding is longer than the frame.")
    return payload[1 : len(payload) - payload[0]]


# --- headers ---------------------------------------------------------------------------------------------------------


class CallEnd(msgspec.Struct, frozen=True):
    """The end of a call. `code`: name of the gRPC status."""

    code: str
    details: str = ""


@lru_cache(maxsize=1024)
def request_head(path: str, authority: str, *, tls: bool = False) -> bytes:
    """Encode the headers that all calls of a method have."""
    fixed = b"\x83\x87" if tls else b"\x83\x86"  # :method POST, :scheme https or http
    named = ((4, path), (1, authority), (31, "application/grpc"), (58, "causeway"))  # of the static table
    return fixed + b"".join([_integer(index, 4) + _text(value) for index, value in named]) + header("te", "trailers")


def header(name: str, value: str) -> bytes:
    """Encode a header, as a literal that enters no table."""
    return b"\x00" + _text(name) + _text(value)


def timeout_header(seconds: float) -> bytes:
    """Encode the time that the server has; at most 8 digits."""
    ms = max(1, round(1000.0 * seconds))
    return b"\x00\x0cgrpc-timeout" + _text(f"{ms}m" if ms < 100_000_000 else f"{min(ms // 1000, 99_999_999)}S")


def _text(text: str) -> bytes:
    data = text.encode("ascii", "replace")
    return _integer(len(data), 7) + data


def _integer(value: int, bits: int) -> bytes:
    most = (1 << bits) - 1
    if value < most:
        return bytes((value,))
    digits, value = [most], value - most
    while value >= 128:
        digits.append(value & 127 | 128)
        value >>= 7
    return bytes((*digits, value))


def call_end(headers: Mapping[str, str]) -> CallEnd:
    status = headers.get("grpc-status", "")
    if status.isdecimal():
        known = int(status) < len(_GRPC_STATUS)
        return CallEnd(_GRPC_STATUS[int(status)] if known else "UNKNOWN", unquote(headers.get("grpc-message", "")))
    http = headers.get(":status", "200")
    return CallEnd(_HTTP_STATUS.get(http, "UNKNOWN"), f"The answer has no gRPC status; its HTTP status is {http}.")


def reset_end(code: int) -> CallEnd:
    """Return the end of a call whose stream was reset with an HTTP/2 error code."""
    return CallEnd(_RESETS.get(code, "INTERNAL"), f"The stream was reset with code {code}.")


@lru_cache(maxsize=256)
def read_headers(block: bytes) -> Mapping[str, str]:
    """Decode a header block. Names of the static table other than `:status` are left out. Raises ProtocolError."""
    headers: dict[str, str] = {}
    at = 0
    try:
        while at < len(block):
            first = block[at]
            if first & 0xE0 == 0x20:  # a new size of the dynamic table, which can only be 0
                size, at = _read_integer(block, at, 5)
                if size:
                    raise ProtocolError("The server uses a dynamic header table, which the client does not allow.")
                continue
            indexed, bits = (True, 7) if first & 0x80 else (False, 6 if first & 0x40 else 4)
            index, at = _read_integer(block, at, bits)
            if index > _STATIC_ENTRIES or (indexed and not index):
                raise ProtocolError("The server refers to the dynamic header table, which the client does not allow.")
            name = ":status" if index in _STATUSES else ""
            if indexed:
                value = _STATUSES.get(index, "")
            else:
                if not index:
                    name, at = _read_text(block, at)
                value, at = _read_text(block, at)
            headers[name] = value
    except IndexError:
        raise ProtocolError("The server sent a header block that ends too early.") from None
    return headers


def _read_integer(block: bytes, at: int, bits: int) -> tuple[int, int]:
    most = (1 << bits) - 1
    value, at = block[at] & most, at + 1
    if value < most:
        return value, at
    for shift in range(0, 28, 7):
        byte, at = block[at], at + 1
        value += (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ProtocolError("The server sent a header with a number that is too large.")


def _read_text(block: bytes, at: int) -> tuple[str, int]:
    is_coded = block[at] & 0x80
    length, at = _read_integer(block, at, 7)
    data = block[at : at + length]
    if len(data) < length:
        raise ProtocolError("The server sent a header that ends too early.")
    return (_decoded(data) if is_coded else data).decode("latin-1"), at + length


@lru_cache(maxsize=1)
def _codes() -> Mapping[tuple[int, int], int]:
    """Return the symbol by length and value of its code. Codes of one length are numbered in the symbols' order."""
    codes: dict[tuple[int, int], int] = {}
    value = before = 0
    for length, symbol in sorted((ord(letter) - 60, symbol) for symbol, letter in enumerate(_CODE_LENGTHS)):
        value <<= length - before
        codes[length, value] = symbol
        value, before = value + 1, length
    return codes


def _decoded(data: bytes) -> bytes:
    codes, text = _codes(), bytearray()
    length = value = 0
    for bit in _bits(data):
        length, value = length + 1, value << 1 | bit
        symbol = codes.get((length, value))
        if symbol is not None:
            if symbol > 255:
                raise ProtocolError("The server sent a header with an encoded end-of-string symbol.")
            text.append(symbol)
            length = value = 0
    if length > 7 or value != (1 << length) - 1:
        raise ProtocolError("The server sent a header with wrong padding.")
    return bytes(text)


def _bits(data: bytes) -> Iterable[int]:
    return (byte >> shift & 1 for byte in data for shift in range(7, -1, -1))
