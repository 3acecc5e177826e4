"""What daemon and engine child say to each other: msgpack messages, each behind its length (4 bytes, little endian)."""

from __future__ import annotations

import struct
from typing import Generic, TypeVar

import msgspec

from ..protocol import Emission, EngineOptions, EngineStats, Job, ModelInfo, Prompt

_LENGTH = struct.Struct("<I")
_LONGEST = 64 * 1024 * 1024  # bytes: a prompt is at most a request body


class FrameError(Exception):
    """The bytes are no frame, or the frame is no message. There is no way to find the next one: the link is lost."""


# --- daemon → child --------------------------------------------------------------------------------------------------


class Load(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """First, and once."""

    options: EngineOptions


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    jobs: tuple[Job, ...]


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    jobs: tuple[int, ...]


class Count(msgspec.Struct, frozen=True, array_like=True, tag="count"):
    ask: int
    prompt: Prompt


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    ask: int


ToChild = Load | Submit | Cancel | Count | Ping

# --- child → daemon --------------------------------------------------------------------------------------------------


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    info: ModelInfo


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The model cannot be loaded, or the engine cannot go on; the child ends after it."""

    code: str  # of router.errors
    detail: str


class Step(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """All that one step made."""

    emissions: tuple[Emission, ...]
    waiting: int
    tokens_per_s: float  # of one stream


class Counted(msgspec.Struct, frozen=True, array_like=True, tag="counted"):
    ask: int
    tokens: int  # -1: this prompt cannot be counted, submitting it says why


class Pong(msgspec.Struct, frozen=True, array_like=True, tag="pong"):
    ask: int
    stats: EngineStats


FromChild = Ready | Failed | Step | Counted | Pong

M = TypeVar("M")
_encoder = msgspec.msgpack.Encoder()


def encode(message: ToChild | FromChild) -> bytearray:
    """A whole frame."""
    frame = bytearray(_LENGTH.size)
    _encoder.encode_into(message, frame, _LENGTH.size)
    _LENGTH.pack_into(frame, 0, len(frame) - _LENGTH.size)
    return frame


class FrameReader(Generic[M]):
    """Bytes in any pieces to messages. Raises FrameError; after that it is of no more use."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[M]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> list[M]:
        """The messages that are whole now."""
        buffer = self._buffer
        buffer += data
        messages: list[M] = []
        start = 0
        with memoryview(buffer) as view:
            while len(buffer) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(buffer, start)
                if length > _LONGEST:
                    raise FrameError(f"a frame of {length} bytes; the longest is {_LONGEST}")
                end = start + _LENGTH.size + length
                if len(buffer) < end:
                    break
                try:
                    messages.append(self._decoder.decode(view[start + _LENGTH.size : end]))
                except msgspec.DecodeError as error:
                    raise FrameError(f"not a message: {error}") from error
                start = end
        del buffer[:start]
        return messages


def to_child() -> FrameReader[ToChild]:
    return FrameReader(msgspec.msgpack.Decoder(ToChild))


def from_child() -> FrameReader[FromChild]:
    return FrameReader(msgspec.msgpack.Decoder(FromChild))
