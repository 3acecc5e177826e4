"""WebSocket frames that a server sends: one event is one text frame, never compressed, never masked (RFC 6455, 5.2)."""

from __future__ import annotations

import struct

_TEXT = 0x81  # final frame, text


def text_frame(payload: bytes) -> bytes:
    """The frame of a text message."""
    size = len(payload)
    if size < 126:
        return bytes((_TEXT, size)) + payload
    if size < 1 << 16:
        return struct.pack("!BBH", _TEXT, 126, size) + payload
    return struct.pack("!BBQ", _TEXT, 127, size) + payload
