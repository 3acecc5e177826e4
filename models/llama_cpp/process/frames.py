"""Messages between daemon and engine child: msgpack, each behind its length (4 bytes, little endian)."""

from __future__ import annotations

import struct
from typing import Generic, TypeVar

import msgspec

from ..protocol import Emission, EngineOptions, EngineStats, Job, ModelInfo, Prompt

LENGTH = struct.Struct("<I")
_MAX_BYTES = 64 * 1024 * 1024  # a prompt is at most a request body


class FrameError(Exception):
    """The bytes are not a frame, or the frame is not a message. The next frame cannot be found: the link is lost."""


# --- daemon → child --------------------------------------------------------------------------------------------------


class Load(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """The first message, sent once."""

    options: EngineOptions


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    jobs: tuple[Job, ...]


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    jobs: tuple[int, ...]


class Count(msgspec.Struct, frozen=True, array_like=True, tag="count"):
    request_id: int
    prompt: Prompt


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """Asks for the statistics; there is one `Pong` for each."""


DaemonMessage = Load | Submit | Cancel | Count | Ping

# --- child → daemon --------------------------------------------------------------------------------------------------


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    info: ModelInfo


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The model cannot be loaded, or the engine cannot continue; the child exits after it."""

    code: str  # of router.errors
    detail: str


class Step(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """The emissions of one step, and the engine's load after it."""

    emissions: tuple[Emission, ...]
    waiting: int
    tokens_per_s: float  # of one sequence


class Counted(msgspec.Struct, frozen=True, array_like=True, tag="counted"):
    request_id: int
    tokens: int  # -1: this prompt cannot be counted; submitting it returns the reason


class Pong(msgspec.Struct, frozen=True, array_like=True, tag="pong"):
    stats: EngineStats


ChildMessage = Ready | Failed | Step | Counted | Pong

M = TypeVar("M")
_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytearray:
    """Encode a message as a whole frame: msgpack behind its length."""
    frame = bytearray(LENGTH.size)
    _encoder.encode_into(message, frame, LENGTH.size)
    LENGTH.pack_into(frame, 0, len(frame) - LENGTH.size)
    return frame


class FrameReader(Generic[M]):
    """Decodes messages from bytes that arrive in arbitrary pieces. It cannot be used after a FrameError."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[M]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> list[M]:
        """Add bytes; return the messages that are complete.

        Raises:
            FrameError: the bytes are not a frame, or the frame is not a message.
        """
        buffer = self._buffer
        buffer += data
        messages: list[M] = []
        start = 0
        with memoryview(buffer) as view:
            while len(buffer) - start >= LENGTH.size:
                (length,) = LENGTH.unpack_from(buffer, start)
                if length > _MAX_BYTES:
                    raise FrameError(f"a frame of {length} bytes; the longest is {_MAX_BYTES}")
                end = start + LENGTH.size + length
                if len(buffer) < end:
                    break
                try:
                    messages.append(self._decoder.decode(view[start + LENGTH.size : end]))
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise FrameError(f"not a message: {error}") from error
                start = end
        del buffer[:start]
        return messages


def daemon_message_reader() -> FrameReader[DaemonMessage]:
    """Return the child's reader."""
    return FrameReader(msgspec.msgpack.Decoder(DaemonMessage))


def child_message_reader() -> FrameReader[ChildMessage]:
    """Return the daemon's reader."""
    return FrameReader(msgspec.msgpack.Decoder(ChildMessage))
